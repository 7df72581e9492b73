"""Small Hugging Face folders of several architectures, written by transformers, and what is in their files."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 64

_BLOCK = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2}
_TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_BLOCK, **_TOKENS, "intermediate_size": 64, "tie_word_embeddings": False},
    "qwen2": {**_BLOCK, **_TOKENS, "intermediate_size": 64, "tie_word_embeddings": True},
    "gpt2": {**_TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
    "qwen3_moe": {
        **_BLOCK,
        **_TOKENS,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
    },
    "gpt_oss": {
        **_BLOCK,
        **_TOKENS,
        "intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
    },
}
"""Untied and tied, old and new, and experts that files keep one by one or all together."""


def model_folder(
    path: Path,
    arch: str = "llama",
    dtype: torch.dtype = torch.bfloat16,
    *,
    shard_size: str = "1GB",
    tokenizer: bool = False,
    **config: Any,
) -> Path:
    """Write a model whose every weight is random, norms and biases too."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(arch, **{**CONFIGS[arch], **config}), dtype=dtype)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 0.05 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise + (1.0 if parameter.dim() == 1 else 0.0))
    model.save_pretrained(path, max_shard_size=shard_size)
    if tokenizer:
        words = {f"w{number}": number for number in range(VOCABULARY)}
        inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
        inner.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="w2").save_pretrained(path)
    return path


def tensors_in(path: Path) -> dict[str, Tensor]:
    """Every tensor in a folder's files."""
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
