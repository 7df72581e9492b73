"""A model's folder as Hugging Face lays it out: where it is, and what its safetensors files hold."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

from lightning_megatrain.checkpoint.files import first_line

WEIGHTS_FILE = "model.safetensors"
"""All tensors, where they are in one file."""

INDEX_FILE = "model.safetensors.index.json"
"""Which file holds which tensor, where there are several."""

CONFIG_FILE = "config.json"

_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_SMALL = ["*.json", "*.model", "*.txt", "*.jinja"]
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    Args:
        file: the file.
        dtype: of its values; None for integers and for what only quantized models hold.
        kind: the dtype as safetensors names it.
        shape: its shape.
    """

    file: Path
    dtype: torch.dtype | None
    kind: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()


def locate(name: str, *, weights: bool, key: str = "model.pretrained") -> Path:
    """The local folder of a model: ``name`` itself, or where the Hub's copy is, fetched if need be.

    Args:
        name: a folder, or a name on the Hugging Face Hub.
        weights: whether the weights are needed too, and not just the small files beside them.
        key: the setting that ``name`` comes from, for errors.

    Raises:
        ValueError: there is no such folder, and the Hub did not give one of that name.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.absolute()
    what, needed = "model", f"a folder with {CONFIG_FILE} and safetensors files"
    if key == "tokenizer":
        what, needed = "tokenizer", "a tokenizer's folder"
    if folder.exists():
        raise ValueError(f"{key}={name} is a file; set {needed}.")
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{key}={name} does not exist; set {needed}, or a name on the Hugging Face Hub.")
    try:
        return Path(snapshot_download(name, allow_patterns=[*_SMALL, "model*.safetensors"] if weights else _SMALL))
    except Exception as error:  # of many kinds: no network, no such name, no access
        reason = first_line(error).split(". ")[0]
        raise ValueError(
            f"{key}={name} is no local folder, and the Hugging Face Hub did not give a {what} of that name ({reason}); "
            f"set {needed}, or see to the name, the network, HF_HUB_OFFLINE and HF_TOKEN."
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """What a JSON file holds.

    Raises:
        ValueError: it cannot be read, or is no JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}); get the file again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__} and no JSON object; get the file again.")
    return content


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder.

    Raises:
        ValueError: there are none, or one that the index names is missing.
    """
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    if not (folder / INDEX_FILE).is_file():
        pickled = sorted(p.name for p in folder.glob("*.bin"))
        if pickled:
            raise ValueError(
                f"{folder} has its weights in {pickled[0]} only, and safetensors are needed; convert them with "
                "from_pretrained(...).save_pretrained(...) of transformers."
            )
        raise ValueError(f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}, so it holds no weights; set another.")
    places = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{folder / INDEX_FILE} has no weight_map; get the file again.")
    names = sorted(set(places.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} of the {len(names)} files that its index names, the first being "
            f"{missing[0]}; get the files again."
        )
    return [folder / name for name in names]


def read_headers(files: Sequence[Path]) -> dict[str, Stored]:
    """What each tensor of some safetensors files is, by name. Values are not read.

    Raises:
        ValueError: a file is no safetensors file, or is cut short.
    """
    return {name: stored for file in files for name, stored in _read_header(file).items()}


def _read_header(file: Path) -> dict[str, Stored]:
    stored: dict[str, Stored] = {}
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                header = opened.get_slice(name)
                kind = header.get_dtype()
                stored[name] = Stored(file, _DTYPES.get(kind), kind, tuple(header.get_shape()))
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file} cannot be read as safetensors; it was cut short or is of another kind ({error}), so get it again."
        ) from error
    return stored


def main_dtype(stored: dict[str, Stored], folder: Path) -> torch.dtype:
    """The dtype of most values.

    Raises:
        ValueError: it is none that weights are trained from.
    """
    counts: dict[tuple[str, torch.dtype | None], int] = {}
    for tensor in stored.values():
        counts[tensor.kind, tensor.dtype] = counts.get((tensor.kind, tensor.dtype), 0) + tensor.numel
    kind, dtype = max(counts, key=lambda form: counts[form], default=("no", None))
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            f"{folder} holds {kind} weights, and F32, BF16 or F16 are needed; set a copy that is not quantized."
        )
    return dtype
