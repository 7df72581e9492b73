"""The recipe's model, loss and optimizer."""

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lightning_megatrain.callbacks.throughput import NUM_TOKENS
from lightning_megatrain.recipes.causal_lm import CausalLM
from lightning_megatrain.recipes.sampling import Sampling

CONFIG = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def make(**kwargs):
    return CausalLM("llama", CONFIG, **kwargs)


def tokens(rows=4, time=12, seed=0):
    return torch.randint(0, 32, (rows, time), generator=torch.Generator().manual_seed(seed))


def trainer(**kwargs):
    defaults = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(**{**defaults, "enable_model_summary": False, **kwargs})


def loader(count=4):
    return DataLoader([{"input_ids": row} for row in tokens(count)], batch_size=2)


def test_weights_follow_the_seed_and_leave_the_global_generator_alone():
    torch.manual_seed(7)
    state = torch.get_rng_state()
    first, again, other = make(seed=1), make(seed=1), make(seed=2)
    assert torch.equal(torch.get_rng_state(), state)
    same = [torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)]
    assert all(same)
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


def test_meta_device_builds_shapes_without_memory():
    with torch.device("meta"):
        module = make()
    assert all(parameter.is_meta for parameter in module.model.parameters())
    count = sum(parameter.numel() for parameter in module.model.parameters())
    assert count == sum(parameter.numel() for parameter in make().model.parameters())


def test_loss_is_the_shifted_cross_entropy_of_labelled_positions():
    module = make()
    ids = tokens()
    labels = ids.clone()
    labels[:, :5] = -100
    batch = module.on_before_batch_transfer({"input_ids": ids, "labels": labels}, 0)
    reference = F.cross_entropy(module.model(input_ids=ids).logits[:, 4:-1].flatten(0, 1), ids[:, 5:].flatten())
    torch.testing.assert_close(module.loss(batch), reference)


def test_real_tokens_are_counted_before_transfer():
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[1, 4:] = 0
    batch = make().on_before_batch_transfer({"input_ids": tokens(2, 6), "attention_mask": mask}, 0)
    assert batch[NUM_TOKENS] == 10


def test_vectors_do_not_decay_and_the_schedule_moves_each_step():
    module = make(lr=0.5, warmup_steps=2, weight_decay=0.3, min_lr_ratio=0.1)
    rates = []

    class Record(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            rates.append(optimizer.param_groups[0]["lr"])

    fit = trainer(max_steps=6, callbacks=[Record()])
    fit.fit(module, loader())
    matrices, vectors = fit.optimizers[0].param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert all(p.ndim >= 2 for p in matrices["params"])
    assert all(p.ndim == 1 for p in vectors["params"])
    assert rates[:3] == pytest.approx([0.25, 0.5, 0.5])
    assert rates[3:] == sorted(rates[3:], reverse=True)


def test_perplexity_is_the_exponential_of_the_loss_in_every_loop():
    module = make()
    fit = trainer(max_steps=2, num_sanity_val_steps=0)
    for _ in range(2):  # counters left by validate() must not break the validation inside fit()
        metrics = fit.validate(module, loader(3), verbose=False)[0]
        assert metrics["val_perplexity"] == pytest.approx(float(torch.tensor(metrics["val_loss"]).exp()), rel=1e-4)
        fit.fit(module, loader(), loader(3))


def test_predict_continues_the_prompt():
    module = make()
    module.sampling = Sampling(max_new_tokens=20, top_k=5)
    prompt = tokens(1, 3)
    [first] = trainer().predict(module, DataLoader([{"input_ids": prompt[0]}]))
    [again] = trainer().predict(module, DataLoader([{"input_ids": prompt[0]}]))
    assert first.shape == (1, 23)
    assert torch.equal(first[:, :3], prompt)
    assert torch.equal(first, again)


def test_an_unknown_architecture_is_refused_with_a_suggestion():
    with pytest.raises(ValueError, match="did you mean llama"):
        CausalLM("lama", CONFIG)


def test_a_configuration_that_does_not_suit_is_refused():
    with pytest.raises(ValueError, match="does not suit"):
        CausalLM("llama", {**CONFIG, "num_attention_heads": 7})


def test_a_validation_batch_without_targets_counts_for_nothing():
    module = make()
    labelled = [{"input_ids": row, "labels": row} for row in tokens(2)]
    empty = [{"input_ids": row, "labels": torch.full_like(row, -100)} for row in tokens(2, seed=1)]
    alone = trainer().validate(module, DataLoader(labelled, batch_size=2), verbose=False)[0]
    beside = trainer().validate(module, DataLoader(labelled + empty, batch_size=2), verbose=False)[0]
    assert beside == pytest.approx(alone)


@pytest.mark.parametrize("strategy", ["auto", "megatrain"])
def test_a_batch_without_targets_leaves_weights_as_they_are(strategy):
    module = make(weight_decay=0.0)
    before = [p.detach().clone() for p in module.parameters()]
    batch = [{"input_ids": row, "labels": torch.full_like(row, -100)} for row in tokens(2)]
    trainer(strategy=strategy, max_steps=1, devices=1).fit(module, DataLoader(batch, batch_size=2))
    for old, new in zip(before, module.parameters(), strict=True):
        assert torch.equal(old, new)


def test_an_adapter_on_the_head_takes_part_whenever_it_comes():
    from peft import LoraConfig, inject_adapter_in_model

    module = make()
    batch = {"input_ids": tokens()}
    module.loss(batch)
    inject_adapter_in_model(LoraConfig(target_modules=["lm_head"], init_lora_weights=False), module.model)
    logits = module.model(input_ids=batch["input_ids"]).logits[:, :-1]
    expected = F.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())
    torch.testing.assert_close(module.loss(batch), expected)
