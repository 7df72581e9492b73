"""The plain ``.ckpt``: what ``torch.save`` writes, without the model's bytes in memory a second time."""

import os
import pickle
import zipfile
from typing import IO, Any

import torch
from torch import Tensor
from torch.serialization import DEFAULT_PROTOCOL, _open_zipfile_writer, _save

from lightning_megatrain.checkpoint.files import first_line
from lightning_megatrain.checkpoint.lazy import PART_BYTES, LazyTensor, TensorSource, hollow, pickled_as
from lightning_megatrain.memory.mapped import FileMappings, give_pages_back


class _Writer:
    """Stands in for torch's archive writer: replaces stand-ins by values, one tensor at a time."""

    def __init__(self, archive: Any) -> None:
        self._archive = archive
        self._lazy: dict[int, LazyTensor] = {}

    def stand_in(self, lazy: LazyTensor) -> Tensor:
        tensor = hollow(lazy.shape, lazy.dtype)
        if tensor.numel():
            self._lazy[tensor.data_ptr()] = lazy
        return tensor

    def write_record(self, name: str, data: Any, size: int) -> None:
        lazy = self._lazy.get(data.data_ptr()) if isinstance(data, torch.UntypedStorage) else None
        self._archive.write_record(name, data if lazy is None else lazy.materialize().untyped_storage(), size)


def write_single(checkpoint: dict[str, Any], file: str | os.PathLike[str] | IO[bytes]) -> None:
    """Write what ``torch.save(checkpoint, file)`` would, with lazy tensors read one after another.

    Args:
        checkpoint: the checkpoint; :class:`LazyTensor` may stand anywhere in it.
        file: where to; not made durable here.
    """
    with _open_zipfile_writer(os.fspath(file) if isinstance(file, os.PathLike) else file) as archive:
        writer = _Writer(archive)
        with pickled_as(writer.stand_in):
            _save(checkpoint, writer, pickle, DEFAULT_PROTOCOL, False)


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
        raise ValueError(f"{os.fspath(path)} holds a {type(checkpoint).__name__} and no Lightning checkpoint.")
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
