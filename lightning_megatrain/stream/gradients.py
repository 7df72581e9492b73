"""Gradients on the device, between autograd and the push."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_megatrain.memory.layout import Group
from lightning_megatrain.stream.microbatch import Slices
from lightning_megatrain.stream.streams import Event, Streams

GRADIENT_BUFFERS = 2
"""Device gradient buffers: one is filled while the other is pushed."""


def fill(views: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Copy gradients into the views of their places, zeros where there is none."""
    present = [(v, g) for v, g in zip(views, gradients, strict=True) if g is not None]
    torch._foreach_copy_([v for v, _ in present], [g for _, g in present])
    for view, gradient in zip(views, gradients, strict=True):
        if gradient is None:
            view.zero_()


class GradientBuffers:
    """Two device buffers in which a unit's gradients are packed for one push.

    Args:
        groups: all groups; buffers fit the largest unit.
        dtype: gradient dtype.
        streams: the lanes of the device.
    """

    def __init__(self, groups: Sequence[Group], dtype: torch.dtype, streams: Streams) -> None:
        numel = max(g.layout.trainable_numel for g in groups if not g.resident)
        self._streams = streams
        with torch.inference_mode(False):  # zeros: the padding between parameters is never written
            self._flat = [torch.zeros(numel, dtype=dtype, device=streams.device) for _ in range(GRADIENT_BUFFERS)]
        self._pushed = [Event() for _ in self._flat]
        self._filled_for: list[int | None] = [None for _ in self._flat]
        self._turn = 0

    @property
    def nbytes(self) -> int:
        """Device bytes held."""
        return sum(flat.nbytes for flat in self._flat)

    def pack(self, group: Group, gradients: Sequence[Tensor | None]) -> Tensor:
        """Copy gradients to their offsets in the next buffer, zeros where there is none.

        Returns:
            The packed ``[trainable_numel]`` gradients. Report the push of it with :meth:`pushed`.
        """
        self._turn = (self._turn + 1) % len(self._flat)
        self._streams.compute_after(self._pushed[self._turn])
        flat = self._flat[self._turn][: group.layout.trainable_numel]
        if self._filled_for[self._turn] != group.index:
            flat.zero_()  # another unit's gradients may lie where this one has padding
            self._filled_for[self._turn] = group.index
        fill(group.layout.views(flat), gradients)
        return flat

    def pushed(self, done: Event) -> None:
        """The buffer packed last may be filled again after ``done``."""
        self._pushed[self._turn] = done


class ParameterGradients:
    """Sum of parameter gradients over the slices of a batch, added in fp32.

    One or two slices are left in their own dtype: an addition of two is done in fp32 and rounded once in any case, and
    this way it moves a third of the bytes.
    """

    def __init__(self, count: int, slices: Slices) -> None:
        self._wide = slices.count > 2
        self._sums: list[Tensor | None] = [None] * count

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of one slice."""
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            so_far = self._sums[i]
            if so_far is None:
                # A new tensor even from fp32: autograd may have handed out one that the graph still holds.
                self._sums[i] = gradient.to(torch.float32, copy=True) if self._wide else gradient
            elif self._wide:
                so_far.add_(gradient)
            else:
                self._sums[i] = so_far + gradient

    def result(self) -> Iterator[Tensor | None]:
        """The sums, in order."""
        return iter(self._sums)


class InputGradients:
    """Gradients of a use's inputs: those that are cut along the batch are joined, those that go whole are summed."""

    def __init__(self, slices: Slices, needs: Sequence[bool]) -> None:
        self._slices = slices
        self._needs = needs
        self._cut = [cut for cut, need in zip(slices.cut, needs, strict=True) if need]
        self._parts: list[Sequence[Tensor | None]] = []

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Take the gradients of one slice, for the inputs that need them."""
        self._parts.append(gradients)

    def result(self) -> list[Tensor | None]:
        """One gradient per input of the use; None where none is needed or none flowed."""
        joined = iter([self._join([part[i] for part in self._parts], cut) for i, cut in enumerate(self._cut)])
        return [next(joined) if need else None for need in self._needs]

    def _join(self, parts: list[Tensor | None], cut: bool) -> Tensor | None:
        found = [p for p in parts if p is not None]
        if len(parts) == 1 or not found:
            return parts[0]
        if not cut:
            return torch.stack(found).sum(0)
        rows = [part.stop - part.start for part in self._slices]
        filled = [
            found[0].new_zeros(count, *found[0].shape[1:]) if p is None else p
            for p, count in zip(parts, rows, strict=True)
        ]
        return torch.cat(filled)


_NORM_ROW = 1 << 14


def flat_norm(gradient: Tensor) -> Tensor:
    """Euclidean norm of a gradient, a double: summed in fp32 over short rows and in double over the rows' norms.

    One fp32 sum over a whole unit would lose the last places, and a double copy of it would take four times its memory.
    """
    flat = gradient.reshape(-1)
    whole = flat.numel() - flat.numel() % _NORM_ROW
    rows = [flat[:whole].view(-1, _NORM_ROW)] if whole else []
    rows += [flat[whole:].view(1, -1)] if whole < flat.numel() else []
    norms = [torch.linalg.vector_norm(r, dim=1, dtype=torch.float32) for r in rows]
    return torch.linalg.vector_norm(torch.cat(norms).double()) if norms else gradient.new_zeros((), dtype=torch.float64)
