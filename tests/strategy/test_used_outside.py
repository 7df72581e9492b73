"""Weights that a step reads outside their units, before any unit ran, are never half-way updated ones."""

import time
from collections.abc import Callable
from functools import partial

import pytest
import zoo
from fitting import MegaTrainStrategy, assert_same_bits, fit, stock
from torch import Tensor

from lightning_megatrain.update.worker import Worker


class Penalised(zoo.Encoder):
    """A penalty on the units' weights, computed before the forward."""

    def __init__(self, first_step: int = 0) -> None:
        super().__init__(layers=3, dropout=0.0, log_norm=False)
        self.first_step, self.steps = first_step, 0

    def loss(self, batch: Tensor) -> Tensor:
        self.steps += 1
        if self.steps <= self.first_step:
            return super().loss(batch)
        penalty = 1e-2 * sum(p.pow(2).sum() for p in self.net.parameters())
        return super().loss(batch) + penalty


@pytest.fixture(autouse=True)
def slow_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    do = Worker._do

    def slow(self: Worker, task: Callable[[], None]) -> None:
        time.sleep(5e-3)
        do(self, task)

    monkeypatch.setattr(Worker, "_do", slow)


@pytest.mark.parametrize("update", ["blocking", "next_forward"])
def test_the_stock_strategys_bits(update: str) -> None:
    a, _ = fit(Penalised, stock(), max_steps=6)
    b, _ = fit(Penalised, MegaTrainStrategy(update=update), max_steps=6)
    assert_same_bits(a, b)


def test_the_first_time_may_not_overlap_an_update() -> None:
    late = partial(Penalised, 3)
    a, _ = fit(late, stock(), max_steps=6)
    b, _ = fit(late, MegaTrainStrategy(update="blocking"), max_steps=6)
    assert_same_bits(a, b)
    with pytest.raises(RuntimeError, match=r"perhaps while it was being updated .*set MegaTrainStrategy\(update='bl"):
        fit(late, MegaTrainStrategy(update="next_forward"), max_steps=6)


def test_a_penalty_from_the_second_epoch_on() -> None:
    """Between epochs nothing is being updated."""
    later = partial(Penalised, 5)
    a, _ = fit(later, stock(), max_steps=12, samples=20)
    b, _ = fit(later, MegaTrainStrategy(update="next_forward"), max_steps=12, samples=20)
    assert_same_bits(a, b)
