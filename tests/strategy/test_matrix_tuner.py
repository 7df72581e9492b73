"""Searches for a learning rate and a batch size find what they find with the stock strategy, and leave no trace."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import zoo
from fitting import SCHEDULES, MegaTrainStrategy, loader
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from matrix import (
    BF16,
    COLLECTING,
    EAGER,
    SMALL,
    Outcome,
    Scenario,
    Stage,
    assert_like_stock,
    assert_schedules_agree,
    play,
    weights,
)
from torch import Tensor

from lightning_megatrain.update.worker import Worker

RATES: dict[str, Any] = {"min_lr": 1e-4, "max_lr": 0.3}


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between trials all objects of the test process would be collected, which takes longer than the trials."""
    monkeypatch.setattr("lightning.pytorch.tuner.batch_size_scaling.garbage_collection_cuda", lambda: None)


class Tuned(zoo.Encoder):
    """Has a learning rate and a batch size to find; a large batch does not fit into its first block."""

    def __init__(self, limit: int = 10**9, where: str = "forward", fails_from: int = 0) -> None:
        super().__init__(**SMALL)
        self.lr, self.batch_size, self.limit, self.fails_from = 1e-2, 4, limit, fails_from
        self.index, self.failed = 0, threading.Event()
        part = self.net.layers[0].linear1
        if where == "forward":
            part.register_forward_pre_hook(lambda module, args: self.require(args[0]))
        else:
            part.register_full_backward_hook(lambda module, inputs, outputs: self.require(outputs[0]))

    def require(self, tensor: Tensor) -> None:
        if tensor.shape[0] > self.limit and self.index >= self.fails_from:
            self.failed.set()
            raise RuntimeError("CUDA out of memory.")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.index = batch_idx
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def train_dataloader(self) -> Any:
        return loader(60, self.batch_size)

    def val_dataloader(self) -> Any:
        return loader(30, self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


def tuned(search: Callable[[L.Trainer, Tuned], Any], make: Any = Tuned, **arguments: Any) -> Scenario:
    """A search and then a fit with the same trainer; facts are what was found."""

    def scenario(stage: Stage) -> Outcome:
        module = make()
        start = weights(module)
        defaults = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1}
        trainer = stage.trainer(**{**defaults, **arguments})
        facts = [search(trainer, module), module.lr, module.batch_size]
        assert not list(stage.directory.glob(".*.ckpt"))
        kept = start.bfloat16().float() if stage.precision == "bf16-true" else start
        assert torch.equal(kept, weights(module))
        if module.limit < 10**9:  # the trials after one that failed need not go on from the same weights
            module.losses.clear()
        trainer.fit(module)
        return Outcome(module, trainer, facts)

    return scenario


def rates(trainer: L.Trainer, module: Tuned) -> Any:
    finder = Tuner(trainer).lr_find(module, num_training=8, **RATES)
    return [finder.results, finder.suggestion(skip_begin=1)]


def test_lr_find() -> None:
    for mine in assert_like_stock(tuned(rates, limit_train_batches=8), *SCHEDULES):
        results, suggestion = mine.facts[0]
        assert len(results["loss"]) == 8
        assert RATES["min_lr"] < suggestion < RATES["max_lr"]


def test_lr_find_with_clipping_and_accumulation() -> None:
    scenario = tuned(rates, limit_train_batches=8, gradient_clip_val=0.2, accumulate_grad_batches=2)
    assert_like_stock(scenario, *COLLECTING)


@pytest.mark.parametrize("precision", BF16)
def test_lr_find_in_bf16(precision: str) -> None:
    assert_schedules_agree(tuned(rates, limit_train_batches=8), precision)


class Saves(L.Callback):
    """Saves before the first step, which comes after a search at the start of the fit, and in the middle."""

    def __init__(self, stage: Stage) -> None:
        self.path = stage.directory / "saved.ckpt"
        self.states: list[Any] = []

    def save(self, trainer: L.Trainer, *args: Any) -> None:
        trainer.save_checkpoint(self.path)
        checkpoint = torch.load(self.path, weights_only=True)
        self.states.append([checkpoint[k] for k in ("global_step", "state_dict", "optimizer_states", "lr_schedulers")])

    on_train_start = on_train_batch_end = save


def test_learning_rate_finder_in_a_fit() -> None:
    def scenario(stage: Stage) -> Outcome:
        module, finder, saves = Tuned(), LearningRateFinder(num_training_steps=8, **RATES), Saves(stage)
        trainer = stage.trainer(callbacks=[finder, saves], max_steps=2, limit_train_batches=8, limit_val_batches=1)
        trainer.fit(module)
        return Outcome(module, trainer, [finder.optimal_lr.results, module.lr, saves.states])

    for mine in assert_like_stock(scenario, *SCHEDULES):
        assert len(mine.facts[0]["loss"]) == 8


