"""Sequences of different lengths in rows of one length, each sequence for itself."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_megatrain.callbacks.throughput import NUM_TOKENS
from lightning_megatrain.recipes.loss import IGNORE_INDEX

PAD_MULTIPLE = 8
"""Padded batches have a length that is a multiple of it, for which matrix units have their fastest kernels."""


class Sequences:
    """Token sequences and their targets, end to end in two flat tensors.

    Attributes:
        tokens: int32 (tokens,).
        targets: bool (tokens,), true where a token carries loss.
        starts: int64 (sequences + 1,), the first token of each, and the end.
    """

    def __init__(self, tokens: Tensor, targets: Tensor, starts: Tensor) -> None:
        self.tokens = tokens
        self.targets = targets
        self.starts = starts

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence, int64 (sequences,)."""
        return self.starts.diff()

    def take(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a sequence's tokens and labels, both int64 (time,); no copy of the store is kept."""
        part = slice(int(self.starts[index]), int(self.starts[index + 1]))
        tokens = self.tokens[part].long()
        return tokens, tokens.masked_fill(~self.targets[part], IGNORE_INDEX)


class SequenceBuilder:
    """Collects sequences in the bytes that they will need in the end: five for each token."""

    def __init__(self) -> None:
        self._tokens = array("i")
        self._targets = bytearray()
        self._starts = array("q", [0])

    def add(self, tokens: Sequence[int], targets: Sequence[bool]) -> None:
        """Append a sequence. Its first token is never a target, as nothing of the sequence stands before it."""
        self._tokens.extend(tokens)
        self._targets += bytes([0, *map(bool, targets[1:])])
        self._starts.append(len(self._tokens))

    def build(self) -> Sequences:
        """Return all sequences; the builder must not be used afterwards."""
        if not self._tokens:
            empty = torch.empty(0, dtype=torch.int32)
            return Sequences(empty, empty.bool(), torch.zeros(1, dtype=torch.int64))
        return Sequences(
            torch.frombuffer(self._tokens, dtype=torch.int32),
            torch.frombuffer(self._targets, dtype=torch.bool),
            torch.tensor(self._starts, dtype=torch.int64),
        )


def pack(lengths: Tensor, row_len: int, *, seed: int) -> list[Tensor]:
    """Put whole sequences into as few rows as best-fit-decreasing finds.

    The longest sequence comes first, and each goes into the fullest row that still has room for it; that takes at most
    11/9 of the optimum and six rows more (Johnson, 1973). Among sequences of equal length a seeded order decides, so
    that neighbours in the file are not neighbours in a row.

    Args:
        lengths: tokens of each sequence, int64 (sequences,).
        row_len: tokens of a row.
        seed: of the order among equals, and of the sequences within a row.

    Returns:
        For each row the indices of its sequences, int64.

    Raises:
        ValueError: if a sequence is longer than a row.
    """
    if len(lengths) and int(lengths.max()) > row_len:
        raise ValueError(
            f"A sequence of {int(lengths.max())} tokens does not fit into a row of {row_len}; set longer rows."
        )
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(lengths), generator=generator)
    order = order[torch.argsort(lengths[order], descending=True, stable=True)]
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}  # by room left: rows
    rooms: list[int] = []  # its keys, in order
    for index, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        at = bisect_left(rooms, length)
        if at == len(rooms):
            row, room = len(rows), row_len
            rows.append([])
        else:
            room = rooms[at]
            row = open_rows[room].pop()
            if not open_rows[room]:
                del open_rows[room], rooms[at]
        rows[row].append(index)
        if left := room - length:
            if left not in open_rows:
                open_rows[left] = []
                insort(rooms, left)
            open_rows[left].append(row)
    return [torch.tensor(row)[torch.randperm(len(row), generator=generator)] for row in rows]


class Rows(Dataset[list[int]]):
    """What a data loader draws: each item is a list of the sequences that share a row.

    Args:
        members: for each row the indices of its sequences, int64.
    """

    def __init__(self, members: Sequence[Tensor]) -> None:
        # One flat tensor in place of many small ones, which would cost more than what they hold.
        self.members = torch.cat(list(members)) if members else torch.empty(0, dtype=torch.int64)
        sizes = torch.tensor([0, *map(len, members)])
        self.starts = sizes.cumsum(0)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> list[int]:
        return self.members[self.starts[index] : self.starts[index + 1]].tolist()


class PackedCollate:
    """Make a batch of rows that hold several sequences each.

    The batch has `input_ids`, `labels` and `position_ids`, int64 (rows, row_len), and the number of real tokens. There
    is no attention mask: positions that start again tell transformers' models where a sequence begins, and they keep
    attention, sliding windows included, within it. They make a mask of it, of rows x row_len x row_len elements. The
    rest of a row is a sequence of its own without targets.

    Args:
        sequences: the store.
        row_len: tokens of a row.
        pad_id: token that fills the rest of a row.
    """

    def __init__(self, sequences: Sequences, row_len: int, pad_id: int) -> None:
        self.sequences = sequences
        self.row_len = row_len
        self.pad_id = pad_id

    def __call__(self, rows: list[list[int]]) -> dict[str, Any]:
        """Make the batch; `rows` lists the sequences of each row."""
        input_ids = torch.full((len(rows), self.row_len), self.pad_id)
        labels = torch.full_like(input_ids, IGNORE_INDEX)
        position_ids = torch.zeros_like(input_ids)
        total = 0
        for row, members in enumerate(rows):
            end = 0
            for index in members:
                tokens, targets = self.sequences.take(index)
                start, end = end, end + len(tokens)
                input_ids[row, start:end] = tokens
                labels[row, start:end] = targets
                position_ids[row, start:end] = torch.arange(len(tokens))
            position_ids[row, end:] = torch.arange(self.row_len - end)
            total += end
        return {"input_ids": input_ids, "labels": labels, "position_ids": position_ids, NUM_TOKENS: total}


class PaddedCollate:
    """Make a batch with one sequence per row, padded on the right.

    The batch has `input_ids`, `labels` and `attention_mask` (1 for real tokens), int64 (rows, time), and the number of
    real tokens. Time is the longest sequence's, rounded up to a multiple of eight but to no more than `row_len`.

    Args:
        sequences: the store.
        row_len: tokens of the longest possible row.
        pad_id: token that fills rows.
    """

    def __init__(self, sequences: Sequences, row_len: int, pad_id: int) -> None:
        self.sequences = sequences
        self.row_len = row_len
        self.pad_id = pad_id

    def __call__(self, rows: list[list[int]]) -> dict[str, Any]:
        """Make the batch; each of `rows` lists one sequence."""
        taken = [self.sequences.take(index) for [index] in rows]
        longest = max(len(tokens) for tokens, _ in taken)
        time = min(-(-longest // PAD_MULTIPLE) * PAD_MULTIPLE, self.row_len)
        input_ids = torch.full((len(rows), time), self.pad_id)
        labels = torch.full_like(input_ids, IGNORE_INDEX)
        attention_mask = torch.zeros_like(input_ids)
        for row, (tokens, targets) in enumerate(taken):
            input_ids[row, : len(tokens)] = tokens
            labels[row, : len(tokens)] = targets
            attention_mask[row, : len(tokens)] = 1
        total = sum(len(tokens) for tokens, _ in taken)
        return {"input_ids": input_ids, "labels": labels, "attention_mask": attention_mask, NUM_TOKENS: total}
