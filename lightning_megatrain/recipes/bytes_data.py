"""Real text that every Python has: the standard library's own source files, byte by byte."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_megatrain.recipes.resumable import ResumableLoader

SEPARATOR = b"\0"
"""Stands before every file. Python refuses source text with null bytes, so it cannot occur inside one."""

VOCABULARY = 256

# Left out: installed packages, folders that some distributions do not ship, and tables of generated data.
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "idlelib", "turtledemo"}
    | {"tkinter", "lib2to3", "ensurepip", "pydoc_data", "encodings"}
)
_SKIPPED_PREFIXES = ("_sysconfigdata", "_sysconfig_vars")
_VALIDATION_SHARE = 20  # one file in twenty


def stdlib_sources(root: Path | None = None) -> list[Path]:
    """List the standard library's source files, relative to `root`, in the order of their hashed names.

    That order depends on names only, never on how a file system lists them, and mixes the packages well, so that any
    prefix of the list is a fair sample and two Python installs that share files share their order.

    Args:
        root: a folder of Python sources; by default the standard library of the running interpreter.

    Raises:
        RuntimeError: if there is no source file under `root`.
    """
    root = root or stdlib_root()
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS and not name.startswith("config-")]
        sources = [name for name in names if name.endswith(".py") and not name.startswith(_SKIPPED_PREFIXES)]
        found.extend((Path(folder) / name).relative_to(root) for name in sources)
    if not found:
        raise RuntimeError(
            f"No Python source file under {root}: where the standard library ships compiled, set data.root to a folder "
            "of Python sources."
        )
    return sorted(found, key=_name_hash)


def stdlib_root() -> Path:
    """Return the folder that holds the running interpreter's standard library."""
    return Path(sysconfig.get_paths().get("stdlib") or Path(os.__file__).parent)


def is_validation(path: Path) -> bool:
    """Tell on which side of the split a file lies; `path` is relative to the standard library."""
    return int(_name_hash(path)[:8], 16) % _VALIDATION_SHARE == 0


def _name_hash(path: Path) -> str:
    return hashlib.sha256(path.as_posix().encode()).hexdigest()


