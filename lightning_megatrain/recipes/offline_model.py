"""A small model and its tokenizer, as a Hugging Face directory, made without network in seconds.

Whatever opens a pretrained model from disk can be tried, tested and shown with it. It has learned nothing.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lightning_megatrain.recipes.bytes_data import is_validation, stdlib_root, stdlib_sources

VOCABULARY = 2048

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}"
    "{{ message['content'] + '<|im_end|>' }}"
    "{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML, with the answers marked for training."""

_BEGIN, _PAD, _TURN, _END = "<|bos|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
_SPECIAL = (_BEGIN, _PAD, _TURN, _END)
_TEXT_BYTES = 1 << 20  # enough to find two thousand common pieces
_SETTINGS = "offline_model.json"
"""Written last: where it lies, the directory is whole."""

_FORMAT = 1


@functools.cache
def offline_tokenizer(vocab_size: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the standard library's sources.

    It writes any text, since all bytes are tokens, and its chat template is ChatML. Equal Python versions give equal
    tokenizers.

    Args:
        vocab_size: tokens, special ones included.

    Raises:
        ValueError: if that is fewer than the bytes and the special tokens.
    """
    smallest = 256 + len(_SPECIAL)
    if vocab_size < smallest:
        raise ValueError(f"vocab_size={vocab_size} must be at least {smallest}, all bytes and the special tokens.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=_BEGIN,
        eos_token=_END,
        pad_token=_PAD,
        additional_special_tokens=[_TURN],
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )


def make_offline_model(
    path: str | Path,
    *,
    vocab_size: int = VOCABULARY,
    hidden_size: int = 64,
    layers: int = 2,
    max_position_embeddings: int = 2048,
    seed: int = 0,
) -> Path:
    """Write a Llama with random weights and its tokenizer, ready for `from_pretrained`.

    The directory appears whole or not at all. One that was made with the same settings is left as it is.

    Args:
        path: of the directory.
        vocab_size: tokens, special ones included.
        hidden_size: a multiple of 32, the size of a head.
        layers: of the decoder.
        max_position_embeddings: tokens of the longest text.
        seed: of the weights; the global generator is left as it was.

    Returns:
        `path`.

    Raises:
        ValueError: if a size is out of range.
        FileExistsError: if there is something else at `path`.
    """
    path = Path(path)
    if hidden_size < 32 or hidden_size % 32 or layers < 1:
        raise ValueError(f"hidden_size={hidden_size} must be a multiple of 32, and layers={layers} at least 1.")
    settings = {
        "format": _FORMAT,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "layers": layers,
        "max_position_embeddings": max_position_embeddings,
        "seed": seed,
    }
    if _settings(path) == settings:
        return path
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(
            f"A place for a new model was needed, and {path} is there already with other contents or settings; remove "
            "it or choose another path."
        )
    tokenizer = offline_tokenizer(vocab_size)
    model = _model(settings, tokenizer)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        tokenizer.save_pretrained(beside)
        model.save_pretrained(beside)
        (beside / _SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        beside.chmod(0o755)  # temporary folders are for their maker only
        try:
            os.rename(beside, path)
        except OSError:
            # Another process may have been quicker with the same model.
            if _settings(path) != settings:
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return path


def _model(settings: dict[str, int], tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    special: dict[str, Any] = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    size = settings["hidden_size"]
    config = LlamaConfig(
        vocab_size=settings["vocab_size"],
        hidden_size=size,
        intermediate_size=3 * size,
        num_hidden_layers=settings["layers"],
        num_attention_heads=size // 32,
        num_key_value_heads=size // 32,
        max_position_embeddings=settings["max_position_embeddings"],
        tie_word_embeddings=False,
        **special,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings["seed"])
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**special)
    return model


def _settings(path: Path) -> dict[str, int] | None:
    """What the directory was made with, or None if it is none of ours."""
    try:
        return json.loads((path / _SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _texts() -> list[str]:
    """Training files of the standard library, about a megabyte."""
    root = stdlib_root()
    texts: list[str] = []
    total = 0
    for path in stdlib_sources(root):
        if is_validation(path):
            continue
        texts.append((root / path).read_text(encoding="utf-8", errors="replace"))
        total += len(texts[-1])
        if total >= _TEXT_BYTES:
            break
    return texts
