"""Host memory for gradients: a small ring of slabs, and the arena for when all gradients must coexist."""

import queue
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_megatrain.memory.arena import Arena
from lightning_megatrain.memory.layout import Group


class SlabRing:
    """A few pinned host buffers, each large enough for the gradients of one group.

    Args:
        count: number of slabs.
        numel: elements of the largest group's gradients.
        dtype: gradient dtype.
        pin: register with CUDA.
    """

    def __init__(self, count: int, numel: int, dtype: torch.dtype, *, pin: bool) -> None:
        self._arenas = [Arena(numel * dtype.itemsize, pin=pin) for _ in range(count)]
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for arena in self._arenas:
            self._free.put(arena.view(dtype, numel))

    @property
    def nbytes(self) -> int:
        """Host bytes of all slabs."""
        return sum(arena.nbytes for arena in self._arenas)

    def take(self, timeout: float | None = None) -> Tensor | None:
        """Wait up to ``timeout`` seconds (None: for ever) for a free slab; None when there was none."""
        try:
            return self._free.get(timeout=timeout)
        except queue.Empty:
            return None

    def give(self, slab: Tensor) -> None:
        """Return a slab; its contents are lost."""
        self._free.put(slab)

    def close(self) -> None:
        """Unregister all slabs."""
        for arena in self._arenas:
            arena.close()


class GradientArena:
    """Host gradients of all groups at once, allocated group by group on first need.

    Args:
        groups: the store's groups.
        dtype: gradient dtype.
        pin: register with CUDA.
    """

    def __init__(self, groups: Sequence[Group], dtype: torch.dtype, *, pin: bool) -> None:
        self._groups = tuple(groups)
        self._dtype = dtype
        self._pin = pin
        self._arenas: dict[int, Arena] = {}
        self._flat: dict[int, Tensor] = {}
        self._views: dict[int, list[Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Host bytes allocated so far."""
        return sum(arena.nbytes for arena in self._arenas.values())

    def holds(self, group: int) -> bool:
        """Whether memory for the group was allocated."""
        return group in self._arenas

    def flat(self, group: int) -> Tensor:
        """Flat gradients of a group, ``[trainable_numel]``; zeros when new."""
        self._ensure(group)
        return self._flat[group]

    def views(self, group: int) -> list[Tensor]:
        """Gradient of each trainable parameter in its shape, in layout order."""
        self._ensure(group)
        return self._views[group]

    def leave(self, group: int, index: int) -> None:
        """If somebody keeps the gradient that :meth:`views` gave out, let them have it: with memory of its own."""
        views = self.views(group)
        if sys.getrefcount(views[index]) <= 2:  # the list's reference, and the call's
            return
        kept = views[index]
        with torch.inference_mode(False):
            views[index] = kept.detach()
            kept.data = kept.clone()

    def close(self) -> None:
        """Unregister all arenas."""
        for arena in self._arenas.values():
            arena.close()

    def _ensure(self, group: int) -> None:
        if group in self._arenas:
            return
        layout, size = self._groups[group].layout, self._dtype.itemsize
        with torch.inference_mode(False):
            arena = Arena(layout.trainable_numel * size, pin=self._pin)
            self._flat[group] = arena.view(self._dtype, layout.trainable_numel)
            self._views[group] = [
                arena.view(self._dtype, e.numel, e.offset * size).view(e.shape) for e in layout.entries if e.trainable
            ]
        self._arenas[group] = arena
