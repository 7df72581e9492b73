"""From one checkpoint format to another, and to safetensors, without the model's bytes in memory."""

import os
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_megatrain.checkpoint.files import is_local, require_replaceable, written_whole
from lightning_megatrain.checkpoint.hub import INDEX_FILE
from lightning_megatrain.checkpoint.lazy import memory_of, tensors_in
from lightning_megatrain.checkpoint.sharded import FILES, is_sharded, read_sharded, write_sharded
from lightning_megatrain.checkpoint.single import parts_of, read_single, write_single
from lightning_megatrain.checkpoint.weights import DtypeName, dotted, without_prefix, without_ties, write_weights
from lightning_megatrain.memory.host import parse_bytes
from lightning_megatrain.memory.mapped import FileMappings

Format = Literal["ckpt", "sharded", "safetensors"]

SUFFIXES: dict[str, str] = {"ckpt": "-single.ckpt", "sharded": "-sharded.ckpt", "safetensors": "-safetensors"}
"""What follows the checkpoint's name, without its ``.ckpt``, where no ``out`` is given."""

EXPORTED = (*FILES, r"model(-\d+-of-\d+)?\.safetensors", re.escape(INDEX_FILE))
"""Names of files that an export writes, as patterns."""


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
        notes: what else there is to say, a line each.
    """

    path: Path
    tensors: int
    nbytes: int
    files: int
    tied: Mapping[str, str] = field(default_factory=dict)
    without_prefix: tuple[str, ...] = ()
    no_tensors: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


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
            raise ValueError(
                f"{name}={value!r} applies to to=safetensors and to=huggingface; leave it out for to={to}."
            )
    shard_bytes = parse_shard_size(shard_size)
    source, target = find_places(ckpt, out, suffix=SUFFIXES[to])
    if to in ("ckpt", "sharded") and is_sharded(source) == (to == "sharded"):
        what, other = ("a sharded checkpoint", "ckpt") if to == "sharded" else ("a single file", "sharded")
        raise ValueError(f"{ckpt} is {what} already; set to={other} or to=safetensors.")
    check_target(target, source, overwrite=overwrite)

    checkpoint = read_checkpoint(source, weights_only=weights_only)
    if to == "safetensors":
        state = checkpoint["state_dict"]
        del checkpoint
        return _write_safetensors(state, source, target, dtype=dtype, prefix=prefix, shard_bytes=shard_bytes)
    _give_pages_back_when_read(checkpoint)
    sizes = [t.numel() * t.element_size() for t in tensors_in(checkpoint)]
    with written_whole(target) as partial:
        if to == "sharded":
            write_sharded(checkpoint, partial)
        else:
            write_single(checkpoint, partial)
    files = sum(1 for _ in target.iterdir()) if to == "sharded" else 1
    return Export(target, tensors=len(sizes), nbytes=sum(sizes), files=files)


# Before anything is read


def parse_shard_size(text: str | int) -> int:
    """Bytes meant by ``shard_size``.

    Raises:
        ValueError: it is no size.
    """
    try:
        count = parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"shard_size={text!r} is not valid: {error}") from error
    if count < 1:
        raise ValueError(f"shard_size={text!r} is not valid: it must be at least one byte, for instance '2GiB'.")
    return count


def find_places(ckpt: str | Path, out: str | Path | None, *, suffix: str) -> tuple[Path, Path]:
    """The absolute paths of a checkpoint and of what is made of it.

    Args:
        ckpt: the checkpoint.
        out: where to; beside the checkpoint, under its name with ``suffix``, if None.
        suffix: follows the checkpoint's name, without its ``.ckpt``.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: one of them is not on the local file system.
    """
    for name, path in (("ckpt", ckpt), ("out", out)):
        if path is not None and not is_local(path):
            raise ValueError(f"{name}={path} is not on the local file system, which is needed; set a path that is.")
    source = Path(os.path.abspath(Path(ckpt).expanduser()))
    if not source.exists():
        raise FileNotFoundError(f"Checkpoint {ckpt} does not exist; set ckpt to a .ckpt file or a sharded folder.")
    if out is None:
        return source, source.with_name(source.name.removesuffix(".ckpt") + suffix)
    return source, Path(os.path.abspath(Path(out).expanduser()))


def check_target(target: Path, source: Path, *, overwrite: bool, replaceable: Sequence[str] = EXPORTED) -> None:
    """Refuse to write where something is that would be lost.

    Args:
        target: where to write.
        source: what is read.
        overwrite: whether an earlier export may be replaced.
        replaceable: names of files that a folder may hold and be replaced, as patterns.

    Raises:
        ValueError: one is in the other's place, or something is at ``target`` that may not be replaced.
    """
    real, origin = target.resolve(), source.resolve()
    if real == origin or real in origin.parents or origin in real.parents:
        raise ValueError(f"{target} and the checkpoint {source} would be in each other's place; set another out.")
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise ValueError(f"{target} exists already; set overwrite=true to replace it, or another out.")
    require_replaceable(target, replaceable, hint="another out")


# Reading


def read_checkpoint(source: Path, *, weights_only: bool) -> dict[str, Any]:
    """A checkpoint whose tensors are read when they are used.

    Raises:
        ValueError: it is not whole, of another kind, or holds what ``weights_only`` refuses.
    """
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
        return replaced.setdefault(memory_of(tensor), parts_of(tensor, mappings))

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


# Writing


def _write_safetensors(
    state: Mapping[str, Any],
    source: Path,
    target: Path,
    *,
    dtype: DtypeName | None,
    prefix: str | None,
    shard_bytes: int,
) -> Export:
    tensors = tensors_of(state, source)
    kept, tied = without_ties(without_prefix(tensors, prefix, source))
    with written_whole(target) as folder:
        written = write_weights(kept, folder, dtype=dtype, shard_bytes=shard_bytes)
    return Export(
        target,
        **vars(written),
        tied=tied,
        without_prefix=tuple(name for name in tensors if prefix and not name.startswith(dotted(prefix))),
        no_tensors=tuple(name for name in state if name not in tensors),
    )


def tensors_of(state: Mapping[str, Any], source: Path) -> dict[str, Tensor]:
    """What of a state is a tensor.

    Raises:
        ValueError: nothing is.
    """
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    if not tensors:
        raise ValueError(f"The state_dict of {source} holds no tensor, so there is nothing to write; set another ckpt.")
    return tensors
