"""Tensors that are read when somebody asks for their values: a checkpoint as large as the model, without its bytes."""

import contextlib
import contextvars
import mmap
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.utils._pytree import tree_map_only

from lightning_megatrain.memory.split import join_master

PART_BYTES = 16 * 2**20
"""Largest part, in bytes, in which a tensor is read and written, unless one row of it is larger."""


class Source(Protocol):
    """Where the values of a :class:`LazyTensor` come from."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values."""

    def read(self, start: int, stop: int) -> Tensor:
        """Rows ``[start, stop)`` along dimension 0, with the shape of the others; a tensor of no dimensions is one row.

        The result may be a view of memory that changes later.
        """


class TensorSource:
    """Values of a tensor that is in memory already.

    Args:
        tensor: the tensor.
        after: called with each part that was read, when the next one is asked for or none is left.
    """

    def __init__(self, tensor: Tensor, after: Callable[[Tensor], None] | None = None) -> None:
        self._tensor = tensor.detach()
        self._after = after
        self.shape, self.dtype = tensor.shape, tensor.dtype

    def read(self, start: int, stop: int) -> Tensor:  # noqa: D102
        part = _rows(self._tensor)[start:stop]
        if self._after is None:
            return part
        copy = part.clone()
        self._after(part)
        return copy


class SplitSource:
    """Exact fp32 values of a master that is kept in two halves.

    Args:
        high: bf16, in the parameter's shape, contiguous.
        low: int16 ``[numel]``.
    """

    def __init__(self, high: Tensor, low: Tensor) -> None:
        self._high, self._low = high.detach(), low
        self.shape, self.dtype = high.shape, torch.float32

    def read(self, start: int, stop: int) -> Tensor:  # noqa: D102
        high = _rows(self._high)[start:stop]
        row = self._low.numel() // max(1, len(_rows(self._high)))
        return join_master(high.reshape(-1), self._low[start * row : stop * row]).view(high.shape)


class Watched:
    """Values of another source, copied, and a call once each row was read: then the source may change.

    Args:
        source: the source.
        taken: called once.
    """

    def __init__(self, source: Source, taken: Callable[[], None]) -> None:
        self._source, self._taken = source, taken
        self.shape, self.dtype = source.shape, source.dtype
        self._left = row_count(self.shape)

    def read(self, start: int, stop: int) -> Tensor:  # noqa: D102
        rows = self._source.read(start, stop).clone()
        self._left -= stop - start
        if self._left == 0:
            self._taken()
        return rows


class LazyTensor(Tensor):
    """A CPU tensor that is read part by part where this package knows how, and whole for any other operation.

    ``shape``, ``dtype`` and their like cost nothing; ``other.copy_(lazy)`` reads in parts of :data:`PART_BYTES`;
    anything else works on an ordinary tensor read for the occasion. Pickling and deep-copying give ordinary tensors.

    Args:
        source: where the values come from.
    """

    source: Source

    @staticmethod
    def __new__(cls, source: Source) -> "LazyTensor":  # noqa: D102
        lazy = Tensor._make_wrapper_subclass(cls, source.shape, dtype=source.dtype, device=torch.device("cpu"))
        lazy.source = source
        return lazy

    def __init__(self, source: Source) -> None:
        super().__init__()

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """The rows, part by part, and where they belong along dimension 0."""
        for rows in part_rows(self.shape, self.dtype):
            yield rows, self.source.read(rows.start, rows.stop)

    def materialize(self) -> Tensor:
        """An ordinary tensor of its own."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        for rows, values in self.parts():
            _rows(whole)[rows] = values
        return whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer questions about the form, copy in parts, and read the whole for the rest."""
        kwargs = kwargs or {}
        if func in _FORM:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is Tensor.detach:
            return args[0]
        if func is Tensor.copy_ and not isinstance(args[0], LazyTensor):
            source = args[1] if len(args) > 1 else kwargs["other"]
            if args[0].shape == source.shape:
                return _copy_in_parts(args[0], source)
        name = getattr(func, "__name__", "")
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if (writes and isinstance(args[0], LazyTensor)) or isinstance(kwargs.get("out"), LazyTensor):
            raise RuntimeError(
                f"{name}() would change a tensor of a checkpoint that is read when it is used; clone() it and put the "
                "clone in its place."
            )
        if func in _MEMORY:
            raise RuntimeError(
                f"{name}() asks for the memory of a tensor of a checkpoint that is read when it is used and has none; "
                "clone() it."
            )
        args, kwargs = tree_map_only(LazyTensor, LazyTensor.materialize, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """As :meth:`__torch_function__`, for calls that do not pass through Python."""
        args, kwargs = tree_map_only(LazyTensor, LazyTensor.materialize, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary tensor."""
        stand_in = _stand_ins.get()
        return (self.materialize() if stand_in is None else stand_in(self)).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """An ordinary tensor, except where :func:`kept_in_copies` says otherwise."""
        return self if id(self) in _kept.get() else self.materialize()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Its form only."""
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    # What torch.distributed.checkpoint asks of tensors that it does not know.

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """One item per part."""
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets, index),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for index, chunk in enumerate(self.__create_chunk_list__())
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Place and size of each part."""
        return [chunk_of(self.shape, rows) for rows in part_rows(self.shape, self.dtype)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Values of one part, to be written."""
        start = index.offset[0] if index.offset else 0
        rows = next(r for r in part_rows(self.shape, self.dtype) if r.start == start)
        return self.source.read(rows.start, rows.stop).reshape(chunk_of(self.shape, rows).sizes)


# The form of a tensor: attributes are asked for through their getters.
_FORM = {
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "requires_grad", "is_meta", "is_sparse", "is_cuda", "is_cpu",
                     "is_quantized", "is_leaf", "grad", "grad_fn", "ndim", "itemsize", "nbytes", "is_nested")
    ),
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.element_size, Tensor.is_floating_point,
    Tensor.is_complex, Tensor.is_contiguous, Tensor.nelement, Tensor.ndimension, Tensor.__len__,
}  # fmt: skip


