"""Packed rows give the losses of their sequences alone, whatever the model, attention and strategy."""

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from fitting import QUIET, MegaTrainStrategy, stock
from torch.utils.data import DataLoader
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lightning_megatrain.callbacks.throughput import NUM_TOKENS
from lightning_megatrain.recipes.causal_lm import CausalLM
from lightning_megatrain.recipes.flops import mean_length, token_flops
from lightning_megatrain.recipes.packable import make_packable, packed_mask
from lightning_megatrain.recipes.packing import PackedCollate, PaddedCollate, Rows, SequenceBuilder, pack

VOCABULARY = 48
ROW = 24
LENGTHS = [9, 5, 8, 23, 11, 2, 4, 7]
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ALTERNATING = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "llama": {},
    "qwen2": {},
    "qwen2_alternating": {"use_sliding_window": True, **ALTERNATING},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mistral": {"sliding_window": 3},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": None, **ALTERNATING},
    "afmoe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, **ALTERNATING},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "resid_pdrop": 0, "attn_pdrop": 0},
}


def make(name, attention="eager", **kwargs):
    arch = name.removesuffix("_alternating")
    if arch not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip(f"this transformers has no {arch}")
    config = {**COMMON, **MODELS[name]} if arch != "gpt2" else {"vocab_size": VOCABULARY, **MODELS[name]}
    config = {key: value for key, value in config.items() if value is not None or key.endswith("token_id")}
    module = CausalLM(arch, config, **kwargs)
    module.model.set_attn_implementation(attention)
    # With the small weights of a fresh model, looking at the wrong tokens would hardly change a loss.
    for parameter in module.parameters():
        if parameter.ndim >= 2:
            parameter.data *= 5
    return module.eval()


def sequences(lengths=LENGTHS):
    """Random sequences, about half of whose tokens are targets, in runs."""
    generator = torch.Generator().manual_seed(3)
    builder = SequenceBuilder()
    for length in lengths:
        tokens = torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
        builder.add(tokens, [length < 4 or position % 6 > 2 for position in range(length)])
    return builder.build()


def token_losses(module, batch):
    """Loss of each position's successor, 0 where there is none; (rows, time - 1)."""
    inputs = {key: value for key, value in batch.items() if key not in ("labels", NUM_TOKENS)}
    logits, targets = module(**inputs)[:, :-1], batch["labels"][:, 1:]
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none")
    return losses.view(targets.shape), targets


def alone(module, store):
    """Mean loss of each sequence by itself, and its number of targets."""
    means, counts = [], []
    for index in range(len(store)):
        tokens, labels = store.take(index)
        losses, targets = token_losses(module, {"input_ids": tokens[None], "labels": labels[None]})
        counts.append(int((targets != -100).sum()))
        means.append(losses.sum() / counts[-1])
    return torch.stack(means), torch.tensor(counts)


def packed(store, row_len=ROW):
    rows = pack(store.lengths, row_len, seed=0)
    return rows, PackedCollate(store, row_len, pad_id=0)([row.tolist() for row in rows])


# transformers has no sdpa for gpt_oss, whose softmax has one more term.
CASES = [(name, kind) for name in MODELS for kind in ("eager", "sdpa") if (name, kind) != ("gpt_oss", "sdpa")]


@pytest.mark.parametrize(("name", "attention"), CASES)
@torch.no_grad()
def test_a_packed_batch_has_the_losses_of_its_sequences(name, attention):
    module = make(name, attention)
    make_packable(module)
    store = sequences()
    rows, batch = packed(store)
    assert len(rows) < len(store)
    means, counts = alone(module, store)
    losses, targets = token_losses(module, batch)
    for row, members in enumerate(rows):
        end = 0
        for index in members.tolist():
            start, end = end, end + LENGTHS[index]
            own = losses[row, start : end - 1].sum() / counts[index]
            assert abs(float(own - means[index])) < 1e-6, (name, index)
    whole = losses.sum() / (targets != -100).sum()
    assert abs(float(whole - (means * counts).sum() / counts.sum())) < 1e-6


