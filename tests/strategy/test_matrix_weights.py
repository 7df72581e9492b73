"""Callbacks that read and write weights between steps, under every schedule, against the stock strategy."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from fitting import SCHEDULES, MegaTrainStrategy, loader
from lightning.pytorch.callbacks import LambdaCallback
from matrix import (
    BF16,
    Encoder,
    Outcome,
    Scenario,
    Stage,
    assert_like_stock,
    assert_schedules_agree,
    play,
    weights,
)
from torch import Tensor

HOOKS = ("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_train_epoch_end", "on_train_end")


class Looks:
    """Weights as every hook meets them, in order."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        assert {p.device.type for p in pl_module.parameters()} == {"cpu"}
        self.seen.append(weights(pl_module))


def looking(hooks: tuple[str, ...], wrap: Callable[[Looks], Any], make: Any = Encoder) -> Scenario:
    def scenario(stage: Stage) -> Outcome:
        module, looks = make(), Looks()
        trainer = stage.trainer(callbacks=[LambdaCallback(**dict.fromkeys(hooks, wrap(looks)))])
        trainer.fit(module, loader(12))
        return Outcome(module, trainer, looks.seen)

    return scenario


WRAPS: dict[str, Callable[[Looks], Any]] = {
    "function": lambda looks: lambda *args: looks(*args),
    "bound method": lambda looks: looks.__call__,
    "partial": lambda looks: partial(Looks.__call__, looks),
    "callable object": lambda looks: looks,
}


def test_lambda_callback_reads_weights_every_step() -> None:
    for mine in assert_like_stock(looking(HOOKS, WRAPS["function"]), *SCHEDULES):
        assert len(mine.facts) == 6 * 3 + 2 + 1
        assert not torch.equal(mine.facts[0], mine.facts[-1])


@pytest.mark.parametrize("wrap", ["bound method", "partial", "callable object"])
def test_lambda_callback_takes_any_callable(wrap: str) -> None:
    assert_like_stock(looking(HOOKS, WRAPS[wrap]), "next_forward")


@pytest.mark.parametrize("hook", HOOKS)
def test_lambda_callback_with_a_single_hook_meets_updated_weights(hook: str) -> None:
    """Each hook alone must be reason enough to wait."""
    assert_like_stock(looking((hook,), WRAPS["function"]), "next_forward")


@pytest.mark.parametrize("precision", BF16)
def test_lambda_callback_reads_weights_in_bf16(precision: str) -> None:
    assert_schedules_agree(looking(HOOKS, WRAPS["function"]), precision)


class Writes:
    """Writes zeros between steps, and keeps their effect."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        with torch.no_grad():
            pl_module.head.weight[::2].zero_()
            pl_module.net.layers[1].linear1.weight.data = pl_module.net.layers[1].linear1.weight * 0.5
        self.seen.append(weights(pl_module))


def writing(hook: str) -> Scenario:
    def scenario(stage: Stage) -> Outcome:
        module, writes = Encoder(), Writes()
        trainer = stage.trainer(callbacks=[LambdaCallback(**{hook: writes.__call__})])
        trainer.fit(module, loader(12))
        return Outcome(module, trainer, writes.seen)

    return scenario


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_start", "on_train_end"])
def test_what_a_callback_writes_and_assigns_between_steps_counts(hook: str) -> None:
    assert_like_stock(writing(hook), *SCHEDULES)


@pytest.mark.parametrize("update", SCHEDULES)
@pytest.mark.parametrize("precision", BF16)
def test_zeros_written_between_steps_are_zeros_in_bf16(precision: str, update: str) -> None:
    outcome = play(writing("on_train_end"), MegaTrainStrategy(update=update), precision)
    head = outcome.module.head.weight
    assert head[::2].abs().max() < 1e-37
    assert torch.isfinite(head).all()
    assert (head[1::2] != 0).all()


@pytest.mark.parametrize("precision", BF16)
def test_training_goes_on_from_zeros_in_bf16(precision: str) -> None:
    assert_schedules_agree(writing("on_train_batch_end"), precision)
