"""Conversations for fine-tuning: tokens, loss on answers only, packed rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatrain.recipes.bytes_data import SeededOrder
from lightning_megatrain.recipes.chat_template import ChatTokenizer
from lightning_megatrain.recipes.packable import make_packable
from lightning_megatrain.recipes.packing import PackedCollate, PaddedCollate, Rows, SequenceBuilder, Sequences, pack
from lightning_megatrain.recipes.records import BadRecord, Message, Place, read_jsonl
from lightning_megatrain.recipes.resumable import ResumableLoader

_PLACES_SHOWN = 5


@dataclass
class SplitReport:
    """What one side of the split was made into.

    Attributes:
        records: conversations kept.
        truncated: of these, how many were longer than a row and lost their end.
        tokens_lost: tokens so cut off, those of dropped records included.
        dropped: conversations left out since no answer was left within a row.
        tokens: kept.
        targets: of these, how many carry loss.
        rows: of `seq_len` tokens or less that hold them.
    """

    records: int = 0
    truncated: int = 0
    tokens_lost: int = 0
    dropped: int = 0
    tokens: int = 0
    targets: int = 0
    rows: int = 0

    def __str__(self) -> str:
        return (
            f"{self.records} conversations ({self.truncated} truncated, {self.dropped} dropped, {self.tokens_lost} "
            f"tokens lost), {self.tokens} tokens ({self.targets} of answers) in {self.rows} rows"
        )


@dataclass
class DataReport:
    """What was read, and what became of it.

    Attributes:
        train: the training side.
        val: the validation side.
        bad_records: how many were skipped.
        bad_places: the first of them, each as `FILE:LINE: reason`.
    """

    train: SplitReport = field(default_factory=SplitReport)
    val: SplitReport = field(default_factory=SplitReport)
    bad_records: int = 0
    bad_places: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"Training data: {self.train}.", f"Validation data: {self.val}."]
        if self.bad_records:
            shown = "".join(f"\n  {place}" for place in self.bad_places)
            more = self.bad_records - len(self.bad_places)
            lines.append(f"Skipped {self.bad_records} bad records:{shown}" + (f"\n  and {more} more" if more else ""))
        return "\n".join(lines)


class ChatData(L.LightningDataModule):
    """Conversations from anywhere, as batches of packed or padded rows; a subclass says where they come from.

    Batches carry `input_ids` and `labels`, int64 (rows, time), with `position_ids` when packed, else with
    `attention_mask`, and the number of real tokens. Labels are aligned with `input_ids`, and -100 wherever no loss is
    taken: outside the assistant's turns, on padding, and on the first token of each sequence.

    Rows are packed once, when data is set up. The order of the rows is a function of `seed` and the epoch alone.

    Args:
        tokenizer: Hugging Face directory or name.
        chat_template: instead of the tokenizer's own: a file's path, or the template itself.
        seq_len: tokens of a row; what is longer is cut at its end, counted and reported.
        batch_size: rows of a training batch.
        val_batch_size: rows of a validation batch.
        packing: whether a row holds as many sequences as fit, or one, padded to the longest of its batch.
        on_bad_record: "raise" stops at a record that cannot be used, "skip" counts and reports it.
        vocab_size: tokens that the model knows; None does not check it. Here so that a model's configuration can refer
            to it.
        seed: of the packing and of the train order.

    Raises:
        ValueError: if a size or choice is out of range.
    """

    def __init__(
        self,
        *,
        tokenizer: str | None,
        chat_template: str | None = None,
        seq_len: int = 2048,
        batch_size: int = 4,
        val_batch_size: int = 4,
        packing: bool = True,
        on_bad_record: Literal["raise", "skip"] = "raise",
        vocab_size: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if seq_len < 2:
            raise ValueError(f"data.seq_len={seq_len} must be at least 2, one token to read and one to predict.")
        if min(batch_size, val_batch_size) < 1:
            raise ValueError(
                f"data.batch_size={batch_size} and data.val_batch_size={val_batch_size} must be at least 1."
            )
        if on_bad_record not in ("raise", "skip"):
            raise ValueError(f"data.on_bad_record={on_bad_record!r} must be raise or skip.")
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.val_batch_size = val_batch_size
        self.packing = packing
        self.on_bad_record = on_bad_record
        self.vocab_size = vocab_size
        self.seed = seed
        self.report = DataReport()
        self._train: Sequences | None = None
        self._val: Sequences | None = None
        self._train_rows = Rows([])
        self._val_rows = Rows([])

    def records(self) -> Iterator[tuple[bool, Place, list[Message] | BadRecord]]:
        """Yield each record: whether it is for validation, where it stands, its messages or what is wrong with it."""
        raise NotImplementedError

    def load_tokenizer(self) -> Any:
        """Return the tokenizer, or the name it can be loaded by."""
        if self.tokenizer is None:
            raise ValueError(
                "A tokenizer was needed, and data.tokenizer is null; set it to a Hugging Face directory or name."
            )
        return self.tokenizer

    @cached_property
    def chat(self) -> ChatTokenizer:
        """The tokenizer and its chat template.

        Raises:
            ValueError: if there is none, or it has more tokens than the model.
        """
        chat = ChatTokenizer(self.load_tokenizer(), self.chat_template)
        if self.vocab_size is not None and len(chat) > self.vocab_size:
            raise ValueError(
                f"The tokenizer has {len(chat)} tokens, and data.vocab_size={self.vocab_size}; set it to at least as "
                "many, and the model's vocabulary with it."
            )
        return chat

    def setup(self, stage: str) -> None:
        """Read and tokenize everything, once, whatever the stage.

        Raises:
            ValueError: at a bad record, with its file and line, unless they are skipped.
            RuntimeError: if the rows do not fill one training batch.
        """
        if self._train is not None:
            return
        self.report = DataReport()
        train, val = SequenceBuilder(), SequenceBuilder()
        for is_validation, place, record in self.records():
            builder, counts = (val, self.report.val) if is_validation else (train, self.report.train)
            try:
                if isinstance(record, BadRecord):
                    raise record
                tokens, targets = self.chat.tokens(record)
            except BadRecord as error:
                self._bad(place, error)
            else:
                self._add(builder, counts, tokens, targets)
        self._train, self._train_rows = self._rows(train, self.report.train)
        self._val, self._val_rows = self._rows(val, self.report.val)
        rank_zero_info(str(self.report))
        if len(self._train_rows) < self.batch_size:
            raise RuntimeError(
                f"The training data fills {len(self._train_rows)} rows of {self.seq_len} tokens, fewer than one batch "
                f"of {self.batch_size}; set a smaller data.batch_size or data.seq_len, or give more data."
            )

    def train_dataloader(self) -> ResumableLoader:
        """Batches of `batch_size` rows in seeded random order; the last, smaller one is dropped.

        A resumed fit goes on at the batch after the checkpoint's.
        """
        assert self._train is not None, "setup() comes first"
        self._check_model()
        order = SeededOrder(len(self._train_rows), self.seed)
        return ResumableLoader(
            self._train_rows,
            batch_size=self.batch_size,
            sampler=order,
            collate_fn=self._collate(self._train),
            drop_last=True,
        )

    def val_dataloader(self) -> DataLoader[list[int]] | list[Any]:
        """Batches of `val_batch_size` rows in fixed order; no loader if nothing was set aside for validation."""
        assert self._val is not None, "setup() comes first"
        if len(self._val_rows) == 0:
            return []
        self._check_model()
        return DataLoader(self._val_rows, batch_size=self.val_batch_size, collate_fn=self._collate(self._val))

    def encode(self, text: str) -> Tensor:
        """Render `text` as a user's message, ready to be answered: int64 (tokens,)."""
        return torch.tensor(self.chat.prompt(text), dtype=torch.int64)

    def decode(self, tokens: Tensor) -> str:
        """Turn tokens of shape (time,) into text, special tokens included."""
        return self.chat.decode(tokens.tolist())

    def _bad(self, place: Place, error: BadRecord) -> None:
        if self.on_bad_record == "raise":
            raise ValueError(f"{place}: {error}; correct it, or set data.on_bad_record=skip.") from error
        self.report.bad_records += 1
        if len(self.report.bad_places) < _PLACES_SHOWN:
            self.report.bad_places.append(f"{place}: {error}")

    def _add(self, builder: SequenceBuilder, counts: SplitReport, tokens: list[int], targets: list[bool]) -> None:
        """Cut a sequence to a row's length, and keep it if there is still something to learn from it."""
        lost = max(0, len(tokens) - self.seq_len)
        counts.tokens_lost += lost
        tokens, targets = tokens[: self.seq_len], targets[: self.seq_len]
        learned = sum(targets[1:])
        if not learned:
            counts.dropped += 1
            counts.tokens_lost += len(tokens)
            return
        builder.add(tokens, targets)
        counts.records += 1
        counts.truncated += lost > 0
        counts.tokens += len(tokens)
        counts.targets += learned

    def _rows(self, builder: SequenceBuilder, counts: SplitReport) -> tuple[Sequences, Rows]:
        sequences = builder.build()
        if self.packing:
            rows = Rows(pack(sequences.lengths, self.seq_len, seed=self.seed))
        else:
            rows = Rows(list(torch.arange(len(sequences)).split(1)) if len(sequences) else [])
        counts.rows = len(rows)
        return sequences, rows

    def _collate(self, sequences: Sequences) -> PackedCollate | PaddedCollate:
        kind = PackedCollate if self.packing else PaddedCollate
        return kind(sequences, self.seq_len, self.chat.pad_id)

    def _check_model(self) -> None:
        """Refuse a model that would mix the sequences of a row, now that there is one: it may be built after setup."""
        if self.packing and self.trainer is not None:
            make_packable(self.trainer.lightning_module)


