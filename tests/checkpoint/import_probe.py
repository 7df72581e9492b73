"""Imports a 1 GB model into a store and prints what that took in bytes, as JSON. Run in a process of its own.

python import_probe.py folder --format split
"""

import argparse
import gc
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from model_folders import model_folder
from rss_probe import status
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_megatrain.checkpoint.hub import INDEX_FILE
from lightning_megatrain.memory.host import give_back_freed_memory
from lightning_megatrain.memory.store import Store, StoreFormat
from lightning_megatrain.recipes.causal_lm import CausalLM
from lightning_megatrain.stream.discovery import find_units, make_groups

LARGE = {
    "vocab_size": 65536,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "tie_word_embeddings": False,
}
"""0.5B parameters; the embedding and the head are 268 MB of bf16 each."""


def write_large(folder: Path) -> None:
    """A folder of two files, without the model in memory."""
    config = AutoConfig.for_model("llama", **LARGE, dtype="bfloat16")
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config).state_dict()
    config.save_pretrained(folder)
    noise = (0.02 * torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))).bfloat16()
    names = sorted(shapes)
    places = {name: f"model-0000{1 + (i >= len(names) // 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(places.values())):
        write_file(folder / file, {name: shapes[name] for name in names if places[name] == file}, noise)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def write_file(path: Path, shapes: Mapping[str, Tensor], noise: Tensor) -> None:
    """A safetensors file whose tensors repeat ``noise``."""
    header, end = {}, 0
    for name, tensor in shapes.items():
        start, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    block = noise.view(torch.uint8).numpy().tobytes()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in shapes.values():
            left = 2 * tensor.numel()
            while left > 0:
                left -= file.write(block[:left])


def imported(folder: Path, store_format: StoreFormat) -> tuple[CausalLM, Store]:
    module = CausalLM(pretrained=str(folder))
    store = Store(make_groups(module, find_units(module)), store_format, pin=False)
    store.adopt()
    return module, store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--format", default="split", choices=[f.value for f in StoreFormat])
    given = parser.parse_args()
    store_format = StoreFormat(given.format)
    imported(model_folder(given.folder / "small"), store_format)  # imports and whatever else happens once
    write_large(given.folder)
    gc.collect()
    give_back_freed_memory()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    module, store = imported(given.folder, store_format)
    after = {"rise": status("VmHWM") - before, "left": status("VmRSS") - before, "of_files": status("RssFile")}
    result: dict[str, Any] = {
        **after,
        "file": sum(path.stat().st_size for path in given.folder.glob("*.safetensors")),
        "largest": max(2 * p.numel() for p in module.parameters()),
        "store": store.nbytes,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
