"""The sharded checkpoint: a folder written by ``torch.distributed.checkpoint``, part by part.

Its files are named as those of Lightning's own sharded strategies: ``.metadata`` and ``*.distcp`` hold the tensors of
``model`` and ``optimizer_0``, ``optimizer_1``, ...; ``meta.pt`` holds everything else.
"""

import io
import os
import pickle
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    SavePlan,
    WriteItem,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from lightning_megatrain.checkpoint.lazy import PART_BYTES, LazyTensor, TensorSource, chunk_of, is_dense, tensors_in
from lightning_megatrain.checkpoint.single import read_single, write_single
from lightning_megatrain.memory.progress import working

META_FILE = "meta.pt"
"""Everything that is no large tensor, as ``torch.save`` writes it."""

_INDEX_FILE = ".metadata"

FILES = (re.escape(_INDEX_FILE), re.escape(META_FILE), r".*\.distcp")
"""Names of all files of such a folder, as patterns."""

# There is one process, as torch guesses and warns. Once and for all: `catch_warnings` would be felt by other threads.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
_MODEL, _OPTIMIZER = "model", "optimizer_"


class _Planner(DefaultSavePlanner):
    """Writes tensors in a given order, and tells the bytes of each."""

    def __init__(self, order: Callable[[Tensor], int], advance: Callable[[int], None]) -> None:
        super().__init__()
        self._order = order
        self._advance = advance
        self._written: Tensor | None = None

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        # torch's writer keeps every tensor until its file is complete: take the memory of the last one away.
        if self._written is not None:
            self._written.untyped_storage().resize_(0)
            self._written = None
        data = super().resolve_data(write_item)
        if isinstance(data, Tensor):
            self._advance(data.nbytes)
            if isinstance(self.state_dict[write_item.index.fqn], LazyTensor):
                self._written = data = data.clone()
        return data

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = sorted(plan.items, key=lambda item: self._order(self.state_dict[item.index.fqn]))
        self.plan = replace(plan, items=items)
        return self.plan


def write_sharded(
    checkpoint: dict[str, Any], folder: Path, *, order: Callable[[Tensor], int] = lambda tensor: 0
) -> None:
    """Write a Lightning checkpoint to a folder that does not exist yet.

    Args:
        checkpoint: the checkpoint; lazy tensors are read part by part, as they are written.
        folder: where to; made durable file by file.
        order: tensors with a lower value are written first.
    """
    tensors, rest = _take_apart(checkpoint)
    folder.mkdir()
    write_single(rest, folder / META_FILE)
    # With anything ahead of the write, torch reads parts early and in an order of its own where there is a GPU.
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    with working("Saving the checkpoint", sum(t.nbytes for t in tensors_in(tensors))) as advance:
        dcp.save(tensors, storage_writer=writer, planner=_Planner(order, advance), no_dist=True)


def read_sharded(folder: Path, *, weights_only: bool | None) -> dict[str, Any]:
    """The checkpoint in a folder, in the form of a plain one; its large tensors are read when they are used.

    Args:
        folder: a folder that :func:`write_sharded` wrote.
        weights_only: as for ``torch.load``; None for its default.

    Raises:
        ValueError: the folder holds no such checkpoint, or a part of it is missing or cut short.
        pickle.UnpicklingError: the checkpoint holds objects that ``weights_only=True`` refuses.
    """
    for name in (_INDEX_FILE, META_FILE):
        if not (folder / name).is_file():
            raise ValueError(
                f"{folder} has no {name}, so it is not a sharded checkpoint of this strategy or was not written whole; "
                "use another one."
            )
    reader = _Reader(folder)
    metadata = reader.read_metadata()
    reader.check_files()
    checkpoint = read_single(folder / META_FILE, weights_only=weights_only)
    found: dict[str, Any] = {}
    for name, stored in metadata.state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata):
            raise ValueError(f"{folder} holds {name!r} in a form that this strategy did not write; use another one.")
        at: Any = found
        if name not in (metadata.planner_data or {}):
            raise ValueError(
                f"{folder} does not say where {name!r} belongs, so this strategy did not write it; use another one."
            )
        *path, last = metadata.planner_data[name]
        for step in path:
            at = at.setdefault(step, {})
        at[last] = LazyTensor(_Stored(reader, name, stored))
    _put_together(checkpoint, found)
    return checkpoint