@torch.no_grad()
def test_gpt_oss_needs_its_masks_made():
    module = make("gpt_oss")
    store = sequences()
    _, batch = packed(store)
    means, counts = alone(module, store)
    reference = (means * counts).sum() / counts.sum()
    losses, targets = token_losses(module, batch)
    assert abs(float(losses.sum() / (targets != -100).sum() - reference)) > 1e-3
    make_packable(module)
    make_packable(module)
    assert len(module.model.model._forward_pre_hooks) == 1
    ids = batch["input_ids"]
    first = module(ids)  # without positions nothing is packed, and the hook keeps out
    assert torch.equal(first, make("gpt_oss")(ids))


def test_gradients_are_the_mean_over_all_targets():
    module = make("llama")
    store = sequences()
    _, batch = packed(store)
    losses, targets = token_losses(module, batch)
    (losses.sum() / (targets != -100).sum()).backward()
    got = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    means, counts = alone(module, store)
    ((means * counts).sum() / counts.sum()).backward()
    for gradient, parameter in zip(got, module.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)


class Batches(L.LightningDataModule):
    """Rows of `sequences`, packed or one in each."""

    def __init__(self, packing, batch_size=3):
        super().__init__()
        self.store = sequences(LENGTHS * 3)
        rows = pack(self.store.lengths, ROW, seed=0) if packing else torch.arange(len(self.store)).split(1)
        kind = PackedCollate if packing else PaddedCollate
        self.loader = DataLoader(Rows(rows), batch_size=batch_size, collate_fn=kind(self.store, ROW, 0))

    def train_dataloader(self):
        make_packable(self.trainer.lightning_module)
        return self.loader

    val_dataloader = train_dataloader


def trainer(strategy, **kwargs):
    return L.Trainer(strategy=strategy, accelerator="cpu", devices=1, **{**QUIET, **kwargs})


@pytest.mark.parametrize("name", ["llama", "qwen2_alternating", "mistral", "gpt_oss"])
@pytest.mark.parametrize("microbatch", [None, 1, 2])
def test_the_strategy_keeps_sequences_apart(name, microbatch):
    with torch.no_grad():
        means, counts = alone(make(name), sequences(LENGTHS * 3))
    reference = float((means * counts).sum() / counts.sum())
    for packing in (True, False):
        run = trainer(MegaTrainStrategy(microbatch=microbatch))
        [metrics] = run.validate(make(name), Batches(packing), verbose=False)
        assert metrics["val_loss"] == pytest.approx(reference, abs=1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_the_strategy_trains_on_packed_rows_as_the_stock_one_does(name):
    def losses(strategy):
        seen = []

        class Record(L.Callback):
            def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
                seen.append(float(outputs["loss"]))
                assert batch[NUM_TOKENS] == int(batch[NUM_TOKENS]) < batch["input_ids"].numel()

        trainer(strategy, max_steps=4, callbacks=[Record()]).fit(make(name, lr=1e-3), Batches(True))
        return seen

    reference = losses(stock())
    assert len(reference) == 4
    assert losses(MegaTrainStrategy()) == reference
    assert losses(MegaTrainStrategy(microbatch=1)) == pytest.approx(reference, abs=1e-5)


@pytest.mark.parametrize(
    ("arch", "config", "reason"),
    [
        ("mamba", {"hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}, "takes no position ids"),
        ("opt", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "ffn_dim": 32}, "masks without"),
        ("lfm2", {**COMMON, "layer_types": ["conv", "full_attention"]}, "layers of type conv"),
        ("qwen3_next", {**COMMON, "num_experts": 4}, "pass a state"),
    ],
)
def test_a_model_that_would_mix_sequences_is_refused(arch, config, reason):
    with torch.device("meta"):
        module = CausalLM(arch, config)
    with pytest.raises(ValueError, match=rf"{arch}.*{reason}.*; set data\.packing=false"):
        make_packable(module)


def test_attention_without_masks_is_refused():
    module = make("llama")
    module.model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="flash_attention_2"):
        make_packable(module)


def test_each_of_several_models_is_asked():
    both = torch.nn.ModuleList([make("llama"), CausalLM("opt", {"num_hidden_layers": 1, "hidden_size": 48})])
    with pytest.raises(ValueError, match="opt"):
        make_packable(both)


def test_what_is_no_transformers_model_is_its_owner_s_affair():
    make_packable(torch.nn.Linear(2, 2))


def test_masks_hold_the_sequence_the_past_and_the_window():
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    full = packed_mask(positions, None)[0, 0].int().tolist()
    assert full == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]
    assert packed_mask(positions, 2)[0, 0].int().tolist()[2] == [0, 1, 1, 0, 0]


