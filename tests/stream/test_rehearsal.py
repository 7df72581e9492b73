"""The rehearsal of a step on the meta device: what it counts, and that a few units speak for all."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_megatrain.memory.store import StoreFormat
from lightning_megatrain.recipes.causal_lm import CausalLM
from lightning_megatrain.stream.rehearsal import MetaRehearsal, StepSettings
from lightning_megatrain.stream.tracker import MemoryTracker, OnDevice

CONFIG = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def build(arch="llama", layers=7, **config):
    with torch.device("meta"):
        return CausalLM(arch, {**CONFIG, "num_hidden_layers": layers, **config})


def part(**changes):
    defaults = {
        "store_format": StoreFormat.SPLIT,
        "prefetch": 2,
        "microbatch": None,
        "keeps_graphs": False,
        "residents_early": True,
        "norms": False,
    }
    return StepSettings(**{**defaults, **changes})


def memory(module, how, *, rows=4, time=32, **kwargs):
    def loss(device):
        return module.loss({"input_ids": torch.empty(rows, time, dtype=torch.int64, device=device)})

    return MetaRehearsal(module, "auto", **kwargs).memory(how, loss)


@pytest.mark.parametrize(("microbatch", "kept"), [(None, False), (2, False), (None, True), (2, True)])
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    ("arch", "config"),
    [("llama", {}), ("qwen2", {"tie_word_embeddings": True}), ("qwen3_moe", MOE), ("llama", {"vocab_size": 20_000})],
)
def test_a_few_units_speak_for_all(arch, config, microbatch, kept, early):
    how = part(microbatch=microbatch, keeps_graphs=kept, residents_early=early, norms=not early)
    whole = memory(build(arch, **config), how, shorten=False)
    assert memory(build(arch, **config), how) == whole
    assert whole.peak > whole.engine > 0


@pytest.mark.parametrize("chunks", [None, 4])
@pytest.mark.parametrize("activations", ["host", "auto"])
def test_inputs_on_the_host_leave_the_device(activations, chunks):
    rows, time, layers, few = 32, 512, 9, {"vocab_size": 64}
    how = part(activations=activations, sequence_chunks=chunks, device_limit=5 * 10**7, host_limit=10**12)
    whole = memory(build(layers=layers, **few), how, rows=rows, time=time, shorten=False)
    assert memory(build(layers=layers, **few), how, rows=rows, time=time) == whole
    one = rows * time * 64 * 2
    assert whole.saved_on_host == layers * one
    stay = memory(build(layers=layers, **few), part(sequence_chunks=chunks), rows=rows, time=time)
    assert stay.saved_on_host == 0
    assert stay.peak - whole.peak == pytest.approx((layers - 4) * one, abs=2 * one)  # some are under way
    roomy = part(activations="auto", sequence_chunks=chunks, device_limit=10**12, host_limit=10**12)
    assert memory(build(layers=layers, **few), roomy, rows=rows, time=time) == stay


def test_a_first_unit_whose_input_needs_no_gradient_saves_none():
    module, whole_module = build(layers=9, vocab_size=64), build(layers=9, vocab_size=64)
    for one in (module, whole_module):
        one.model.get_input_embeddings().requires_grad_(False)
    how = part(activations="host")
    whole = memory(whole_module, how, rows=32, time=512, shorten=False)
    assert whole.saved_on_host == 8 * 32 * 512 * 64 * 2
    assert memory(module, how, rows=32, time=512) == whole


def test_slices_of_the_sequence_take_less():
    shape, few = {"rows": 32, "time": 512}, {"vocab_size": 64, "intermediate_size": 640}
    peaks = [memory(build(**few), part(sequence_chunks=n), **shape).peak for n in (None, 2, 8)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[2] < 0.7 * peaks[0]


def test_units_of_several_forms_are_all_run():
    module = build(layers=6)
    wide = build(layers=6, intermediate_size=640).model.model.layers
    module.model.model.layers[5] = wide[5]
    assert memory(module, part()).peak > memory(build(layers=6), part()).peak


def test_more_of_anything_takes_more():
    base = memory(build(), part()).peak
    assert memory(build(), part(), rows=8).peak > base
    assert memory(build(layers=14), part()).peak > base
    assert memory(build(), part(prefetch=4)).peak > base
    assert memory(build(), part(store_format=StoreFormat.FP32)).peak > base
    assert memory(build(), part(keeps_graphs=True)).peak > base
    few = {"vocab_size": 64}  # else the loss takes the most
    assert memory(build(**few), part(microbatch=1), rows=8).peak < memory(build(**few), part(), rows=8).peak


def test_the_engines_share_is_what_its_buffers_take():
    module = build(layers=5)
    found = memory(module, part())
    unit = max(sum(-(-p.numel() // 128) * 128 for p in layer.parameters()) for layer in module.model.model.layers)
    resident = sum(-(-p.numel() // 128) * 128 for n, p in module.named_parameters() if ".layers." not in n)
    assert found.engine == pytest.approx(2 * (resident + (3 + 2) * unit), abs=16 * 512)


def test_the_tracker_counts_storages_while_they_live():
    with MemoryTracker() as tracker:
        a = torch.empty(1000, device="meta")
        b = a.view(10, 100).t()
        assert tracker.live == 4096  # rounded up to blocks of 512
        c = a + 1
        del a, b
        assert (tracker.live, tracker.peak) == (4096, 8192)
        tracker.leave_out(host := torch.empty(10, device="meta"))
        del c
        host.view(5, 2).t()
    assert tracker.peak == 8192


@pytest.mark.parametrize(("dtype", "has_scores"), [(torch.bfloat16, False), (torch.float32, True)])
def test_attention_on_the_meta_device_has_scores_where_cuda_has_no_fused_kernel(dtype, has_scores):
    q = torch.empty(2, 4, 256, 16, device="meta", requires_grad=True, dtype=dtype)
    k, v = (torch.empty(2, 2, 256, 16, device="meta", requires_grad=True, dtype=dtype) for _ in range(2))
    with MemoryTracker() as tracker, OnDevice():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        assert out.shape == q.shape
        out.sum().backward()
    assert [t.grad.shape for t in (q, k, v)] == [q.shape, k.shape, v.shape]
    assert (tracker.peak > 2 * 4 * 256 * 256 * dtype.itemsize) is has_scores


def test_an_operation_without_a_form_says_so():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x[x.detach().sum(1).nonzero()[:, 0]].sum()

    with torch.device("meta"):
        module = Counts()
    with pytest.raises((RuntimeError, NotImplementedError)):
        MetaRehearsal(module, "auto").memory(part(), lambda device: module(torch.empty(4, 8, device=device)))


def test_one_model_serves_for_any_number_of_steps():
    module = build()
    rehearsal = MetaRehearsal(module, "auto")

    def loss(device):
        return module.loss({"input_ids": torch.empty(4, 32, dtype=torch.int64, device=device)})

    forms = [part(), part(keeps_graphs=True), part(store_format=StoreFormat.FP32, microbatch=2), part()]
    found = [rehearsal.memory(form, loss) for form in forms]
    assert found == [memory(build(), form) for form in forms]