def is_sharded(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder, as sharded checkpoints are."""
    return os.path.isdir(path)


def _take_apart(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of the model and of the optimizers, and the rest."""
    rest = dict(checkpoint)
    state = rest.pop("state_dict", {})
    tensors: dict[str, Any] = {_MODEL: {k: _in_parts(v) for k, v in state.items() if is_dense(v)}}
    rest["state_dict"] = OrderedDict((k, v) for k, v in state.items() if not is_dense(v))
    rest["state_dict_metadata"] = getattr(state, "_metadata", None)
    if "optimizer_states" in checkpoint:
        rest["optimizer_states"] = []
        for number, optimizer in enumerate(checkpoint["optimizer_states"]):
            kept = {**optimizer, "state": {}}
            moved: dict[str, dict[str, Tensor]] = {}
            for key, values in optimizer.get("state", {}).items():
                if not isinstance(values, dict):
                    kept["state"][key] = values
                    continue
                large = {n: _in_parts(v) for n, v in values.items() if is_dense(v) and v.dim()}
                kept["state"][key] = {n: v for n, v in values.items() if n not in large}
                if large:
                    moved[str(key)] = large
            rest["optimizer_states"].append(kept)
            if moved:
                tensors[f"{_OPTIMIZER}{number}"] = {"state": moved}
    return tensors, rest


def _put_together(checkpoint: dict[str, Any], found: dict[str, Any]) -> None:
    """The reverse, in place."""
    state = OrderedDict({**found.get(_MODEL, {}), **checkpoint.pop("state_dict", {})})
    metadata = checkpoint.pop("state_dict_metadata", None)
    if metadata is not None:
        state._metadata = metadata  # type: ignore[attr-defined]
    checkpoint["state_dict"] = state
    for number, optimizer in enumerate(checkpoint.get("optimizer_states", [])):
        moved = found.get(f"{_OPTIMIZER}{number}", {}).get("state", {})
        for key, values in optimizer["state"].items():
            if str(key) in moved:
                values.update(moved[str(key)])


def _in_parts(tensor: Tensor) -> Tensor:
    """A large tensor as a lazy one, so that it is written, and can be read again, in parts."""
    if isinstance(tensor, LazyTensor) or tensor.numel() * tensor.element_size() <= PART_BYTES:
        return tensor
    return LazyTensor(TensorSource(tensor.cpu()))


class _Reader(FileSystemReader):
    """Reads the index once, and unpickles nothing but the classes that an index is made of."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            path = self._folder / _INDEX_FILE
            try:
                self._metadata = _IndexUnpickler(io.BytesIO(path.read_bytes())).load()
                assert isinstance(self._metadata, Metadata)
            except Exception as error:
                raise ValueError(f"{path} is cut short or damaged ({error}); use an earlier checkpoint.") from error
        return self._metadata

    def check_files(self) -> None:
        """Raise ``ValueError`` unless every file is there, as long as the index says."""
        ends: dict[str, int] = {}
        for info in (self.read_metadata().storage_data or {}).values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in ends.items():
            path = self._folder / name
            size = path.stat().st_size if path.is_file() else 0
            if size < end:
                raise ValueError(
                    f"{path} has {size} bytes where the checkpoint's index needs {end}; it is not whole, so use an "
                    "earlier one."
                )


class _IndexUnpickler(pickle.Unpickler):
    """Unpickles what an index is made of and no other class: unpickling may run any code."""

    _modules = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")

    def find_class(self, module: str, name: str) -> Any:
        if module in self._modules and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ in self._modules:
                return found
        if module == "torch" and (
            name == "Size" or isinstance(getattr(torch, name, None), (torch.dtype, torch.layout))
        ):
            return getattr(torch, name)
        if (module, name) in _HARMLESS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no index holds")


_HARMLESS = {("torch.serialization", "_get_layout"), ("collections", "OrderedDict"), *(
    (module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")
)}  # fmt: skip


class _Stored:
    """Values of one tensor in a folder."""

    def __init__(self, reader: _Reader, name: str, stored: TensorStorageMetadata) -> None:
        self._reader, self._name = reader, name
        self.shape, self.dtype = stored.size, stored.properties.dtype

    def read(self, start: int, stop: int) -> Tensor:
        target = _Part(self.shape, slice(start, stop), self.dtype)
        dcp.load(
            {self._name: target}, storage_reader=self._reader, planner=DefaultLoadPlanner(flatten_state_dict=False),
            no_dist=True,
        )  # fmt: skip
        return target.held.view(stop - start, *self.shape[1:])


class _Part(Tensor):
    """What torch.distributed.checkpoint takes for a tensor of which this process holds some rows."""

    held: Tensor
    rows: slice

    @staticmethod
    def __new__(cls, shape: torch.Size, rows: slice, dtype: torch.dtype) -> "_Part":
        part = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device("cpu"))
        part.rows = rows
        part.held = torch.empty(chunk_of(shape, rows).sizes, dtype=dtype)
        return part

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise TypeError(f"{func} is not defined for a part of a stored tensor.")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk_of(self.shape, self.rows)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.held
