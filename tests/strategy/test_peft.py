"""Adapters: frozen weights are streamed and cost neither gradients nor moments; checkpoints may hold adapters only."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import zoo
from fitting import (
    FORMATS,
    QUIET,
    SCHEDULES,
    MegaTrainStrategy,
    assert_same_bits,
    assert_same_optimizer_bits,
    fit,
    loader,
    stock,
    under,
)
from peft import LoraConfig, get_peft_model


class Lora(zoo.Llama):
    """A Llama whose projections have low-rank adapters, and nothing else trains."""

    def __init__(self, **kw: Any) -> None:
        super().__init__(log_norm=False, **kw)
        config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
        self.model = get_peft_model(self.model, config)


def adapters(module: L.LightningModule) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("updates", "arguments"),
    [
        (["blocking", "next_forward"], {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
        (["in_backward"], {}),
    ],
)
def test_lora_trains_like_the_stock_strategy(updates: list[str], arguments: dict[str, Any]) -> None:
    a, trainer_a = fit(Lora, stock(), max_steps=5, **arguments)
    for update in updates:
        with under(update):
            b, trainer_b = fit(Lora, MegaTrainStrategy(update=update), max_steps=5, **arguments)
            assert_same_bits(a, b)
            assert_same_optimizer_bits(trainer_a, trainer_b)
            assert len(adapters(b)) == 3 * 3 * 2


class Watch(L.Callback):
    """What crossed to the host, and what the host holds."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy = trainer.strategy
        self.plan = dict(strategy.plan.host)
        self.units = [g for g in strategy._store.groups if not g.resident]
        self.pushed: dict[int, int] = {}
        landed = strategy._updater.destination

        def destination(group: int, last: bool) -> torch.Tensor:
            target = landed(group, last)
            self.pushed[group] = target.numel()
            return target

        strategy._updater.destination = destination
        self.moments = strategy._updater.moments.nbytes


@pytest.mark.parametrize("update", SCHEDULES)
def test_frozen_weights_cost_no_gradients_and_no_moments(update: str) -> None:
    watch = Watch()
    module, _ = fit(Lora, MegaTrainStrategy(update=update), max_steps=2, callbacks=[watch], precision="bf16-mixed")
    padded = sum(-(-p.numel() // 128) * 128 for p in adapters(module).values())
    assert watch.plan["moments"] == watch.moments == 8 * padded
    assert watch.plan["gradients"] == (0 if update == "in_backward" else 2 * padded)
    assert watch.pushed == {g.index: g.layout.trainable_numel for g in watch.units}
    assert all(g.layout.trainable_numel < g.layout.numel / 2 for g in watch.units)


@pytest.mark.parametrize("checkpoint_format", FORMATS)
def test_only_adapters_are_saved_and_the_run_resumes(checkpoint_format: str, tmp_path: Path) -> None:
    make = partial(Lora, scheduler=True)

    def strategy() -> MegaTrainStrategy:
        return MegaTrainStrategy(exclude_frozen_parameters=True, checkpoint_format=checkpoint_format)

    straight, _ = fit(make, strategy(), max_steps=-1, max_epochs=2, samples=16)
    half, trainer = fit(make, strategy(), max_steps=-1, max_epochs=1, samples=16)
    path = tmp_path / "half.ckpt"
    trainer.save_checkpoint(path)
    saved = trainer.strategy.load_checkpoint(path, weights_only=True)["state_dict"]
    assert saved.keys() == adapters(half).keys()
    L.seed_everything(1, verbose=False)  # the base model is where it always was
    module = make()
    again = L.Trainer(strategy=strategy(), accelerator="cpu", devices=1, max_epochs=2, **QUIET)
    again.fit(module, loader(16), ckpt_path=path, weights_only=True)
    for name, value in straight.state_dict().items():
        assert torch.equal(value, module.state_dict()[name]), name


def test_a_checkpoint_without_a_parameter_that_was_not_excluded_is_refused(tmp_path: Path) -> None:
    _, trainer = fit(Lora, MegaTrainStrategy(exclude_frozen_parameters=True), max_steps=1)
    path = tmp_path / "adapters.ckpt"
    trainer.save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    lost = next(iter(checkpoint["state_dict"]))
    del checkpoint["state_dict"][lost]
    torch.save(checkpoint, path)
    again = L.Trainer(strategy=MegaTrainStrategy(), accelerator="cpu", devices=1, max_steps=2, **QUIET)
    with pytest.raises(RuntimeError, match=f"belongs to another model.*nothing was loaded(?s:.*){lost}"):
        again.fit(Lora(), loader(), ckpt_path=path, weights_only=True)
