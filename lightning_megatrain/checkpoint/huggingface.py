"""From a checkpoint to a folder that transformers' `from_pretrained` opens: weights, configuration, tokenizer."""

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from lightning_megatrain.checkpoint.convert import (
    EXPORTED,
    Export,
    check_target,
    find_places,
    parse_shard_size,
    read_checkpoint,
    tensors_of,
)
from lightning_megatrain.checkpoint.files import first_line, written_whole
from lightning_megatrain.checkpoint.hub import locate
from lightning_megatrain.checkpoint.weights import DtypeName, dotted, without_prefix, write_weights

try:
    from transformers.core_model_loading import revert_weight_conversion
except ImportError:  # releases in which modules have the files' names
    revert_weight_conversion = None

SUFFIX = "-huggingface"
"""What follows the checkpoint's name, without its ``.ckpt``, where no ``out`` is given."""

GENERATION_FILE = "generation_config.json"

_VOCABULARY_FILES = r"(tokenizer|vocab|tekken)\.json|vocab\.txt|.*\.model"
_TOKENIZER_FILES = (
    rf"{_VOCABULARY_FILES}|(tokenizer_config|special_tokens_map|added_tokens|chat_template)\.json|merges\.txt|.*\.jinja"
)
_REPLACEABLE = (*EXPORTED, r"(generation_)?config\.json", _TOKENIZER_FILES)


