"""The plain ``.ckpt``: what ``torch.save`` writes, without the model's bytes in memory a second time."""

import os
import pickle
import zipfile
from collections.abc import Callable
from typing import IO, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.serialization import DEFAULT_PROTOCOL, _open_zipfile_writer, _save

from lightning_megatrain.checkpoint.files import first_line
from lightning_megatrain.checkpoint.lazy import PART_BYTES, LazyTensor, TensorSource, hollow, pickled_as, tensors_in
from lightning_megatrain.memory.mapped import FileMappings, give_pages_back
from lightning_megatrain.memory.progress import working


class _Writer:
    """Stands in for torch's archive writer: replaces stand-ins by values, one tensor at a time."""

    def __init__(self, archive: Any, advance: Callable[[int], None]) -> None:
        self._archive = archive
        self._advance = advance
        self._lazy: dict[int, LazyTensor] = {}

    def stand_in(self, lazy: LazyTensor) -> Tensor:
        tensor = hollow(lazy.shape, lazy.dtype)
        if tensor.numel():
            self._lazy[tensor.data_ptr()] = lazy
        return tensor

    def write_record(self, name: str, data: Any, size: int) -> None:
        if not isinstance(data, torch.UntypedStorage):
            self._archive.write_record(name, data, size)
            return
        lazy = self._lazy.get(data.data_ptr())
        self._archive.write_record(name, data if lazy is None else lazy.materialize().untyped_storage(), size)
        self._advance(size)


def write_single(checkpoint: dict[str, Any], file: str | os.PathLike[str] | IO[bytes]) -> None:
    """Write what ``torch.save(checkpoint, file)`` would, with lazy tensors read one after another.

    Args:
        checkpoint: the checkpoint; :class:`LazyTensor` may stand anywhere in it.
        file: where to; not made durable here.
    """
    with (
        _open_zipfile_writer(os.fspath(file) if isinstance(file, os.PathLike) else file) as archive,
        working("Saving the checkpoint", _bytes_written(checkpoint)) as advance,
    ):
        writer = _Writer(archive, advance)
        with pickled_as(writer.stand_in):
            _save(checkpoint, writer, pickle, DEFAULT_PROTOCOL, False)


def _bytes_written(checkpoint: dict[str, Any]) -> int:
    """Bytes of all values; of a storage that several tensors share, once."""
    sizes: dict[int, int] = {}
    for tensor in tensors_in(checkpoint):
        if isinstance(tensor, LazyTensor):
            sizes[id(tensor)] = tensor.nbytes
        elif type(tensor) in (Tensor, Parameter) and tensor.layout is torch.strided:  # others may have no storage
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def read_single(path: str | os.PathLike[str], *, weights_only: bool | None) -> dict[str, Any]:
    """Load a ``.ckpt`` with its tensors mapped from the file: they take memory as they are read.

    Args:
        path: a local file.
        weights_only: as for ``torch.load``; None for its default.

    Raises:
        ValueError: the file is no checkpoint, or is cut short.
        pickle.UnpicklingError: the checkpoint holds objects that ``weights_only=True`` refuses.
    """
    try:
        # Files of torch 1.5 and before are no archives and cannot be mapped.
        mappable = zipfile.is_zipfile(path)
        checkpoint = torch.load(path, map_location="cpu", mmap=mappable, weights_only=weights_only)
    except Exception as error:
        if mappable and isinstance(error, pickle.UnpicklingError):
            raise
        reason = first_line(error)
        raise ValueError(
            f"{os.fspath(path)} cannot be read as a checkpoint; it was cut short or is of another kind ({reason}), so "
            "use an earlier one."
        ) from error
    if not isinstance(checkpoint, dict):
        raise ValueError(
            f"{os.fspath(path)} holds a {type(checkpoint).__name__} and no Lightning checkpoint; use another one."
        )
    return checkpoint


def parts_of(tensor: Tensor, mappings: FileMappings) -> Tensor:
    """A large tensor that is mapped from a file, as one whose pages are given back as they are read.

    Any other as it is, and so are tensors of a file of which somebody changed some. For use at once: the mapping must
    still be the same one.
    """
    size = tensor.numel() * tensor.element_size()
    if isinstance(tensor, LazyTensor) or size < PART_BYTES // 16 or not mappings.hold(tensor):
        return tensor
    return LazyTensor(TensorSource(tensor, after=give_pages_back))
