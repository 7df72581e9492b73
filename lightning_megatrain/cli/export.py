"""`megatrain export`: a checkpoint in another format, or its weights for other programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from omegaconf import DictConfig, OmegaConf

from lightning_megatrain.checkpoint.convert import SUFFIXES, Export, convert
from lightning_megatrain.cli.app import UserError, run_app
from lightning_megatrain.cli.values import check_values
from lightning_megatrain.memory.host import format_bytes

USAGE = """\
usage: megatrain export ckpt=PATH to=ckpt|sharded|safetensors|huggingface [key=value ...]

  ckpt=PATH         the checkpoint: a .ckpt file or a sharded folder
  to=FORMAT         ckpt: one file; sharded: a folder; safetensors: a folder with the weights only;
                    huggingface: weights, configuration and tokenizer, for from_pretrained
  out=PATH          where to; by default beside the checkpoint
  overwrite=true    replace an earlier export at out
  weights_only=false  read objects of any class: only for files you trust
for to=safetensors and to=huggingface:
  dtype=NAME        float32, bfloat16 or float16 for floating-point weights; by default each keeps its own,
                    or, for huggingface, has that of the model's configuration
  prefix=NAME       taken off the names, such as model., which is the default for huggingface; weights without it
                    are left out
  shard_size=SIZE   most bytes in one file; 2GiB by default
for to=huggingface:
  tokenizer=PATH_OR_NAME  whose tokenizer is written; by default that of the model the training began with

examples:
  megatrain export ckpt=step-300.ckpt to=sharded
  megatrain export ckpt=step-300-sharded.ckpt to=ckpt out=step-300-again.ckpt
  megatrain export ckpt=step-300.ckpt to=safetensors prefix=model. dtype=bfloat16 out=my-weights
  megatrain export ckpt=step-300.ckpt to=huggingface out=my-model tokenizer=Qwen/Qwen2.5-7B"""

_HUGGINGFACE = "huggingface"
_FORMATS = (*SUFFIXES, _HUGGINGFACE)
_TARGETS = {
    True: "lightning_megatrain.checkpoint.huggingface.export_huggingface",
    False: "lightning_megatrain.checkpoint.convert.convert",
}
_MISSING = {
    "ckpt": "ckpt=PATH is needed: a .ckpt file or the folder of a sharded checkpoint; none is set.",
    "to": "to=FORMAT is needed: set to=ckpt, to=sharded, to=safetensors or to=huggingface.",
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
        ValueError, OSError: as `convert` and `export_huggingface`.
    """
    for key, message in _MISSING.items():
        if cfg[key] is None:
            raise UserError(message)
    if cfg.to not in _FORMATS:
        raise UserError(f"to={cfg.to!r} is not valid: it must be {' or '.join(_FORMATS)}.")
    for_huggingface = cfg.to == _HUGGINGFACE
    check_values(cfg, targets={"": _TARGETS[for_huggingface]})
    arguments = {str(key): value for key, value in OmegaConf.to_object(cfg).items()}  # type: ignore[union-attr]
    if for_huggingface:
        # Transformers take seconds to import, which other formats need not wait for.
        from lightning_megatrain.checkpoint.huggingface import export_huggingface

        del arguments["to"]
        done = export_huggingface(**arguments)
    else:
        if arguments.pop("tokenizer") is not None:
            raise UserError(
                f"tokenizer={cfg.tokenizer!r} applies to to=huggingface only; leave it out for to={cfg.to}."
            )
        done = convert(**arguments)
    print("\n".join(_lines(done, prefix=cfg.prefix or "model.")))


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
    return [*lines, *done.notes]


def _some(names: Mapping[str, str], most: int = 4) -> str:
    """The first few names, each with what it equals."""
    shown = [f"{name} (is {other})" if other else name for name, other in list(names.items())[:most]]
    return ", ".join(shown) + (", ..." if len(names) > most else "")