class StdlibBytes(L.LightningDataModule):
    """Fixed-length windows of bytes over the standard library, split into train and validation by file.

    Batches are `{"input_ids": int64 (batch, seq_len)}` with values below 256 and no padding. The train order is a
    function of `seed` and the epoch alone. Validation windows are spaced evenly over all validation files.

    Args:
        vocab_size: must be 256; here so that a model's configuration can refer to it.
        seq_len: bytes per window, at least 2.
        batch_size: windows per training batch.
        max_train_bytes: bytes of training text to read, so that every Python install trains on about the same amount.
        val_windows: validation windows, or fewer where there are not as many.
        val_batch_size: windows per validation batch.
        seed: of the train order.
        root: folder of Python sources; by default the running interpreter's standard library.

    Raises:
        ValueError: if a size is out of range.
    """

    def __init__(
        self,
        *,
        vocab_size: int = VOCABULARY,
        seq_len: int = 128,
        batch_size: int = 8,
        max_train_bytes: int = 4 << 20,
        val_windows: int = 512,
        val_batch_size: int = 32,
        seed: int = 0,
        root: str | None = None,
    ) -> None:
        super().__init__()
        if vocab_size != VOCABULARY:
            raise ValueError(f"data.vocab_size={vocab_size} must be {VOCABULARY}: the tokens are bytes.")
        if seq_len < 2:
            raise ValueError(f"data.seq_len={seq_len} must be at least 2, one byte to read and one to predict.")
        if min(batch_size, val_batch_size, val_windows) < 1:
            raise ValueError("data.batch_size, data.val_batch_size and data.val_windows must be at least 1.")
        if max_train_bytes < seq_len * batch_size:
            raise ValueError(
                f"data.max_train_bytes={max_train_bytes} does not fill one batch of {batch_size} x {seq_len} bytes; "
                f"set {batch_size * seq_len} or more."
            )
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.max_train_bytes = max_train_bytes
        self.val_windows = val_windows
        self.val_batch_size = val_batch_size
        self.seed = seed
        self.root = Path(root) if root else stdlib_root()
        self._train: Windows | None = None
        self._val: Windows | None = None

    def setup(self, stage: str) -> None:
        """Read the files, once, whatever the stage.

        Raises:
            RuntimeError: if the files do not fill one training batch and one validation window.
        """
        if self._train is not None:
            return
        files = stdlib_sources(self.root)
        train = _read(self.root, [path for path in files if not is_validation(path)], limit=self.max_train_bytes)
        val = _read(self.root, [path for path in files if is_validation(path)])
        if len(train) < self.seq_len * self.batch_size or len(val) < self.seq_len:
            raise RuntimeError(
                f"{self.root} holds {len(train)} bytes for training and {len(val)} for validation, too few for "
                f"windows of {self.seq_len} bytes; set a smaller data.seq_len or data.batch_size."
            )
        self._train = Windows.cut(train, self.seq_len)
        self._val = Windows.cut(val, self.seq_len).spread(self.val_windows)

    def train_dataloader(self) -> ResumableLoader:
        """Batches of `batch_size` windows in seeded random order; the last, smaller one is dropped.

        A resumed fit goes on at the batch after the checkpoint's.
        """
        assert self._train is not None, "setup() comes first"
        order = SeededOrder(len(self._train), self.seed)
        return ResumableLoader(self._train, batch_size=self.batch_size, sampler=order, drop_last=True)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Batches of `val_batch_size` windows in fixed order."""
        assert self._val is not None, "setup() comes first"
        return DataLoader(self._val, batch_size=self.val_batch_size)

    @staticmethod
    def encode(text: str) -> Tensor:
        """Turn text into tokens: int64 of shape (UTF-8 bytes,)."""
        return torch.tensor(list(text.encode()), dtype=torch.int64)

    @staticmethod
    def decode(tokens: Tensor) -> str:
        """Turn tokens of shape (time,) into text; what is no byte, and bytes that are no UTF-8, become `\ufffd`.

        A model may have a larger vocabulary than bytes need.
        """
        no_text = 0xFF
        return bytes(token if token < 256 else no_text for token in tokens.tolist()).decode(errors="replace")


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of equal length, kept as one uint8 tensor of shape (windows, seq_len)."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    @classmethod
    def cut(cls, text: bytes | bytearray, seq_len: int) -> Windows:
        """Cut `text` into windows that do not overlap; a shorter rest is dropped."""
        count = len(text) // seq_len
        data = torch.frombuffer(bytearray(text[: count * seq_len]), dtype=torch.uint8)
        return cls(data.view(count, seq_len))

    def spread(self, count: int) -> Windows:
        """Keep at most `count` windows, spaced evenly over all of them."""
        total = len(self)
        if total <= count:
            return self
        return Windows(self.data[torch.arange(count) * total // count])

    def __len__(self) -> int:
        return self.data.shape[0]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.data[index].long()}


class SeededOrder(Sampler[int]):
    """A random order that is a function of seed and epoch alone, so that every strategy and run sees the same one.

    Args:
        length: items to order.
        seed: of the order.
    """

    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of this epoch; Lightning calls it before each one."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        # An epoch and a seed must not be interchangeable, hence the product and not the sum.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        yield from torch.randperm(self.length, generator=generator).tolist()

    def __len__(self) -> int:
        return self.length


def _read(root: Path, files: list[Path], limit: int | None = None) -> bytearray:
    """Join files, each behind a separator, until `limit` bytes are there."""
    text = bytearray()
    for path in files:
        text += SEPARATOR + (root / path).read_bytes()
        if limit is not None and len(text) >= limit:
            return text[:limit]
    return text
