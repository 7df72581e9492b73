"""From one checkpoint format to another, and to safetensors, without the model's bytes in memory."""

import json
import os
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from lightning_megatrain.checkpoint.files import is_local, written_whole
from lightning_megatrain.checkpoint.lazy import LazyTensor, TensorSource, memory_of
from lightning_megatrain.checkpoint.sharded import is_sharded, read_sharded, write_sharded
from lightning_megatrain.checkpoint.single import FileMappings, read_single, write_single
from lightning_megatrain.memory.host import parse_bytes

Format = Literal["ckpt", "sharded", "safetensors"]
DtypeName = Literal["float32", "bfloat16", "float16"]

SUFFIXES: dict[str, str] = {"ckpt": "-single.ckpt", "sharded": "-sharded.ckpt", "safetensors": "-safetensors"}
"""What follows the checkpoint's name, without its ``.ckpt``, where no ``out`` is given."""

INDEX_FILE = "model.safetensors.index.json"
"""Which file holds which tensor, where there are several."""

_EXPORTED = (r"\.metadata", r"meta\.pt", r".*\.distcp", r"model(-\d+-of-\d+)?\.safetensors", re.escape(INDEX_FILE))


@dataclass(frozen=True)
class Export:
    """What an export wrote.

    Args:
        path: where to, absolute.
        tensors: how many of the checkpoint's tensors.
        nbytes: bytes of their values.
        files: how many files hold them.
        tied: safetensors only: names that are not in it, and the name under which their tensor is.
        without_prefix: safetensors only: names of tensors that were left out for want of the prefix.
        no_tensors: safetensors only: names of the state that hold something else and were left out.
    """

    path: Path
    tensors: int
    nbytes: int
    files: int
    tied: Mapping[str, str] = field(default_factory=dict)
    without_prefix: tuple[str, ...] = ()
    no_tensors: tuple[str, ...] = ()


def convert(
    ckpt: str | Path,
    *,
    to: Format,
    out: str | Path | None = None,
    overwrite: bool = False,
    dtype: DtypeName | None = None,
    prefix: str | None = None,
    shard_size: str | int = "2GiB",
    weights_only: bool = True,
) -> Export:
    """Write a checkpoint in another format. What is written appears whole or not at all.

    ``"ckpt"`` (one file) and ``"sharded"`` (a folder) hold all that the checkpoint holds, bit for bit, and resume a
    training. ``"safetensors"`` is a folder with the tensors of the model's state, as Hugging Face lays it out.

    Memory: one tensor for ``"ckpt"``, a few parts of one for ``"sharded"``, one file for ``"safetensors"``, and what of
    the checkpoint is neither in the model's state nor in an optimizer's if it comes from a sharded one.

    Args:
        ckpt: a ``.ckpt`` file or a sharded checkpoint's folder, of this strategy or a stock one.
        to: the format to write.
        out: where to; beside ``ckpt``, with a suffix of :data:`SUFFIXES`, if None.
        overwrite: replace what is at ``out``: a file, or a folder of exported files.
        dtype: safetensors only: converts floating-point tensors; None keeps each as it is.
        prefix: safetensors only: taken off the names, with its dot or without; tensors without it are left out.
        shard_size: safetensors only: most bytes of tensors in one file, unless a single tensor is larger.
        weights_only: unpickle nothing but tensors and plain values; False runs whatever code the file names.

    Returns:
        What was written.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: an argument is not valid or does not apply, ``out`` exists, the checkpoint is not whole or of a kind
            that is not read, or a value does not fit ``dtype``.
    """
    if to not in SUFFIXES:
        raise ValueError(f"to={to!r} is not valid: it must be {' or '.join(SUFFIXES)}.")
    for name, value in (("dtype", dtype), ("prefix", prefix)):
        if value is not None and to != "safetensors":
            raise ValueError(f"{name}={value!r} applies to to=safetensors only; leave it out for to={to}.")
    for name, path in (("ckpt", ckpt), ("out", out)):
        if path is not None and not is_local(path):
            raise ValueError(f"{name}={path} is not on the local file system, which is needed; set a path that is.")
    shard_bytes = _shard_bytes(shard_size)
    source = _source(ckpt, to)
    target = Path(os.path.abspath(Path(out).expanduser())) if out is not None else default_out(source, to)
    _check_target(target, source, overwrite=overwrite)

    checkpoint = _read(source, weights_only=weights_only)
    if to == "safetensors":
        state = checkpoint["state_dict"]
        del checkpoint
        return _write_safetensors(state, source, target, dtype=dtype, prefix=prefix, shard_bytes=shard_bytes)
    _give_pages_back_when_read(checkpoint)
    sizes = [t.numel() * t.element_size() for t in _tensors(checkpoint, set())]
    with written_whole(target) as partial:
        if to == "sharded":
            write_sharded(checkpoint, partial)
        else:
            write_single(checkpoint, partial)
    files = sum(1 for _ in target.iterdir()) if to == "sharded" else 1
    return Export(target, tensors=len(sizes), nbytes=sum(sizes), files=files)


def default_out(ckpt: Path, to: Format) -> Path:
    """Where an export goes if nothing else is said: beside the checkpoint."""
    return ckpt.with_name(ckpt.name.removesuffix(".ckpt") + SUFFIXES[to])


# Before anything is read


