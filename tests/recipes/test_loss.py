"""The loss without whole logits: its value, its gradients, its memory, and the models it is for."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_megatrain.recipes import loss as losses
from lightning_megatrain.recipes.causal_lm import build_model
from lightning_megatrain.recipes.loss import IGNORE_INDEX, ChunkedLoss, makes_plain_logits, next_token_loss

SMALL = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA_LIKE = {**SMALL, "intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 8}


def made(dtype=torch.float32, *, bias=False, rows=(3, 7), width=12, vocabulary=50):
    torch.manual_seed(0)
    hidden = torch.randn(*rows, width).to(dtype).requires_grad_()
    head = nn.Linear(width, vocabulary, bias=bias).to(dtype)
    targets = torch.randint(0, vocabulary, rows)
    targets[0, :3] = IGNORE_INDEX
    return hidden, head, targets


def plain(hidden, head, targets):
    logits = F.linear(hidden, head.weight, head.bias)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE_INDEX)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens_per_chunk", [1, 4, 1000])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_value_and_gradients_are_those_of_cross_entropy(monkeypatch, bias, tokens_per_chunk, dtype, rtol):
    monkeypatch.setattr(losses, "CHUNK_BYTES", 4 * 50 * tokens_per_chunk)
    hidden, head, targets = made(dtype, bias=bias)
    wanted = torch.autograd.grad(plain(hidden, head, targets) * 0.3, [hidden, *head.parameters()])
    loss = next_token_loss(hidden, head, targets)
    assert loss.dtype == dtype
    torch.testing.assert_close(loss, plain(hidden, head, targets), rtol=rtol, atol=0)
    found = torch.autograd.grad(loss * 0.3, [hidden, *head.parameters()])
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=rtol / 100)


def test_bf16_gradients_are_rounded_once_though_there_are_many_chunks(monkeypatch):
    """Sums that are rounded after each chunk drift; and a third of the loss must not become a bf16 third."""
    monkeypatch.setattr(losses, "CHUNK_BYTES", 4 * 50 * 16)
    hidden, head, targets = made(torch.bfloat16, rows=(4, 512))
    exact = [hidden.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()]
    reference = F.cross_entropy(F.linear(*exact).flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX)
    wanted = torch.autograd.grad(reference / 3, exact)
    found = torch.autograd.grad(next_token_loss(hidden, head, targets) / 3, [hidden, head.weight])
    for ours, true in zip(found, wanted, strict=True):
        assert ours.dtype == torch.bfloat16
        error = (ours.double() - true).norm() / true.norm()
        assert error < 2**-8


def test_frozen_heads_and_inputs_get_no_gradient():
    hidden, head, targets = made()
    head.weight.requires_grad_(False)
    next_token_loss(hidden, head, targets).backward()
    assert hidden.grad is not None
    assert head.weight.grad is None
    hidden, head, targets = made()
    next_token_loss(hidden.detach(), head, targets).backward()
    assert head.weight.grad is not None


def test_under_autocast_the_head_computes_in_its_dtype():
    hidden, head, targets = made()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = next_token_loss(hidden, head, targets)
        logits = head(hidden).float()
    loss.backward()
    assert head.weight.grad.dtype == hidden.grad.dtype == torch.float32
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX)
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0)


def test_no_target_at_all_is_not_a_number_and_teaches_nothing_as_in_torch():
    hidden, head, targets = made(bias=True)
    none = torch.full_like(targets, IGNORE_INDEX)
    for loss in (plain(hidden, head, none), next_token_loss(hidden, head, none)):
        assert loss.isnan()
        for gradient in torch.autograd.grad(loss, [hidden, *head.parameters()]):
            assert gradient.count_nonzero() == 0


def test_half_precision_has_gradients_though_each_is_too_small_before_it_is_scaled():
    hidden, head, targets = made(rows=(4, 512), vocabulary=4000)
    exact = torch.autograd.grad(plain(hidden, head, targets), [hidden, head.weight])
    with torch.autocast("cpu", dtype=torch.float16):
        loss = next_token_loss(hidden, head, targets)
    scaled = torch.autograd.grad(loss * 65536, [hidden, head.weight])
    for found, true in zip(scaled, exact, strict=True):
        assert (found / 65536 - true).norm() / true.norm() < 5e-3


@pytest.mark.parametrize("label", [-1, -101, 50])
@pytest.mark.parametrize("learns", [True, False])
def test_a_label_that_is_no_token_is_refused_as_in_torch(label, learns):
    hidden, head, targets = made()
    targets[1, 2] = label
    with torch.set_grad_enabled(learns):
        for loss in (plain, next_token_loss):
            with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
                loss(hidden, head, targets)


def test_a_second_backward_is_refused():
    hidden, head, targets = made()
    loss = ChunkedLoss.apply(hidden.flatten(0, 1), head.weight, None, targets.flatten())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="used already"):
        loss.backward()


def test_logits_of_all_tokens_are_never_held(monkeypatch):
    """A vocabulary of 50,000 and 2,048 tokens would be 400 MB."""
    monkeypatch.setattr(losses, "CHUNK_BYTES", 2**24)
    hidden, head, targets = made(rows=(1, 2048), width=4, vocabulary=50_000)
    held = []

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            held.extend(t.numel() for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor))
            return result

    with Largest():
        next_token_loss(hidden, head, targets).backward()
    assert max(held) * 4 <= 2**24


@pytest.mark.parametrize(
    ("arch", "config", "plain"),
    [
        ("llama", LLAMA_LIKE, True),
        ("qwen2", {**LLAMA_LIKE, "tie_word_embeddings": True}, True),
        ("qwen3_moe", {**LLAMA_LIKE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}, True),
        ("gpt2", {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}, True),
        ("gemma2", {**LLAMA_LIKE, "final_logit_softcapping": 30.0}, False),
        ("granite", {**LLAMA_LIKE, "logits_scaling": 8.0}, False),
        ("cohere", {**LLAMA_LIKE, "logit_scale": 0.0625}, False),
    ],
)
def test_models_that_do_more_to_their_logits_are_found_out(arch, config, plain):
    model = build_model(arch, {**config, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}, seed=0)
    assert makes_plain_logits(model) is plain
    ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
    assert model(input_ids=ids, use_cache=False).logits.shape == (2, 8, 32)  # nothing was left behind