def sizes(trainer: L.Trainer, module: Tuned, **arguments: Any) -> int | None:
    return Tuner(trainer).scale_batch_size(module, **{"init_val": 4, "steps_per_trial": 2, **arguments})


@pytest.mark.parametrize(("mode", "update"), zip(["power", "binsearch"], EAGER, strict=True))
def test_scale_batch_size_until_the_number_of_trials(mode: str, update: str) -> None:
    (mine,) = assert_like_stock(tuned(partial(sizes, mode=mode, max_trials=2, margin=0.0)), update)
    assert mine.facts[0] == mine.facts[2] == 8


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_scale_batch_size_goes_on_after_out_of_memory(where: str) -> None:
    """Raised inside a unit, on the way out or back, where other units may have been updated already."""
    make = partial(Tuned, limit=13, where=where)
    for mine in assert_like_stock(tuned(partial(sizes, mode="binsearch", margin=0.0), make), *EAGER):
        assert mine.facts[0] == mine.facts[2] == 13


@pytest.mark.parametrize(("precision", "where"), zip(BF16, ["forward", "backward"], strict=True))
def test_scale_batch_size_goes_on_after_out_of_memory_in_bf16(precision: str, where: str) -> None:
    make = partial(Tuned, limit=13, where=where)
    outcome = assert_schedules_agree(tuned(partial(sizes, mode="power"), make), precision, learns=False)
    assert outcome.facts[0] == 8


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_batch_size_finder_in_a_fit(where: str) -> None:
    """The fit goes on with what the search found; what is saved after it is whole."""

    def scenario(stage: Stage) -> Outcome:
        module, saves = Tuned(limit=12, where=where), Saves(stage)
        finder = BatchSizeFinder("power", init_val=4, steps_per_trial=2)
        trainer = stage.trainer(callbacks=[finder, saves], max_steps=2, limit_val_batches=1)
        trainer.fit(module)
        module.losses = module.losses[-2:]
        return Outcome(module, trainer, [finder.optimal_batch_size, saves.states])

    for mine in assert_like_stock(scenario, *SCHEDULES):
        assert mine.facts[0] == 8


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_a_search_restores_is_not_overtaken_by_updates_under_way(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second step of a trial fails while the worker has not begun its last task, and would rather do it later."""
    module, restored, do, load = [Tuned()], threading.Event(), Worker._do, MegaTrainStrategy.load_optimizer_state_dict

    def slow(self: Worker, task: Callable[[], None]) -> None:
        failed, too_large = module[0].failed, module[0].batch_size > module[0].limit
        if failed.wait(0.15 if too_large else 0):
            restored.wait(0.5)
        do(self, task)

    def noted(self: MegaTrainStrategy, checkpoint: Any) -> None:
        load(self, checkpoint)
        restored.set()

    monkeypatch.setattr(Worker, "_do", slow)
    monkeypatch.setattr(MegaTrainStrategy, "load_optimizer_state_dict", noted)

    def scenario(stage: Stage) -> Outcome:
        module[0] = Tuned(limit=4, where=where, fails_from=1)
        restored.clear()
        finder = BatchSizeFinder("power", init_val=4, steps_per_trial=2)
        trainer = stage.trainer(callbacks=[finder], max_steps=2, limit_val_batches=0)
        trainer.fit(module[0])
        module[0].losses = module[0].losses[-2:]
        return Outcome(module[0], trainer, [finder.optimal_batch_size, module[0].failed.is_set()])

    for mine in assert_like_stock(scenario, *EAGER):
        assert mine.facts == [4, True]


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_scale_batch_size_of_an_evaluation(method: str) -> None:
    make = partial(Tuned, limit=13)
    (mine,) = assert_like_stock(tuned(partial(sizes, method=method, mode="power"), make))
    assert mine.facts[0] == 8


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_in_training_is_raised_as_itself(where: str) -> None:
    def scenario(stage: Stage) -> Outcome:
        module = Tuned(limit=3, where=where)
        trainer = stage.trainer(max_epochs=1, limit_train_batches=3)
        with pytest.raises(RuntimeError, match="out of memory") as error:
            trainer.fit(module)
        assert error.value.args == ("CUDA out of memory.",)
        fresh = Tuned(limit=4, where=where)
        L.seed_everything(2, verbose=False)
        trainer.fit(fresh)
        return Outcome(fresh, trainer)

    assert_like_stock(scenario, *EAGER)


def test_searches_leave_no_callback_behind() -> None:
    def scenario(stage: Stage) -> Outcome:
        module, callbacks = Tuned(limit=13), [L.Callback(), L.Callback()]
        trainer = stage.trainer(callbacks=list(callbacks), max_epochs=1, limit_train_batches=3)
        rates(trainer, module)
        sizes(trainer, module)
        trainer.fit(module)
        assert trainer.callbacks == callbacks
        return Outcome(module, trainer)

    play(scenario, MegaTrainStrategy(update="next_forward"))
