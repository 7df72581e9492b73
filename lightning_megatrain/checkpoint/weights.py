"""Weights as safetensors: which tensors, under which names, in files of which size."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from lightning_megatrain.checkpoint.hub import INDEX_FILE, WEIGHTS_FILE
from lightning_megatrain.checkpoint.lazy import LazyTensor, TensorSource, memory_of
from lightning_megatrain.checkpoint.single import parts_of
from lightning_megatrain.memory.mapped import FileMappings
from lightning_megatrain.memory.progress import working

DtypeName = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Written:
    """What was written.

    Args:
        tensors: how many.
        nbytes: bytes of their values.
        files: how many files hold them.
    """

    tensors: int
    nbytes: int
    files: int


def write_weights(
    tensors: Mapping[str, Tensor],
    folder: Path,
    *,
    dtype: DtypeName | None,
    shard_bytes: int,
    spread: Callable[[str, Tensor], Mapping[str, Tensor]] | None = None,
) -> Written:
    """Write tensors to a new folder, with an index if there are several files. One file is in memory at a time.

    Args:
        tensors: by name; those that are mapped from files or read when used are read once, part by part.
        folder: does not exist yet.
        dtype: converts floating-point tensors; None keeps each as it is.
        shard_bytes: most bytes of tensors in one file, unless a single tensor is larger.
        spread: makes of a name and its converted values what is written instead, of as many bytes together.

    Raises:
        ValueError: a tensor is of a kind that safetensors do not keep, or a value does not fit ``dtype``.
    """
    wanted = getattr(torch, dtype) if dtype is not None else None
    forms = {name: _form(name, tensor, wanted) for name, tensor in tensors.items()}
    sizes = {name: tensor.numel() * forms[name].itemsize for name, tensor in tensors.items()}
    shards = _shards(sizes, shard_bytes)
    mappings = FileMappings()
    places: dict[str, str] = {}
    folder.mkdir()
    with working("Writing weights", sum(sizes.values())) as advance:
        for number, names in enumerate(shards, start=1):
            file = WEIGHTS_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            values: dict[str, Tensor] = {}
            for name in names:
                own = _own(name, parts_of(tensors[name], mappings), forms[name])
                values.update({name: own} if spread is None else spread(name, own))
                advance(sizes[name])
            save_file(values, folder / file, metadata={"format": "pt"})
            places.update(dict.fromkeys(values, file))
            del values, own
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return Written(len(places), sum(sizes.values()), len(shards))


def dotted(prefix: str) -> str:
    """A prefix with its dot."""
    return prefix.removesuffix(".") + "."


def without_prefix(tensors: dict[str, Tensor], prefix: str | None, source: Path) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, under what is left of their names; all if there is none.

    Raises:
        ValueError: no name begins with it.
    """
    if not prefix:
        return tensors
    start = dotted(prefix)
    named = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
    if not named:
        raise ValueError(
            f"prefix={prefix!r} is in no name of {source}, whose first is {next(iter(tensors))!r}; set the prefix of "
            "the names to write, or none."
        )
    return named


def without_ties(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors without those that are another one's memory, and the names of these with that of the first.

    A sharded checkpoint does not tell; there all are kept.
    """
    first: dict[Any, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, LazyTensor) or tensor.layout is not torch.strided or not tensor.numel():
            continue
        if first.setdefault(memory_of(tensor), name) != name:
            tied[name] = first[memory_of(tensor)]
    return {name: tensor for name, tensor in tensors.items() if name not in tied}, tied


def _form(name: str, tensor: Tensor, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype in which a tensor is written."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.dtype in (torch.complex32, torch.complex128):
        raise ValueError(
            f"{name!r} ({tensor.layout}, {tensor.dtype}) cannot be kept in safetensors; set a prefix that leaves it "
            "out, or another format."
        )
    return wanted if wanted is not None and tensor.is_floating_point() else tensor.dtype


def _shards(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    """Names by file, in order; a file is closed when the next tensor would make it larger than ``shard_bytes``."""
    shards: list[list[str]] = []
    left = 0
    for name, size in sizes.items():
        if not shards or size > left:
            shards.append([])
            left = shard_bytes
        shards[-1].append(name)
        left -= size
    return shards


def _own(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor of its own, read and converted part by part."""
    lazy = tensor if isinstance(tensor, LazyTensor) else LazyTensor(TensorSource(tensor))
    own = torch.empty(lazy.shape, dtype=dtype)
    narrower = dtype != lazy.dtype and torch.finfo(dtype).max < torch.finfo(lazy.dtype).max
    for rows, values in lazy.parts():
        part = own.view(1)[rows] if not own.dim() else own[rows]
        part.copy_(values)
        if narrower and (part.isinf() & values.isfinite()).any():
            raise ValueError(
                f"{name!r} has values of up to {values[values.isfinite()].abs().max():.3g}, too large for {dtype}, so "
                "they would become infinite; set another dtype."
            )
    return own