class ChatJsonl(ChatData):
    """Conversations from JSONL files in OpenAI's, ShareGPT's or alpaca's form; see `parse_record`.

    Args:
        train_path: JSONL file, or several.
        val_path: JSONL file for validation; without it, `val_fraction` of the training records are set aside.
        val_fraction: share of the records, chosen by their content, so that equal records are on one side and the
            split survives reordering. 0 leaves validation out. Not used with `val_path`.
        max_records: good records to take of each file at most; None takes all.
        tokenizer: see `ChatData`, as for all others.

    Raises:
        ValueError: if a size or choice is out of range.
    """

    def __init__(
        self,
        *,
        train_path: str | Sequence[str] | None,
        tokenizer: str | None,
        val_path: str | None = None,
        val_fraction: float = 0.05,
        max_records: int | None = None,
        chat_template: str | None = None,
        seq_len: int = 2048,
        batch_size: int = 4,
        val_batch_size: int = 4,
        packing: bool = True,
        on_bad_record: Literal["raise", "skip"] = "raise",
        vocab_size: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            tokenizer=tokenizer,
            chat_template=chat_template,
            seq_len=seq_len,
            batch_size=batch_size,
            val_batch_size=val_batch_size,
            packing=packing,
            on_bad_record=on_bad_record,
            vocab_size=vocab_size,
            seed=seed,
        )
        if not 0.0 <= val_fraction < 1.0:
            raise ValueError(f"data.val_fraction={val_fraction} must be at least 0 and below 1.")
        if max_records is not None and max_records < 1:
            raise ValueError(f"data.max_records={max_records} must be at least 1, or null for all.")
        paths = [train_path] if isinstance(train_path, str) else list(train_path or ())
        self.train_paths = [Path(path) for path in paths]
        self.val_path = Path(val_path) if val_path else None
        self.val_fraction = val_fraction
        self.max_records = max_records

    def records(self) -> Iterator[tuple[bool, Place, list[Message] | BadRecord]]:
        """Read the training files in their order, and then the validation file.

        Raises:
            ValueError: if there is no training file.
            FileNotFoundError: if one of the files is missing.
        """
        if not self.train_paths:
            raise ValueError("Training data was needed, and data.train_path is null; set it to a JSONL file.")
        for path in self.train_paths:
            for place, record in self._limited(path):
                yield self._is_validation(record), place, record
        if self.val_path is not None:
            for place, record in self._limited(self.val_path):
                yield True, place, record

    def _limited(self, path: Path) -> Iterator[tuple[Place, list[Message] | BadRecord]]:
        good = 0
        for place, record in read_jsonl(path):
            yield place, record
            good += not isinstance(record, BadRecord)
            if good == self.max_records:
                return

    def _is_validation(self, record: list[Message] | BadRecord) -> bool:
        if self.val_path is not None or isinstance(record, BadRecord):
            return False
        digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
        return int(digest[:8], 16) < self.val_fraction * 2**32
