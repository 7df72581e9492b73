"""A pretrained model from a Hugging Face folder: its configuration, and its weights as they lie in the files.

The parameters are views of the mapped safetensors files, in the files' dtypes, so that a model takes no memory until
somebody reads it, and then only page cache; the strategy's store reads them part by part. Experts that transformers
keep in one tensor and files in many are the exception: they are put together in memory.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from lightning_megatrain.checkpoint.files import first_line
from lightning_megatrain.checkpoint.hub import CONFIG_FILE, Stored, locate, main_dtype, read_headers, read_json
from lightning_megatrain.checkpoint.hub import weight_files as find_weight_files
from lightning_megatrain.checkpoint.huggingface import stored_form

_ROPE = {"rope_theta", "rope_scaling", "rope_parameters"}


class Pretrained:
    """A model's folder, its configuration read and checked.

    Args:
        name: a folder, or a name on the Hugging Face Hub, which is fetched.
        arch: the model type it must have; None for any.
        config: keyword arguments of the configuration class that it must agree with; those of special tokens need not.
        weights: whether :meth:`load` will be called; without, only the configuration is read.

    Attributes:
        origin: where it comes from: the folder, absolute, or the name on the Hub.
        arch: model type.
        config: the whole configuration, plain values only; its `dtype` is that of the files where they were looked at.

    Raises:
        ValueError: says in one sentence what the folder lacks, or where it differs from `arch` and `config`.
    """

    def __init__(
        self, name: str, *, arch: str | None = None, config: Mapping[str, Any] | None = None, weights: bool
    ) -> None:
        self._folder = locate(name, weights=weights)
        self.origin = str(self._folder) if Path(name).expanduser().is_dir() else name
        self.arch = self._model_type()
        self._config = self._read_config()
        self._require_agreement(arch, config or {})
        if weights:
            self._stored = read_headers(find_weight_files(self._folder))
            self._dtype = main_dtype(self._stored, self._folder)
            self._config.dtype = self._dtype
        self.config = _plain(self._config)

    def _model_type(self) -> str:
        path = self._folder / CONFIG_FILE
        if not path.is_file():
            raise ValueError(f"{self._folder} has no {CONFIG_FILE}, so it is no model's folder; set another.")
        content = read_json(path)
        arch = content.get("model_type")
        if arch not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise ValueError(
                f"{path} has model_type={arch!r}, which is no causal language model that transformers knows; set "
                "another folder."
            )
        if content.get("quantization_config"):
            method = content["quantization_config"].get("quant_method", "unknown")
            raise ValueError(
                f"{self._folder} is quantized ({method}), and training needs every weight as a number of its own; set "
                "a copy in bf16, fp16 or fp32."
            )
        return str(arch)

    def _read_config(self) -> Any:
        try:
            return AutoConfig.from_pretrained(self._folder, local_files_only=True)
        except Exception as error:  # its type differs between releases of transformers
            reason = first_line(error.__cause__ or error)
            raise ValueError(
                f"{self._folder / CONFIG_FILE} does not suit model_type={self.arch!r} ({reason}); get the file again."
            ) from error

    def _require_agreement(self, arch: str | None, given: Mapping[str, Any]) -> None:
        remedy = "set model=pretrained, which takes the architecture from the folder"
        if arch not in (None, self.arch):
            raise ValueError(
                f"model.arch={arch!r} differs from model.pretrained={self.origin}, which is a {self.arch!r}; {remedy}."
            )
        found = _plain(self._config)
        renamed = getattr(self._config, "attribute_map", {})
        wanted = {renamed.get(key, key): value for key, value in given.items() if not key.endswith("_token_id")}
        if _ROPE & wanted.keys():  # several keys, of old releases and new, say one thing together
            wanted["rope_parameters"] = self._rope_parameters(found, {key: wanted.pop(key, None) for key in _ROPE})
        differing = [
            f"{key}={value!r}, where the folder has {found.get(key)!r}"
            for key, value in sorted(wanted.items())
            if value != found.get(key)
        ]
        if differing:
            raise ValueError(
                f"model.config differs from model.pretrained={self.origin}: {_some(differing)}; {remedy}, or "
                "model.config to null."
            )

    def _rope_parameters(self, found: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
        """What is meant by the keys that are set of those about rotary embeddings, in the form of the folder's."""
        rest = {key: value for key, value in found.items() if key not in _ROPE}
        try:
            config = AutoConfig.for_model(self.arch, **rest, **{k: v for k, v in given.items() if v is not None})
        except Exception as error:  # its type differs between releases of transformers
            reason = error.__cause__ or error
            raise ValueError(f"model.config does not suit model.arch={self.arch!r} ({reason}); correct it.") from error
        return _plain(config).get("rope_parameters")

    def load(self) -> PreTrainedModel:
        """The model with its weights, in training mode, on the CPU unless a device context says otherwise.

        Raises:
            ValueError: a weight is missing, unexpected or of another shape.
        """
        with _quiet(), torch.random.fork_rng(devices=[]):
            try:
                model, info = AutoModelForCausalLM.from_pretrained(
                    self._folder,
                    config=self._config,
                    dtype=self._dtype,
                    local_files_only=True,
                    use_safetensors=True,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # they are refused below, with their names
                )
            except RuntimeError as error:  # files' experts that cannot be put together
                self._refuse(self._unlike_files(), AutoModelForCausalLM, error)
                raise
        self._refuse(self._unlike_model(model, info), type(model), None)
        inlet, outlet = model.get_input_embeddings(), model.get_output_embeddings()
        tied = getattr(self._config, "tie_word_embeddings", False)
        if tied and outlet is not None and inlet.weight is not outlet.weight:
            raise ValueError(
                f"{self._folder / CONFIG_FILE} says that the embedding is the head too, and the files hold two that "
                "differ; set tie_word_embeddings in it to false."
            )
        self._restore_dtypes(model)
        return model.train()

    def _restore_dtypes(self, model: PreTrainedModel) -> None:
        """Take tensors that are of another dtype than most as they lie in their file."""
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, stored in self._stored.items():
            tensor = own.get(name)
            if tensor is not None and stored.dtype is not None and tensor.dtype != stored.dtype:
                with safe_open(stored.file, framework="pt", device=str(tensor.device)) as opened:
                    tensor.data = opened.get_tensor(name)

    def _unlike_model(self, model: PreTrainedModel, info: Mapping[str, Any]) -> list[str]:
        """What transformers found to be wrong."""
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        again = every - {name for name, _ in model.named_parameters()}  # tied: missing once is enough
        return _complaints(
            missing={name: shapes.get(name) for name in info["missing_keys"] if name not in again},
            unexpected={n: self._stored[n].shape if n in self._stored else None for n in info["unexpected_keys"]},
            other={name: (tuple(found), tuple(needed)) for name, found, needed in info["mismatched_keys"]},
        )

    def _unlike_files(self) -> list[str]:
        """What is wrong with the files of a model whose weights transformers convert."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self._config)
        needed = {name: tuple(tensor.shape) for name, tensor in stored_form(model).items()}
        found: dict[str, Stored] = self._stored
        return _complaints(
            missing={name: shape for name, shape in needed.items() if name not in found},
            unexpected={name: tensor.shape for name, tensor in found.items() if name not in needed},
            other={n: (found[n].shape, s) for n, s in needed.items() if n in found and found[n].shape != s},
        )

    def _refuse(self, complaints: list[str], kind: type, cause: Exception | None) -> None:
        if complaints:
            raise ValueError(
                f"The weights in {self._folder} do not fit its {CONFIG_FILE} as a {kind.__name__}: "
                f"{', '.join(complaints)}; set a folder whose files belong together."
            ) from cause


def _plain(config: Any) -> dict[str, Any]:
    """Keyword arguments that make a configuration again, plain values only."""
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {key: value for key, value in values.items() if key not in ("model_type", "_name_or_path")}


def _complaints(
    *,
    missing: Mapping[str, tuple[int, ...] | None],
    unexpected: Mapping[str, tuple[int, ...] | None],
    other: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
) -> list[str]:
    """One clause for each kind of fault, with the first names and their shapes."""
    clauses = []
    for word, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            clauses.append(f"{len(names)} {word} ({_some(f'{n} {_shape(names[n])}' for n in sorted(names))})")
    if other:
        shapes = (f"{n} is {_shape(other[n][0])} and not {_shape(other[n][1])}" for n in sorted(other))
        clauses.append(f"{len(other)} of another shape ({_some(shapes)})")
    return clauses


def _shape(shape: Iterable[int] | None) -> str:
    return "" if shape is None else f"[{', '.join(map(str, shape))}]"


def _some(texts: Iterable[str], most: int = 3) -> str:
    """The first few."""
    listed = [text.rstrip() for text in texts]
    return ", ".join(listed[:most]) + (", ..." if len(listed) > most else "")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Inside, transformers neither report what is raised anyway nor draw a bar for what takes no time."""
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()