_MEMORY = {Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage, Tensor.storage_offset}


def is_dense(value: Any) -> bool:
    """Whether a value is a tensor that is read and written row by row."""
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized


def tensors_in(node: Any) -> Iterator[Tensor]:
    """Every tensor in nested dicts, lists and tuples; one that stands in several places, several times."""
    yield from _tensors_in(node, set())


def _tensors_in(node: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(node, Tensor):
        yield node
    elif isinstance(node, (dict, list, tuple)) and id(node) not in seen:
        seen.add(id(node))
        for value in node.values() if isinstance(node, dict) else node:
            yield from _tensors_in(value, seen)


def memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for ordinary tensors that are the same memory in the same form, as tied weights are."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def chunk_of(shape: torch.Size, rows: slice) -> ChunkStorageMetadata:
    """Place of some rows in a tensor, as torch.distributed.checkpoint describes it."""
    if not shape:
        return ChunkStorageMetadata(torch.Size(()), torch.Size(()))
    return ChunkStorageMetadata(
        offsets=torch.Size((rows.start, *[0] * (len(shape) - 1))),
        sizes=torch.Size((rows.stop - rows.start, *shape[1:])),
    )


def row_count(shape: torch.Size) -> int:
    """Number of rows along dimension 0; a tensor of no dimensions has one."""
    return shape[0] if shape else 1


def part_rows(shape: torch.Size, dtype: torch.dtype) -> list[slice]:
    """Cut a tensor into parts of :data:`PART_BYTES` along dimension 0. An empty one is one part."""
    count = row_count(shape)
    row_bytes = max(1, shape.numel() // max(1, count) * dtype.itemsize)
    step = max(1, PART_BYTES // row_bytes)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)] or [slice(0, 0)]


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() else tensor.view(1)


def _copy_in_parts(target: Tensor, lazy: LazyTensor) -> Tensor:
    if target.is_meta:  # a no-op, as for ordinary tensors
        return target
    with torch.no_grad():
        for rows, values in lazy.parts():
            _rows(target)[rows].copy_(values)
    return target


# Pickling without the values

_stand_ins: contextvars.ContextVar[Callable[[LazyTensor], Tensor] | None] = contextvars.ContextVar(
    "stand_ins", default=None
)
_kept: contextvars.ContextVar[Collection[int]] = contextvars.ContextVar("kept", default=())


@contextlib.contextmanager
def pickled_as(stand_in: Callable[[LazyTensor], Tensor]) -> Iterator[None]:
    """Inside, lazy tensors are pickled as what ``stand_in`` returns for them."""
    token = _stand_ins.set(stand_in)
    try:
        yield
    finally:
        _stand_ins.reset(token)


@contextlib.contextmanager
def kept_in_copies(ids: Collection[int]) -> Iterator[None]:
    """Inside, a deep copy of a lazy tensor with one of these ``id`` is that tensor."""
    token = _kept.set(ids)
    try:
        yield
    finally:
        _kept.reset(token)


def hollow(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor whose bytes are addresses only: it takes no memory as long as nobody reads it, and cannot be written."""
    if shape.numel() == 0:
        return torch.empty(shape, dtype=dtype)
    size = shape.numel() * dtype.itemsize
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.frombuffer(mapping, dtype=dtype).view(shape)