def export_huggingface(
    ckpt: str | Path,
    *,
    out: str | Path | None = None,
    overwrite: bool = False,
    dtype: DtypeName | None = None,
    prefix: str | None = None,
    shard_size: str | int = "2GiB",
    weights_only: bool = True,
    tokenizer: str | None = None,
) -> Export:
    """Write the model of a checkpoint of `CausalLM` as Hugging Face lays it out. It appears whole or not at all.

    Weights have the names that the model's publisher uses, where transformers know them, and tied ones are written
    once. One file's tensors are in memory at a time.

    Args:
        ckpt: a ``.ckpt`` file or a sharded checkpoint's folder, of this strategy or a stock one.
        out: where to; beside ``ckpt``, with :data:`SUFFIX`, if None.
        overwrite: replace a folder of exported files at ``out``.
        dtype: of floating-point weights; None for that of the model's configuration, or else of the checkpoint.
        prefix: taken off the names, with its dot or without; None for ``model.``, where `CausalLM` has its model.
        shard_size: most bytes of weights in one file, unless a single one is larger.
        weights_only: unpickle nothing but tensors and plain values; False runs whatever code the file names.
        tokenizer: a folder, or a name on the Hub, whose tokenizer is written; None for that of the model that the
            training began with.

    Returns:
        What was written.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: an argument is not valid, ``out`` exists, the checkpoint is not one of `CausalLM`, its weights are
            not those of its configuration, a value does not fit ``dtype``, or there is no such tokenizer.
    """
    shard_bytes = parse_shard_size(shard_size)
    source, target = find_places(ckpt, out, suffix=SUFFIX)
    check_target(target, source, overwrite=overwrite, replaceable=_REPLACEABLE)

    checkpoint = read_checkpoint(source, weights_only=weights_only)
    hparams = checkpoint.get("hyper_parameters", {})
    config = _config_of(hparams, source)
    wanted = dtype or _dtype_name(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    origin = _origin_of(hparams, target)
    tokenizer_files, note = _tokenizer(tokenizer, origin)
    prefix = prefix or "model"
    tensors = tensors_of(checkpoint["state_dict"], source)
    del checkpoint
    named = without_prefix(tensors, prefix, source)
    tied = _tied_names(model)
    needed = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    _require_same({name: tensor for name, tensor in named.items() if name not in tied}, needed, model, source)

    kept = {name: named[name] for name in needed}
    with written_whole(target) as folder:
        written = write_weights(kept, folder, dtype=wanted, shard_bytes=shard_bytes, spread=_spread(model, needed))
        model.config.architectures = [type(model).__name__]
        model.config.dtype = getattr(torch, wanted) if wanted else next(iter(kept.values())).dtype
        model.config.save_pretrained(folder)
        if origin is not None and (origin / GENERATION_FILE).is_file():
            shutil.copyfile(origin / GENERATION_FILE, folder / GENERATION_FILE)
        else:
            GenerationConfig.from_model_config(model.config).save_pretrained(folder)
        for file in tokenizer_files:
            shutil.copyfile(file, folder / file.name)
    return Export(
        target,
        **vars(written),
        tied={name: other for name, other in tied.items() if name in named},
        without_prefix=tuple(name for name in tensors if not name.startswith(dotted(prefix))),
        notes=(note,),
    )


def stored_form(model: PreTrainedModel, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Tensors of a model under the names, and in the pieces, in which its publisher keeps them in files.

    Args:
        model: the model, which may be on the meta device.
        tensors: some of its state; None for all.
    """
    state = dict(model.state_dict() if tensors is None else tensors)
    return state if revert_weight_conversion is None else dict(revert_weight_conversion(model, state))


def _config_of(hparams: Any, source: Path) -> Any:
    """The configuration that a checkpoint of `CausalLM` keeps."""
    arch = hparams.get("arch") if isinstance(hparams, Mapping) else None
    config = (hparams.get("config") or {}) if isinstance(hparams, Mapping) else None
    if not isinstance(arch, str) or not isinstance(config, Mapping):
        raise ValueError(
            f"{source} has no hyper_parameters 'arch' and 'config', as CausalLM keeps them, so the configuration of "
            "its model is not known; set to=safetensors for the weights alone."
        )
    try:
        return AutoConfig.for_model(arch, **config)
    except Exception as error:  # its type differs between releases of transformers
        reason = first_line(error.__cause__ or error)
        raise ValueError(
            f"The installed transformers do not take arch={arch!r} with the config in {source} ({reason}); install the "
            "release it was trained with."
        ) from error


def _origin_of(hparams: Mapping[str, Any], target: Path) -> Path | None:
    """Folder of the model that the training began with, if it is still there."""
    origin = hparams.get("origin")
    if not origin:
        return None
    try:
        folder = locate(str(origin), weights=False)
    except ValueError:
        return None
    if folder.resolve() == target.resolve():
        raise ValueError(f"{target} is the folder of the model that the training began with; set another out.")
    return folder


def _tokenizer(name: str | None, origin: Path | None) -> tuple[list[Path], str]:
    """The files of the tokenizer to write, and what to say about it.

    They are copied as they are: to read and write a tokenizer can change it.
    """
    folder = origin if name is None else locate(name, weights=False, key="tokenizer")
    present = sorted(folder.iterdir()) if folder is not None else []
    files = [path for path in present if path.is_file() and re.fullmatch(_TOKENIZER_FILES, path.name)]
    if any(re.fullmatch(_VOCABULARY_FILES, file.name) for file in files):
        return files, f"tokenizer of {name or folder}"
    if name is not None:
        raise ValueError(f"tokenizer={name} has no tokenizer.json and no other vocabulary; set a tokenizer's folder.")
    return [], "no tokenizer, because the training began with none that is there; set tokenizer=PATH_OR_NAME"


def _tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Names of tensors that are another one's too, with the name under which it is kept: the first."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
    return tied


def _require_same(
    found: Mapping[str, Tensor], needed: Mapping[str, Tensor], model: PreTrainedModel, source: Path
) -> None:
    missing = [name for name in needed if name not in found]
    unexpected = [name for name in found if name not in needed]
    other = [name for name in needed if name in found and found[name].shape != needed[name].shape]
    for what, names in (("lacks", missing), ("has beside them", unexpected), ("has in other shapes", other)):
        if names:
            raise ValueError(
                f"{source} does not hold the weights of a {type(model).__name__} of its config: it {what} "
                f"{len(names)}, the first being {names[0]!r}; set to=safetensors to write the weights as they are."
            )


def _dtype_name(config: Any) -> DtypeName | None:
    """The dtype that a configuration names, if weights can be written in it."""
    name = str(getattr(config, "dtype", None)).removeprefix("torch.")
    return name if name in ("float32", "bfloat16", "float16") else None  # type: ignore[return-value]


def _spread(
    model: PreTrainedModel, needed: Mapping[str, Tensor]
) -> Callable[[str, Tensor], Mapping[str, Tensor]] | None:
    """What turns one of the model's tensors into those in which files keep it; None where they are the same.

    Files whose tensors are made of several of the model's have no such form, and keep the model's names, which
    transformers read as well.
    """
    whole = {name: tensor.shape for name, tensor in stored_form(model, needed).items()}
    if whole.keys() == needed.keys():
        return None
    single = {n: t.shape for name, tensor in needed.items() for n, t in stored_form(model, {name: tensor}).items()}
    return (lambda name, tensor: stored_form(model, {name: tensor})) if single == whole else None
