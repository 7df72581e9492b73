"""Device buffers that hold the units being worked on."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_megatrain.memory.layout import Group


@dataclass(eq=False)
class Slot:
    """One device buffer and what it holds.

    ``group`` and ``version`` name the wire bytes inside (``group`` is None while empty); ``users`` counts binds that
    have not been released; ``kept`` says that it is not to be recycled. ``filled`` (the fetch that wrote it) and
    ``released`` (the point after its last reader) are the engine's marks.
    """

    buffer: Tensor
    group: int | None = None
    version: int = -1
    users: int = 0
    last_use: int = 0
    kept: bool = False
    views: dict[int, list[Tensor]] = field(default_factory=dict)
    filled: Any = None
    released: Any = None

    def views_of(self, group: Group) -> list[Tensor]:
        """Parameter views of the slot for ``group``, in layout order; made once."""
        if group.index not in self.views:
            self.views[group.index] = group.layout.views(self.buffer[: group.layout.numel])
        return self.views[group.index]


class SlotRing:
    """A number of equal slots, recycled least recently used first, beside those that are kept.

    Args:
        count: number of slots; at least one.
        numel: elements of the largest group that must fit.
        dtype: wire dtype.
        device: where the slots live.
    """

    def __init__(self, count: int, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._numel, self._dtype, self._device = numel, dtype, device
        self.slots = [self._new() for _ in range(count)]
        self._clock = 0

    def _new(self) -> Slot:
        # A slot made under inference_mode could never be written again outside of it (validate, then fit).
        with torch.inference_mode(False):
            return Slot(torch.empty(self._numel, dtype=self._dtype, device=self._device))

    @property
    def nbytes(self) -> int:
        """Device bytes of all slots."""
        return sum(slot.buffer.nbytes for slot in self.slots)

    def find(self, group: int, version: int) -> Slot | None:
        """The slot that holds these very bytes, or None."""
        return next((s for s in self.slots if s.group == group and s.version == version), None)

    def take(self, group: int, version: int) -> Slot | None:
        """Claim the slot unused for longest for new contents; None when every slot is bound."""
        free = [slot for slot in self.slots if slot.users == 0 and not slot.kept]
        if not free:
            return None
        slot = min(free, key=lambda s: (s.group is not None, s.last_use))
        slot.group, slot.version = group, version
        self.touch(slot)
        return slot

    def touch(self, slot: Slot) -> None:
        """Mark as used just now."""
        self._clock += 1
        slot.last_use = self._clock

    def keep(self, slot: Slot) -> Slot:
        """Recycle ``slot`` no more, and another in its stead, which is returned.

        Raises:
            torch.OutOfMemoryError: there is no memory for another one; nothing has changed.
        """
        other = self._new()
        self.slots.append(other)
        slot.kept = True
        return other

    def let_go(self) -> int:
        """Free the slots that are kept and not bound; their bytes."""
        gone = [slot for slot in self.slots if slot.kept and slot.users == 0]
        self.slots = [slot for slot in self.slots if slot not in gone]
        return sum(slot.buffer.nbytes for slot in gone)

    def clear(self) -> None:
        """Forget all contents but of slots that are kept; nothing may be bound."""
        for slot in self.slots:
            slot.users = 0
            if not slot.kept:
                slot.group = None
