"""`megatrain export`: a checkpoint in another format, or its weights for other programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from omegaconf import DictConfig, OmegaConf

from lightning_megatrain.checkpoint.convert import Export, convert
from lightning_megatrain.cli.app import UserError, run_app
from lightning_megatrain.cli.values import check_values
from lightning_megatrain.memory.host import format_bytes

USAGE = """\
usage: megatrain export ckpt=PATH to=ckpt|sharded|safetensors [key=value ...]

  ckpt=PATH         the checkpoint: a .ckpt file or a sharded folder
  to=FORMAT         ckpt: one file; sharded: a folder; safetensors: a folder with the weights only
  out=PATH          where to; by default beside the checkpoint
  overwrite=true    replace an earlier export at out
  weights_only=false  read objects of any class: only for files you trust
for to=safetensors:
  dtype=NAME        float32, bfloat16 or float16 for floating-point weights; by default each keeps its own
  prefix=NAME       taken off the names, such as model.; weights without it are left out
  shard_size=SIZE   most bytes in one file; 2GiB by default

examples:
  megatrain export ckpt=step-300.ckpt to=sharded
  megatrain export ckpt=step-300-sharded.ckpt to=ckpt out=step-300-again.ckpt
  megatrain export ckpt=step-300.ckpt to=safetensors prefix=model. dtype=bfloat16 out=my-model"""

_TARGET = "lightning_megatrain.checkpoint.convert.convert"
_MISSING = {
    "ckpt": "ckpt=PATH is needed: a .ckpt file or the folder of a sharded checkpoint; none is set.",
    "to": "to=FORMAT is needed: set to=ckpt, to=sharded or to=safetensors.",
}


def main(argv: Sequence[str]) -> int:
    """Run the command with Hydra overrides and flags; returns the exit status."""
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    run_app(export, command="export", config_name="export", argv=argv)
    return 0


def export(cfg: DictConfig) -> None:
    """Convert what `cfg`, the composed `export.yaml`, describes, and print where it is and how large.

    Raises:
        UserError: if a value is missing or not valid.
        ValueError, OSError: as `convert`.
    """
    for key, message in _MISSING.items():
        if cfg[key] is None:
            raise UserError(message)
    check_values(cfg, targets={"": _TARGET})
    arguments = {str(key): value for key, value in OmegaConf.to_object(cfg).items()}  # type: ignore[union-attr]
    print("\n".join(_lines(convert(**arguments), prefix=cfg.prefix)))


def _lines(done: Export, prefix: str | None) -> list[str]:
    files = f" in {done.files} files" if done.files > 1 else ""
    lines = [f"wrote {done.path}", f"{done.tensors} tensors, {format_bytes(done.nbytes)}{files}"]
    if done.tied:
        lines.append(f"{len(done.tied)} tied, so not written again: {_some(done.tied)}")
    if done.without_prefix:
        names = dict.fromkeys(done.without_prefix, "")
        lines.append(f"{len(names)} without the prefix {prefix!r}, so left out: {_some(names)}")
    if done.no_tensors:
        names = dict.fromkeys(done.no_tensors, "")
        lines.append(f"{len(names)} that are no tensors, so left out: {_some(names)}")
    return lines


def _some(names: Mapping[str, str], most: int = 4) -> str:
    """The first few names, each with what it equals."""
    shown = [f"{name} (is {other})" if other else name for name, other in list(names.items())[:most]]
    return ", ".join(shown) + (", ..." if len(names) > most else "")
