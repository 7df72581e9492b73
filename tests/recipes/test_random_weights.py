"""Random weights: without memory first, then the same values wherever they are made."""

import pytest
import torch
from torch import nn

from lightning_megatrain.recipes import random_weights
from lightning_megatrain.recipes.causal_lm import CausalLM
from lightning_megatrain.recipes.random_weights import fill_weights, weight_bytes, without_weights

CPU = torch.device("cpu")
CONFIG = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def build(arch: str = "qwen2", **config) -> CausalLM:
    return CausalLM(arch, {**CONFIG, **config})


@pytest.mark.parametrize("tied", [False, True])
def test_a_filled_model_is_the_model_with_other_weights(tied):
    plain, module = build(tie_word_embeddings=tied), without_weights(lambda: build(tie_word_embeddings=tied))
    assert all(p.is_meta for p in module.parameters())
    assert weight_bytes(module, torch.bfloat16) == 2 * sum(p.numel() for p in plain.parameters())
    fill_weights(module, CPU, torch.float32)
    assert {n: p.shape for n, p in module.named_parameters()} == {n: p.shape for n, p in plain.named_parameters()}
    assert (module.model.lm_head.weight is module.model.model.embed_tokens.weight) == tied
    for (name, buffer), (_, other) in zip(module.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(buffer, other), name
    loss = module.loss({"input_ids": torch.arange(24).view(2, 12)})
    assert loss.item() == pytest.approx(torch.tensor(61.0).log().item(), rel=0.05)


def test_values_are_the_same_in_every_dtype_and_building_takes_no_random_number():
    state = torch.get_rng_state()
    wide, narrow = without_weights(build), without_weights(build)
    fill_weights(wide, CPU, torch.float32)
    fill_weights(narrow, CPU, torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), state)
    for a, b in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b)


def test_vectors_are_ones_and_biases_zeros():
    module = without_weights(build)
    fill_weights(module, CPU, torch.float32)
    layer = module.model.model.layers[0]
    assert torch.equal(layer.input_layernorm.weight, torch.ones(32))
    assert torch.equal(layer.self_attn.q_proj.bias, torch.zeros(32))


def test_numbers_repeat_only_after_all_of_them(monkeypatch):
    monkeypatch.setattr(random_weights, "NOISE", 7)
    module = without_weights(lambda: nn.Sequential(nn.Linear(5, 2, bias=False), nn.Linear(2, 3, bias=False)))
    fill_weights(module, CPU, torch.float32)
    values = torch.cat([p.detach().flatten() for p in module.parameters()])
    assert torch.equal(values[7:], values[: len(values) - 7])
    assert len(values[:7].unique()) == 7
