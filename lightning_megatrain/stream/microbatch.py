"""Cutting a batch inside a unit."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


class Slices:
    """How the tensors of one use are cut along the batch.

    The batch is dimension 0 of the first floating-point tensor with dimensions. Tensors of that leading size are cut,
    all others go whole to every slice.

    Args:
        unit: qualified name, for errors.
        tensors: the tensors of the use.
        size: largest slice, or None for one slice that is the whole batch.

    Raises:
        RuntimeError: batch and sequence have the same size, and a tensor could belong to either.
    """

    def __init__(self, unit: str, tensors: Sequence[Tensor], size: int | None) -> None:
        lead = next((t for t in tensors if t.is_floating_point() and t.dim() > 0), None)
        self._unit = unit
        self._batch = 0 if lead is None else lead.shape[0]
        self.whole = size is None or self._batch <= size
        self._size = self._batch if size is None or self.whole else size
        if not self.whole and lead is not None and lead.dim() > 2 and lead.shape[1] == self._batch:
            others = [t for t in tensors if t is not lead and t.dim() > 0 and t.shape[0] == self._batch]
            if any(t.dim() < 3 for t in others):
                raise RuntimeError(
                    f"Unit {unit!r} got {self._batch} rows of {self._batch} positions and a tensor of that leading "
                    "size, which may be a mask over positions or belong to the batch; set another batch size, or "
                    "MegaTrainStrategy(microbatch=None)."
                )
        self.cut = [not self.whole and t.dim() > 0 and t.shape[0] == self._batch for t in tensors]

    def __iter__(self) -> Iterator[slice]:
        if self.whole:
            yield slice(None)
            return
        for start in range(0, self._batch, self._size):
            yield slice(start, min(start + self._size, self._batch))

    def take(self, tensors: Sequence[Tensor], part: slice) -> list[Tensor]:
        """The inputs of one slice."""
        return [t[part] if cut else t for t, cut in zip(tensors, self.cut, strict=True)]

    def join(self, parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Whole outputs from the outputs of each slice.

        Raises:
            RuntimeError: an output has no batch dimension, so slices of it cannot be put together.
        """
        if self.whole:
            return list(parts[0])
        rows = [part.stop - part.start for part in self]
        for outputs, count in zip(parts, rows, strict=True):
            for output in outputs:
                if output.dim() == 0 or output.shape[0] != count:
                    raise RuntimeError(
                        f"Unit {self._unit!r} returns a tensor of shape {tuple(output.shape)} for a slice of {count} "
                        "rows, which cannot be joined along the batch; set MegaTrainStrategy(microbatch=None)."
                    )
        return [torch.cat(list(column)) for column in zip(*parts, strict=True)]
