"""Cutting a batch inside a unit."""

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

TOKENS = 16384
"""Tokens of a slice from which matrix products run at their full rate: larger ones only take more memory."""


def rows_of_slices(rows: int, tokens: int, most: int = TOKENS) -> int | None:
    """Rows of a slice if a batch of ``rows`` rows of ``tokens`` tokens is cut into nearly equal ones.

    A slice has no more than ``most`` tokens, unless one row has. None: the batch need not be cut.
    """
    slices = -(-rows // max(1, most // max(1, tokens)))
    return None if slices <= 1 else -(-rows // slices)


class SliceRows:
    """How many rows of a batch go through a unit at once.

    Args:
        asked: a number of rows, ``"auto"`` for as many as :data:`TOKENS` have room in, or None for all.
    """

    def __init__(self, asked: "int | Literal['auto'] | None") -> None:
        self._asked = asked
        self._tokens = TOKENS

    def of(self, tensors: Sequence[Tensor]) -> int | None:
        """Rows of a slice of these inputs, in slices of nearly equal size; None for all."""
        if self._asked != "auto":
            return self._asked
        lead = _lead(tensors)
        if lead is None:
            return None
        return rows_of_slices(lead.shape[0], lead[..., 0].numel() // max(1, lead.shape[0]), self._tokens)

    def leave_whole(self) -> bool:
        """A batch cannot be cut, and need not be if that was left to us: cut none from now on."""
        if self._asked != "auto":
            return False
        self._asked = None
        return True

    def shrink(self, tensors: Sequence[Tensor], rows: int | None) -> bool:
        """Take half as many from now on, if it was left to us and slices of ``rows`` can be cut."""
        lead = _lead(tensors)
        if self._asked != "auto" or lead is None or (rows or lead.shape[0]) < 2:
            return False
        per_row = max(1, lead[..., 0].numel() // lead.shape[0])
        self._tokens = max(per_row, (rows or lead.shape[0]) // 2 * per_row)
        return True


def _lead(tensors: Sequence[Tensor]) -> Tensor | None:
    return next((t for t in tensors if t.is_floating_point() and t.dim() > 0), None)


class CannotCutError(RuntimeError):
    """A batch cannot be cut, or what came of its slices not be joined."""


class Slices:
    """How the tensors of one use are cut along the batch.

    The batch is dimension 0 of the first floating-point tensor with dimensions. Tensors of that leading size are cut,
    all others go whole to every slice.

    Args:
        unit: qualified name, for errors.
        tensors: the tensors of the use.
        size: largest slice, or None for one slice that is the whole batch.

    Raises:
        CannotCutError: batch and sequence have the same size, and a tensor could belong to either.
    """

    def __init__(self, unit: str, tensors: Sequence[Tensor], size: int | None) -> None:
        lead = _lead(tensors)
        self._unit = unit
        self._batch = 0 if lead is None else lead.shape[0]
        self.whole = size is None or self._batch <= size
        self._size = self._batch if size is None or self.whole else size
        if not self.whole and lead is not None and lead.dim() > 2 and lead.shape[1] == self._batch:
            others = [t for t in tensors if t is not lead and t.dim() > 0 and t.shape[0] == self._batch]
            if any(t.dim() < 3 for t in others):
                raise CannotCutError(
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

    @property
    def count(self) -> int:
        """How many there are."""
        return 1 if self.whole else -(-self._batch // self._size)

    def is_last(self, part: slice) -> bool:
        """Whether ``part`` ends the batch."""
        return self.whole or part.stop == self._batch

    def take(self, tensors: Sequence[Tensor], part: slice) -> list[Tensor]:
        """The inputs of one slice."""
        return [t[part] if cut else t for t, cut in zip(tensors, self.cut, strict=True)]

    def join(self, parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Whole outputs from the outputs of each slice.

        Raises:
            CannotCutError: an output has no batch dimension, so slices of it cannot be put together.
        """
        if self.whole:
            return list(parts[0])
        rows = [part.stop - part.start for part in self]
        for outputs, count in zip(parts, rows, strict=True):
            for output in outputs:
                if output.dim() == 0 or output.shape[0] != count:
                    raise CannotCutError(
                        f"Unit {self._unit!r} returns a tensor of shape {tuple(output.shape)} for a slice of {count} "
                        "rows, which cannot be joined along the batch; set MegaTrainStrategy(microbatch=None)."
                    )
        return [torch.cat(list(column)) for column in zip(*parts, strict=True)]
