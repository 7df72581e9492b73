"""The yardstick computes what plain training computes, recomputes every block, and leaves no trace."""

from collections import Counter

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from lightning_megatrain.recipes.causal_lm import CausalLM
from lightning_megatrain.recipes.ceiling import Ceiling, ceiling_bytes
from lightning_megatrain.recipes.random_weights import fill_weights, without_weights
from lightning_megatrain.stream import compiled
from lightning_megatrain.stream.discovery import find_units

BATCH = {"input_ids": torch.randint(0, 61, (5, 12), generator=torch.Generator().manual_seed(0))}


def make(layers: int = 2, arch: str = "llama", dtype: torch.dtype = torch.float32) -> CausalLM:
    config = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    }
    small = {"vocab_size": 61, "n_embd": 32, "n_layer": layers, "n_head": 4, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    module = without_weights(lambda: CausalLM(arch, {**small, "embd_pdrop": 0.0} if arch == "gpt2" else config))
    fill_weights(module, torch.device("cpu"), dtype)
    return module


def gradients(module: CausalLM) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
@pytest.mark.parametrize("microbatch", [None, 2, 8])
def test_loss_and_gradients_are_those_of_plain_training(arch, microbatch):
    module = make(arch=arch)
    loss = module.loss(BATCH)
    loss.backward()
    plain = gradients(module)
    with Ceiling(module, find_units(module), compile=False) as ceiling:
        for _ in range(2):  # a second step starts from no gradients
            assert ceiling.step(BATCH, microbatch) == pytest.approx(loss.item(), rel=1e-5)
            torch.testing.assert_close(gradients(module), plain, rtol=1e-4, atol=1e-6)


def test_gradients_are_as_wide_as_weights():
    module = make(dtype=torch.bfloat16)
    with Ceiling(module, find_units(module), compile=False) as ceiling:
        ceiling.step(BATCH, 2)
        assert {p.grad.dtype for p in module.parameters()} == {torch.bfloat16}
        held = sum(p.nbytes + p.grad.nbytes for p in module.parameters())
        assert held == ceiling_bytes(module, torch.bfloat16)


def test_every_block_runs_once_without_a_graph_and_once_with_one(monkeypatch):
    module, ran = make(), Counter()
    blocks = find_units(module)
    own = type(next(iter(blocks.values()))).forward

    def forward(self, *args, **kwargs):
        ran[id(self), torch.is_grad_enabled()] += 1
        return own(self, *args, **kwargs)

    monkeypatch.setattr(type(next(iter(blocks.values()))), "forward", forward)
    with Ceiling(module, blocks, compile=False) as ceiling:
        ceiling.step(BATCH, 2)
    assert ran == {(id(block), with_graph): 3 for block in blocks.values() for with_graph in (False, True)}


def test_afterwards_the_module_is_as_it_was():
    module = make()
    with Ceiling(module, find_units(module), compile=False) as ceiling:
        ceiling.step(BATCH, None)
    assert all("forward" not in vars(block) for block in find_units(module).values())
    assert all(p.grad is None for p in module.parameters())


def test_blocks_of_one_structure_share_their_graphs(monkeypatch):
    counts, losses = [], []
    for layers in (2, 3):
        torch.compiler.reset()
        counter = CompileCounterWithBackend("eager")
        monkeypatch.setattr(compiled, "OPTIONS", {"backend": counter})
        module = make(layers)
        with Ceiling(module, find_units(module), compile=True) as ceiling:
            losses.append(ceiling.step(BATCH, 5))
        counts.append(counter.frame_count)
    torch.compiler.reset()
    assert counts == [2, 2]  # one for the forward, one for the recomputation and its backward
    assert losses[0] == pytest.approx(make(2).loss(BATCH).item(), rel=1e-5)