def test_rows_hold_every_sequence_once_and_are_nearly_full():
    lengths = torch.randint(1, 65, (3000,), generator=torch.Generator().manual_seed(1))
    rows = pack(lengths, 64, seed=5)
    assert sorted(torch.cat(rows).tolist()) == list(range(3000))
    assert all(int(lengths[row].sum()) <= 64 for row in rows)
    assert len(rows) <= 1.02 * int(lengths.sum()) / 64 + 1
    again, other = pack(lengths, 64, seed=5), pack(lengths, 64, seed=6)
    assert all(torch.equal(a, b) for a, b in zip(rows, again, strict=True))
    assert [row.tolist() for row in rows] != [row.tolist() for row in other]


def test_a_sequence_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="9 tokens does not fit into a row of 8"):
        pack(torch.tensor([3, 9]), 8, seed=0)


def test_a_packed_batch_in_numbers():
    builder = SequenceBuilder()
    builder.add([5, 6, 7], [True, False, True])
    builder.add([8, 9], [True, True])
    batch = PackedCollate(builder.build(), 8, pad_id=1)([[0, 1], [1]])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 1, 1, 1], [8, 9, 1, 1, 1, 1, 1, 1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5]]
    no = -100
    assert batch["labels"].tolist() == [[no, no, 7, no, 9, no, no, no], [no, 9, no, no, no, no, no, no]]
    assert batch[NUM_TOKENS] == 7
    assert all(value.dtype == torch.int64 for key, value in batch.items() if key != NUM_TOKENS)


def test_a_padded_batch_is_as_long_as_eights_of_its_longest_row():
    store = sequences([3, 9, 21])
    collate = PaddedCollate(store, 22, pad_id=1)
    batch = collate([[0], [1]])
    assert batch["input_ids"].shape == (2, 16)
    assert batch["attention_mask"].sum(1).tolist() == [3, 9]
    assert batch[NUM_TOKENS] == 12
    assert collate([[2]])["input_ids"].shape == (1, 22)
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()


def test_arithmetic_of_rows_is_that_of_their_sequences():
    """However they are put into rows, tokens meet those before them in their own sequence, and nothing else."""
    lengths = [9, 5, 8, 23, 11, 2, 4, 7, 13, 24, 17, 22, 20]  # which fill their rows
    store, module = sequences(lengths), make("llama")
    rows = pack(store.lengths, ROW, seed=0)
    assert sum(lengths) > 0.95 * ROW * len(rows)
    kinds = {
        "packed": PackedCollate(store, ROW, pad_id=0)([row.tolist() for row in rows]),
        "padded": PaddedCollate(store, ROW, pad_id=0)([[i] for i in range(len(store))]),
        "whole": {"input_ids": torch.zeros(3, ROW, dtype=torch.int64)},
    }
    wanted = sum(n * token_flops(module.model, n).model for n in lengths) / sum(lengths)
    found = {}
    for kind, batch in kinds.items():
        module.on_before_batch_transfer(batch, 0)
        found[kind] = module.flops_per_token
    assert found["padded"] == pytest.approx(wanted)
    assert found["packed"] == pytest.approx(wanted, rel=1e-3)
    assert found["whole"] == token_flops(module.model, ROW).model
    left = kinds["padded"]["attention_mask"].flip(1)
    assert mean_length({**kinds["padded"], "attention_mask": left}) == mean_length(kinds["padded"])


def test_lengths_that_are_not_on_the_host_are_not_waited_for():
    batch = packed(sequences())[1]
    assert mean_length(batch) < ROW
    away = {name: batch[name].to("meta") for name in ("input_ids", "position_ids")}
    assert mean_length({**away, "attention_mask": away["input_ids"]}) == ROW


def test_a_batch_of_tokens_costs_the_store_five_bytes_each():
    store = sequences()
    assert (store.tokens.dtype, store.targets.dtype) == (torch.int32, torch.bool)
    assert store.lengths.tolist() == LENGTHS
    assert len(SequenceBuilder().build()) == 0
