"""Devices whose memory is what a test says."""

from lightning_megatrain.memory.device import DeviceMemory


class Room(DeviceMemory):
    """A device of ``limit`` bytes, of which so many are taken and so many were at most."""

    limit = 10**12

    def __init__(self, limit: int | None = None, *, taken: int = 10**6, most: int = 10**7) -> None:
        self.limit = self.limit if limit is None else limit
        self.taken, self.most = taken, most

    def allocated(self) -> int:
        return self.taken

    def peak(self) -> int:
        return self.most

    def reset_peak(self) -> None:
        return
