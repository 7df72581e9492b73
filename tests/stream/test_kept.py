"""Graphs that are kept for the backward: the same bits as recomputing, one forward less, no weight held."""

from functools import partial
from typing import Any

import pytest
import torch
import zoo
from fitting import MegaTrainStrategy, assert_same_bits, assert_same_optimizer_bits, fit, stock
from torch import Tensor, nn


@pytest.mark.parametrize("update", ["next_forward", "in_backward"])
@pytest.mark.parametrize("name", zoo.ALL)
def test_the_stock_strategys_bits(name: str, update: str) -> None:
    arguments = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0} if update == "next_forward" else {}
    make = partial(zoo.ALL[name], scheduler=True, log_norm=False)
    a, trainer_a = fit(make, stock(), **arguments)
    b, trainer_b = fit(make, MegaTrainStrategy(update=update, recompute="never"), **arguments)
    assert_same_bits(a, b)
    assert_same_optimizer_bits(trainer_a, trainer_b)


@pytest.mark.parametrize("microbatch", [None, 3])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", ["encoder", "llama", "frozen", "tied"])
def test_the_bits_of_recomputing(name: str, precision: str, microbatch: int | None) -> None:
    runs = [
        fit(
            partial(zoo.ALL[name], log_norm=False),
            MegaTrainStrategy(recompute=recompute, microbatch=microbatch, prefetch=1),
            precision=precision,
            max_steps=4,
        )
        for recompute in ("always", "never")
    ]
    assert_same_bits(runs[0][0], runs[1][0])


class Counting(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        Counting.calls += 1
        return x + torch.relu(self.inner(x))


class Plain(zoo.Zoo):
    block: type[nn.Module] = Counting

    def __init__(self, **kw: Any) -> None:
        super().__init__(**{"log_norm": False, "optimizer": "sgd", "lr": 0.1, **kw})
        self.embed, self.head = nn.Embedding(zoo.VOCAB, 32), nn.Linear(32, zoo.VOCAB)
        self.blocks = nn.ModuleList(self.block() for _ in range(6))

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = self.between(block(x))
        return zoo.token_loss(self.head(x), batch)

    def between(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(("recompute", "forwards"), [("always", 2), ("never", 1)])
def test_one_forward_less(recompute: str, forwards: int) -> None:
    Counting.calls = 0
    fit(Plain, MegaTrainStrategy(recompute=recompute), max_steps=3)
    assert Counting.calls == 3 * 6 * forwards


def test_no_graph_holds_a_weight() -> None:
    """There is one slot, which every unit fills anew: whatever a graph saved of it is looked up in the backward."""
    a, _ = fit(Plain, stock(), max_steps=3)
    b, _ = fit(Plain, MegaTrainStrategy(recompute="never", prefetch=0), max_steps=3)
    assert_same_bits(a, b)


class ChangesOutputs(Plain):
    def between(self, x: Tensor) -> Tensor:
        return x.mul_(1.5)


class SavesItsOutput(Counting):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.inner(x))


def test_what_a_graph_needs_and_somebody_changes_is_refused() -> None:
    class Module(ChangesOutputs):
        block = SavesItsOutput

    with pytest.raises(RuntimeError, match=r"changed in place.*recompute='always'"):
        fit(Module, MegaTrainStrategy(recompute="never"), max_steps=1)
    fit(Module, MegaTrainStrategy(recompute="always"), max_steps=1)


def test_outputs_that_no_graph_needs_may_be_changed() -> None:
    a, _ = fit(ChangesOutputs, stock(), max_steps=3)
    b, _ = fit(ChangesOutputs, MegaTrainStrategy(recompute="never"), max_steps=3)
    assert_same_bits(a, b)


class TwiceBackward(Plain):
    def __init__(self, **kw: Any) -> None:
        super().__init__(**kw)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss)
        optimizer.step()


def test_a_second_backward_computes_again() -> None:
    a, _ = fit(TwiceBackward, stock(), max_steps=3)
    Counting.calls = 0
    b, _ = fit(TwiceBackward, MegaTrainStrategy(recompute="never"), max_steps=3)
    assert_same_bits(a, b)
    assert Counting.calls == 3 * 6 * 2


def test_other_choices_are_refused() -> None:
    with pytest.raises(ValueError, match="recompute"):
        MegaTrainStrategy(recompute="sometimes")
