"""Manual optimization and several optimizers, against the stock strategy and against automatic optimization."""

from functools import partial
from typing import Any

import pytest
import torch
import zoo
from fitting import MegaTrainStrategy, fit
from fitting import stock as single_device
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from matrix import BF16, EAGER, SMALL, Encoder, assert_like_stock, fitting, play, weights
from torch import Tensor


class ByHand(zoo.Encoder):
    """The automatic loop, written out."""

    def __init__(self, *, every: int = 1, closure: bool = False, **kw: Any) -> None:
        super().__init__(scheduler=True, **SMALL, **kw)
        self.automatic_optimization = False
        self.every, self.closure = every, closure

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def work() -> Tensor:
            loss = self.loss(batch)
            self.losses.append(loss.detach().cpu())
            if batch_idx % self.every == 0:
                optimizer.zero_grad()
            self.manual_backward(loss / self.every)
            return loss

        if self.closure:
            optimizer.step(closure=work)
        else:
            work()
            if (batch_idx + 1) % self.every == 0:
                optimizer.step()

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers().step()


@pytest.mark.parametrize("arguments", [{}, {"every": 2}, {"closure": True}])
def test_manual_optimization(arguments: dict[str, Any]) -> None:
    assert_like_stock(fitting(partial(ByHand, **arguments)), "auto", "blocking")


@pytest.mark.parametrize("precision", ["32-true", *BF16])
@pytest.mark.parametrize(
    ("arguments", "trainer"),
    [({}, {}), ({"every": 2}, {"accumulate_grad_batches": 2})],
)
def test_manual_optimization_equals_automatic(
    arguments: dict[str, Any], trainer: dict[str, Any], precision: str
) -> None:
    """Without dropout, whose backward in bf16-mixed depends on the autocast that only a manual backward runs in."""
    by_hand = play(fitting(partial(ByHand, dropout=0.0, **arguments), samples=16), MegaTrainStrategy(), precision)
    plain = fitting(partial(Encoder, scheduler=True, dropout=0.0), samples=16, **trainer)
    automatic = play(plain, MegaTrainStrategy(update="blocking", accumulate_dtype="bfloat16"), precision)
    assert torch.equal(weights(by_hand.module), weights(automatic.module))
    assert by_hand.module.losses[-1] < by_hand.module.losses[0]


@pytest.mark.parametrize("update", EAGER)
def test_manual_optimization_refuses_a_schedule_that_owns_the_step(update: str) -> None:
    with pytest.raises(MisconfigurationException, match=r"optimizes manually; set MegaTrainStrategy\(update='block"):
        play(fitting(ByHand), MegaTrainStrategy(update=update))


class Halves(zoo.Encoder):
    """Three optimizers of three kinds share one network, units and residents alike; they take turns, or step together.

    The last block is in none of them.
    """

    def __init__(self, together: bool) -> None:
        super().__init__(log_norm=False)
        self.automatic_optimization = False
        self.together = together

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers, schedulers = self.optimizers(), self.lr_schedulers()
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        self.manual_backward(loss)
        for i, (optimizer, scheduler) in enumerate(zip(optimizers, schedulers, strict=True)):
            if self.together or batch_idx % 3 == i:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        first, second, _ = self.net.layers
        optimizers = [
            torch.optim.AdamW([*self.embed.parameters(), *first.linear1.parameters()], lr=1e-2),
            torch.optim.SGD([*first.linear2.parameters(), *self.head.parameters()], lr=1e-1, momentum=0.9),
            torch.optim.Adam(second.parameters(), lr=1e-2),
        ]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in optimizers]


@pytest.mark.parametrize("together", [True, False])
def test_several_optimizers_share_a_network(together: bool) -> None:
    assert_like_stock(fitting(partial(Halves, together)))


@pytest.mark.parametrize("precision", BF16)
@pytest.mark.parametrize("together", [True, False])
def test_several_optimizers_train_in_bf16(together: bool, precision: str) -> None:
    outcome = play(fitting(partial(Halves, together), samples=16), MegaTrainStrategy(), precision)
    start = play(fitting(partial(Halves, together), max_steps=0), MegaTrainStrategy(), precision)
    moved = {n for n, p in outcome.module.named_parameters() if not torch.equal(p, start.module.get_parameter(n))}
    owned = ("embed.", "head.", "net.layers.0.linear", "net.layers.1.")
    assert moved == {n for n, _ in outcome.module.named_parameters() if n.startswith(owned)}
    assert outcome.module.losses[-1] < outcome.module.losses[0]


class ClippedByHand(zoo.Encoder):
    """Clips by hand, and notes how far each step moves the weights: as far as the clipped gradients, at rate one.

    Args:
        raw: pass the optimizer itself to `clip_gradients`, not Lightning's wrapper.
        every: clip each of so many backwards of a step.
        bad: batches with a loss that is not a number.
    """

    def __init__(self, *, raw: bool = False, every: int = 1, bad: tuple[int, ...] = ()) -> None:
        super().__init__(layers=2, log_norm=False, dropout=0.0, optimizer="sgd", lr=1.0)
        self.automatic_optimization = False
        self.raw, self.every, self.bad = raw, every, bad
        self.moved: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        before = [p.detach().float().clone() for p in self.parameters()]
        for part in batch.chunk(self.every):
            self.manual_backward(self.loss(part) * (float("nan") if batch_idx in self.bad else 1.0))
            self.clip_gradients(optimizer.optimizer if self.raw else optimizer, gradient_clip_val=0.5)
        optimizer.step()
        moved = [(p.detach().float() - b).norm() for p, b in zip(self.parameters(), before, strict=True)]
        self.moved.append(float(torch.stack(moved).norm()))


@pytest.mark.parametrize("precision", ["32-true", *BF16])
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("every", [1, 2])
def test_clipping_by_hand(every: int, raw: bool, precision: str) -> None:
    make = partial(ClippedByHand, raw=raw, every=every)
    stock, _ = fit(make, single_device(), max_steps=3)
    ours, _ = fit(make, MegaTrainStrategy(), precision=precision, max_steps=3)
    assert stock.moved[0] == pytest.approx(0.5, rel=1e-3)
    assert ours.moved == pytest.approx(stock.moved, rel=1e-6 if precision == "32-true" else 0.05)


@pytest.mark.parametrize("precision", ["32-true", *BF16])
def test_a_step_by_hand_that_is_not_finite_is_skipped(precision: str) -> None:
    make = partial(ClippedByHand, bad=(1,))
    ours, trainer = fit(make, MegaTrainStrategy(nonfinite="skip"), precision=precision, max_steps=3)
    assert [moved > 0 for moved in ours.moved] == [True, False, True]
    assert trainer.strategy.skipped_steps == 1


class StepsOverBad(ClippedByHand):
    """Makes no step with bad gradients, and so none is left to be skipped."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch) * (float("nan") if batch_idx in self.bad else 1.0))
        self.clip_gradients(optimizer, gradient_clip_val=0.5)
        if batch_idx not in self.bad:
            optimizer.step()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_bad_step_that_is_not_made_skips_no_other(precision: str) -> None:
    steps = {"max_steps": -1, "max_epochs": 1, "limit_train_batches": 3}
    _, trainer = fit(partial(StepsOverBad, bad=(1,)), MegaTrainStrategy(nonfinite="skip"), precision=precision, **steps)
    assert trainer.strategy.skipped_steps == 0
