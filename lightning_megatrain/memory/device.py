"""How much memory of the device a run may take, and what its allocator says."""

from abc import ABC, abstractmethod

import torch

from lightning_megatrain.memory.host import format_bytes, parse_bytes

SPENDABLE = 0.92
"""Part of the limit that is spent on purpose: the rest is for what lies between the allocator's blocks."""


class DeviceMemory(ABC):
    """Bytes of the device that computes. Asking never waits for it.

    Attributes:
        limit: bytes that may be allocated.
    """

    limit: int

    @abstractmethod
    def allocated(self) -> int:
        """Bytes in tensors now."""

    @abstractmethod
    def peak(self) -> int:
        """The most bytes in tensors at any time since the last reset by whoever reads such numbers."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Let :meth:`peak` count from now on."""

    def close(self) -> None:
        """Take back what was set for this run."""
        return


class CudaMemory(DeviceMemory):
    """Memory of one CUDA device.

    A limit of the user's is one of torch's allocator, so that what it keeps in reserve counts as well: at the limit it
    gives its reserve back, and only then is a request refused.

    Args:
        device: the device.
        wanted: ``"auto"`` for what is free, or a size such as ``"24GiB"``, a number of bytes, or a fraction of the
            device's memory.

    Raises:
        ValueError: ``wanted`` is no size.
        RuntimeError: it is more than the device has.
    """

    def __init__(self, device: torch.device, wanted: str | int | float = "auto") -> None:
        self._device = device
        free, total = torch.cuda.mem_get_info(device)
        self._capped = wanted != "auto"
        # What this process has reserved already is free for it.
        self.limit = free + torch.cuda.memory_reserved(device) if wanted == "auto" else parse_bytes(wanted, total=total)
        if self.limit > total:
            raise RuntimeError(
                f"device_memory={wanted!r} is {format_bytes(self.limit)}, but the device has {format_bytes(total)}; "
                "set device_memory='auto' or a smaller size."
            )
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # not in every release
        self._fraction = 1.0 if fraction is None else fraction(device)
        if not self._capped:
            self.limit = min(self.limit, int(self._fraction * total))
        else:
            torch.cuda.set_per_process_memory_fraction(self.limit / total, device)
        self.reset_peak()  # what ran before in this process is not this run's

    def allocated(self) -> int:  # noqa: D102
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:  # noqa: D102
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:  # noqa: D102
        torch.cuda.reset_peak_memory_stats(self._device)

    def close(self) -> None:  # noqa: D102
        if self._capped:
            torch.cuda.set_per_process_memory_fraction(self._fraction, self._device)


def device_memory(device: torch.device, wanted: str | int | float = "auto") -> DeviceMemory | None:
    """The memory of a device that has its own, with the user's limit; None for the CPU.

    Raises:
        ValueError: ``wanted`` is no size.
        RuntimeError: it is more than the device has.
    """
    return CudaMemory(device, wanted) if device.type == "cuda" else None