def _shard_bytes(text: str | int) -> int:
    try:
        count = parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"shard_size={text!r} is not valid: {error}") from error
    if count < 1:
        raise ValueError(f"shard_size={text!r} is not valid: it must be at least one byte, for instance '2GiB'.")
    return count


def _source(ckpt: str | Path, to: Format) -> Path:
    source = Path(os.path.abspath(Path(ckpt).expanduser()))
    if not source.exists():
        raise FileNotFoundError(f"Checkpoint {ckpt} does not exist; set ckpt to a .ckpt file or a sharded folder.")
    if is_sharded(source) and to == "sharded":
        raise ValueError(f"{ckpt} is a sharded checkpoint already; set to=ckpt or to=safetensors.")
    if not is_sharded(source) and to == "ckpt":
        raise ValueError(f"{ckpt} is a single file already; set to=sharded or to=safetensors.")
    return source


def _check_target(target: Path, source: Path, *, overwrite: bool) -> None:
    real, origin = target.resolve(), source.resolve()
    if real == origin or real in origin.parents or origin in real.parents:
        raise ValueError(f"{target} and the checkpoint {source} would be in each other's place; set another out.")
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise ValueError(f"{target} exists already; set overwrite=true to replace it, or another out.")
    if target.is_dir():
        others = sorted(p.name for p in target.iterdir() if not any(re.fullmatch(e, p.name) for e in _EXPORTED))
        if others:
            raise ValueError(
                f"{target} would be replaced and holds {others[0]!r}, which no export wrote; move that, or set another "
                "out."
            )


# Reading


def _read(source: Path, *, weights_only: bool) -> dict[str, Any]:
    try:
        checkpoint = (read_sharded if is_sharded(source) else read_single)(source, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        raise ValueError(
            f"{source} holds more than tensors and plain values ({name[1] if name else 'of an unknown class'}), which "
            "may run any code when it is read; if you trust the file, set weights_only=false."
        ) from error
    if "state_dict" not in checkpoint:
        raise ValueError(f"{source} has no 'state_dict', so it is not a Lightning checkpoint; set another ckpt.")
    return checkpoint


def _give_pages_back_when_read(checkpoint: dict[str, Any]) -> None:
    """Replace, in place, tensors that are mapped from a file, so that containers keep their class and attributes."""
    mappings = FileMappings()
    replaced: dict[Any, Tensor] = {}  # a tensor under two names stays one
    seen: set[int] = set()

    def replace(tensor: Tensor, *, views: bool) -> Tensor:
        whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        if not (views or whole) or tensor.requires_grad or vars(tensor):
            return tensor
        return replaced.setdefault(memory_of(tensor), mappings.parts_of(tensor))

    def visit(node: Any, *, views: bool) -> None:
        if id(node) in seen:
            return
        seen.add(id(node))
        for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
            if isinstance(value, (dict, list, tuple)):
                visit(value, views=views)
            elif type(value) is Tensor and value.layout is torch.strided and not isinstance(node, tuple):
                node[key] = replace(value, views=views)

    # Of these only values are written, whatever storage they share; elsewhere views of one storage stay that.
    for part in ("state_dict", "optimizer_states"):
        visit(checkpoint.get(part, ()), views=True)
    visit(checkpoint, views=False)


def _tensors(node: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(node, Tensor):
        yield node
    elif isinstance(node, (dict, list, tuple)) and id(node) not in seen:
        seen.add(id(node))
        for value in node.values() if isinstance(node, dict) else node:
            yield from _tensors(value, seen)


# Writing safetensors


def _write_safetensors(
    state: Mapping[str, Any],
    source: Path,
    target: Path,
    *,
    dtype: DtypeName | None,
    prefix: str | None,
    shard_bytes: int,
) -> Export:
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    if not tensors:
        raise ValueError(f"The state_dict of {source} holds no tensor, so there is nothing to write; set another ckpt.")
    named = _without_prefix(tensors, prefix, source)
    kept, tied = _without_ties(named)
    wanted = getattr(torch, dtype) if dtype is not None else None
    forms = {name: _form(name, tensor, wanted) for name, tensor in kept.items()}
    sizes = {name: tensor.numel() * forms[name].itemsize for name, tensor in kept.items()}
    shards = _shards(sizes, shard_bytes)
    mappings = FileMappings()
    places: dict[str, str] = {}
    with written_whole(target) as folder:
        folder.mkdir()
        for number, names in enumerate(shards, start=1):
            file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            values = {name: _own(name, mappings.parts_of(kept[name]), forms[name]) for name in names}
            save_file(values, folder / file, metadata={"format": "pt"})
            del values
            places.update(dict.fromkeys(names, file))
        if len(shards) > 1:
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
            (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return Export(
        target,
        tensors=len(kept),
        nbytes=sum(sizes.values()),
        files=len(shards),
        tied=tied,
        without_prefix=tuple(name for name in tensors if prefix and not name.startswith(_dotted(prefix))),
        no_tensors=tuple(name for name in state if name not in tensors),
    )


def _dotted(prefix: str) -> str:
    return prefix.removesuffix(".") + "."


def _without_prefix(tensors: dict[str, Tensor], prefix: str | None, source: Path) -> dict[str, Tensor]:
    if not prefix:
        return tensors
    start = _dotted(prefix)
    named = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
    if not named:
        raise ValueError(
            f"prefix={prefix!r} is in no name of {source}, whose first is {next(iter(tensors))!r}; set the prefix of "
            "the names to write, or none."
        )
    return named


def _without_ties(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
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
