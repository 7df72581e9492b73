"""One scenario under one strategy after another, and what must be equal afterwards."""

import math
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
import zoo
from fitting import (
    QUIET,
    SCHEDULES,
    MegaTrainStrategy,
    assert_same_bits,
    assert_same_optimizer_bits,
    loader,
    stock,
    under,
)
from torch import Tensor

from lightning_megatrain.update.worker import Worker

COLLECTING = ["blocking", "next_forward"]
"""Schedules that are legal where a step needs all gradients at once."""
EAGER = ["next_forward", "in_backward"]
"""Schedules that update behind the computation."""
SMALL: dict[str, Any] = {"layers": 2, "log_norm": False}
Encoder = partial(zoo.Encoder, **SMALL)
BF16 = ["bf16-mixed", "bf16-true"]


class Stage:
    """What a scenario may use: trainers with the strategy under test, and a directory of its own."""

    def __init__(self, strategy: Any, precision: str, directory: Path) -> None:
        self.strategy, self.precision, self.directory = strategy, precision, directory

    def trainer(self, **arguments: Any) -> L.Trainer:
        defaults = {**QUIET, "max_epochs": 2, "default_root_dir": self.directory}
        return L.Trainer(
            strategy=self.strategy, accelerator="cpu", devices=1, precision=self.precision, **{**defaults, **arguments}
        )


@dataclass
class Outcome:
    """What a scenario leaves; ``facts`` is anything made of tensors, numbers, strings and containers."""

    module: zoo.Zoo
    trainer: L.Trainer
    facts: Any = None


Scenario = Callable[[Stage], Outcome]


def fitting(
    make: Callable[[], zoo.Zoo],
    *,
    callbacks: Callable[[zoo.Zoo], list[L.Callback]] = lambda module: [],
    facts: Callable[[Outcome], Any] = lambda outcome: None,
    samples: int = 12,
    **arguments: Any,
) -> Scenario:
    """A fit with validation; ``facts`` may look at the callbacks in ``outcome.trainer.callbacks``."""

    def scenario(stage: Stage) -> Outcome:
        module = make()
        trainer = stage.trainer(callbacks=callbacks(module), **arguments)
        trainer.fit(module, loader(samples), loader(4))
        outcome = Outcome(module, trainer)
        outcome.facts = facts(outcome)
        return outcome

    return scenario


def play(scenario: Scenario, strategy: Any, precision: str = "32-true") -> Outcome:
    """Equal scenarios get equal random numbers; the worker is late at random, so that who does not wait is caught."""
    dice, do = random.Random(3), Worker._do

    def late(self: Worker, task: Callable[[], None]) -> None:
        time.sleep(dice.random() * 5e-4)
        do(self, task)

    L.seed_everything(1, verbose=False)
    with tempfile.TemporaryDirectory() as directory, mock.patch.object(Worker, "_do", late):
        return scenario(Stage(strategy, precision, Path(directory)))


def assert_like_stock(scenario: Scenario, *updates: str) -> list[Outcome]:
    """In fp32 the scenario leaves the same bits under the stock strategy, played once, and under this one's schedules.

    Without schedules it is ``auto``. Returns what each left.
    """
    theirs, outcomes = play(scenario, stock()), []
    for update in updates or ("auto",):
        with under(update):
            outcomes.append(play(scenario, MegaTrainStrategy(update=update)))
            assert_same_outcome(theirs, outcomes[-1])
    return outcomes


def assert_schedules_agree(
    scenario: Scenario, precision: str, updates: Sequence[str] = SCHEDULES, *, learns: bool = True
) -> Outcome:
    """The scenario leaves the bits of ``blocking`` under every other schedule, and has trained."""
    assert updates[0] == "blocking"
    outcomes = []
    for update in updates:
        with under(update):
            outcomes.append(play(scenario, MegaTrainStrategy(update=update), precision))
            assert_same_outcome(outcomes[0], outcomes[-1])
    module = outcomes[0].module
    assert all(torch.isfinite(p).all() for p in module.parameters())
    assert not learns or module.losses[-1] < module.losses[0]
    return outcomes[0]


def assert_same_outcome(a: Outcome, b: Outcome) -> None:
    """Weights, buffers, losses, optimizer state, progress, metrics and facts are equal, bit for bit."""
    assert (a.trainer.global_step, a.trainer.current_epoch) == (b.trainer.global_step, b.trainer.current_epoch)
    assert_equal(a.module.losses, b.module.losses, "losses")
    assert_equal(a.facts, b.facts, "facts")
    assert_equal(dict(a.trainer.callback_metrics), dict(b.trainer.callback_metrics), "metrics")
    assert_same_bits(a.module, b.module)
    assert_same_optimizer_bits(a.trainer, b.trainer)


def assert_equal(a: Any, b: Any, where: str) -> None:
    """Equal through containers; tensors in dtype and every bit, NaN equal to itself."""
    if isinstance(a, Tensor):
        assert isinstance(b, Tensor), where
        assert a.dtype == b.dtype, where
        assert torch.equal(a, b), f"{where} differs by {(a.double() - b.double()).abs().max()}"
    elif isinstance(a, Mapping):
        assert a.keys() == b.keys(), where
        for key, value in a.items():
            assert_equal(value, b[key], f"{where}[{key!r}]")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), f"{where}: {len(a)} against {len(b)}"
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal(x, y, f"{where}[{i}]")
    else:
        both_nan = isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)
        assert both_nan or a == b, f"{where}: {a!r} against {b!r}"


def weights(module: torch.nn.Module) -> Tensor:
    """All parameters as they stand, in one new vector."""
    return torch.cat([p.detach().flatten() for p in module.parameters()]).clone()
