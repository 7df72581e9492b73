"""The arithmetic of a token, against counts by hand."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_megatrain.recipes.flops import token_flops


def build(arch: str, **config: object) -> torch.nn.Module:
    common = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 8}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(arch, **{**common, **config}))


@pytest.mark.parametrize("tied", [False, True])
def test_dense(tied: bool) -> None:
    """The head counts, the embedding's look-up does not, and one that is both counts once."""
    model = build("llama", intermediate_size=48, num_key_value_heads=2, tie_word_embeddings=tied)
    found = token_flops(model, seq_len=64)
    blocks = sum(p.numel() for p in model.model.layers.parameters())
    head, norm, attention = 97 * 32, 32, 6 * 3 * 64 * 32
    assert found.parameters == blocks + head + norm
    assert found.blocks == 6 * blocks + attention
    assert found.model == 6 * (blocks + head + norm) + attention


def test_experts_count_as_far_as_a_token_is_routed_to_them() -> None:
    model = build(
        "qwen3_moe", intermediate_size=48, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2,
        num_key_value_heads=2, decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    rest = sum(p.numel() for p in model.parameters()) - experts - 97 * 32
    assert experts == 3 * 8 * 3 * 32 * 16
    assert token_flops(model, seq_len=64).parameters == rest + experts / 4


def test_sliding_windows_bound_attention() -> None:
    model = build(
        "gpt_oss", intermediate_size=32, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=16, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    short, long = token_flops(model, seq_len=8), token_flops(model, seq_len=4096)
    assert long.model - short.model == 12 * 32 * ((16 + 2048 + 16) - 3 * 4)
