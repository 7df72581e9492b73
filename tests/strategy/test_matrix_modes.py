"""Trainer modes under every schedule, against the stock strategy."""

from functools import partial
from typing import Any

import lightning as L
import pytest
import zoo
from fitting import SCHEDULES, loader
from lightning.pytorch.callbacks import Timer
from matrix import (
    BF16,
    COLLECTING,
    EAGER,
    SMALL,
    Encoder,
    Outcome,
    Stage,
    assert_like_stock,
    assert_schedules_agree,
    fitting,
)
from torch import Tensor


class ReturnsDict(zoo.Encoder):
    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return {"loss": loss, "index": batch_idx, "scaled": loss.detach() * 2}


class Outputs(L.Callback):
    """Keeps what the training steps returned."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append({k: v.clone() if isinstance(v, Tensor) else v for k, v in outputs.items()})


def outputs_of(outcome: Outcome) -> list[Any]:
    return next(c.seen for c in outcome.trainer.callbacks if isinstance(c, Outputs))


def test_training_step_that_returns_a_dict() -> None:
    make = partial(ReturnsDict, **SMALL)
    for mine in assert_like_stock(fitting(make, callbacks=lambda m: [Outputs()], facts=outputs_of), *SCHEDULES):
        assert [o["index"] for o in mine.facts] == [0, 1, 2] * 2


class SometimesNone(zoo.Encoder):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in (0, 3) else loss


@pytest.mark.parametrize("batches", [2, 3])
def test_steps_without_a_loss_among_accumulated_ones(batches: int) -> None:
    make = partial(SometimesNone, scheduler=True)
    assert_like_stock(fitting(make, accumulate_grad_batches=batches, gradient_clip_val=0.5, samples=20), *COLLECTING)


@pytest.mark.parametrize("precision", BF16)
def test_steps_without_a_loss_in_bf16(precision: str) -> None:
    assert_schedules_agree(fitting(partial(SometimesNone, **SMALL), samples=20), precision)


def journey(make: Any) -> Any:
    """Validation of two loaders before, in the middle of, and between two fits; test and prediction of two."""

    def scenario(stage: Stage) -> Outcome:
        module = make()
        trainer = stage.trainer(max_epochs=1, val_check_interval=2, limit_val_batches=2, limit_predict_batches=1)
        evaluated = [loader(8), loader(4, batch_size=3)]
        facts: list[Any] = [trainer.validate(module, evaluated, verbose=False)]
        trainer.fit(module, loader(12), evaluated)
        facts.append(dict(trainer.callback_metrics))
        facts.append(trainer.validate(module, evaluated, verbose=False))
        facts.append(trainer.test(module, evaluated, verbose=False))
        facts.append(trainer.predict(module, evaluated))
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, loader(12), evaluated)
        facts.append(trainer.validate(module, evaluated[0], verbose=False))
        facts.append([p.dtype for p in module.parameters()])
        return Outcome(module, trainer, facts)

    return scenario


class ManyLoaders(zoo.Tied):
    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.loss(batch)


def test_all_modes_with_several_loaders() -> None:
    for mine in assert_like_stock(journey(partial(ManyLoaders, **SMALL, scheduler=True)), *SCHEDULES):
        assert {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"} <= mine.facts[1].keys()


@pytest.mark.parametrize("precision", BF16)
def test_all_modes_with_several_loaders_in_bf16(precision: str) -> None:
    assert_schedules_agree(journey(partial(ManyLoaders, **SMALL)), precision)


LIMITS: dict[str, dict[str, Any]] = {
    "batches": {"limit_train_batches": 3, "limit_val_batches": 1},
    "fractions": {"limit_train_batches": 0.6, "limit_test_batches": 0.5},
    "no validation": {"limit_val_batches": 0},
    "no training": {"limit_train_batches": 0},
    "overfit": {"overfit_batches": 2, "max_epochs": 3},
    "fast_dev_run": {"fast_dev_run": 3},
    "validation across epochs": {"check_val_every_n_epoch": None, "val_check_interval": 3},
    "validation without inference mode": {"inference_mode": False, "val_check_interval": 2},
    "no step": {"max_steps": 0},
    "loaders made anew": {"reload_dataloaders_every_n_epochs": 1},
}


@pytest.mark.parametrize("limit", LIMITS)
def test_limits(limit: str) -> None:
    """Under the only schedule whose updates may outlive a loop."""
    assert_like_stock(fitting(Encoder, samples=20, **LIMITS[limit]), "next_forward")


def test_anomaly_detection() -> None:
    assert_like_stock(fitting(Encoder, detect_anomaly=True, max_steps=2), "in_backward")


class Stops(zoo.Encoder):
    """Asks the trainer to stop, from the fourth training step or from the first validation."""

    def __init__(self, where: str) -> None:
        super().__init__(**SMALL)
        self.where = where

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.where == "step" and batch_idx == 3:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        if self.where == "validation" and not self.trainer.sanity_checking:
            self.trainer.should_stop = True


@pytest.mark.parametrize(
    ("where", "arguments", "steps"),
    [
        ("step", {}, 4),
        ("step", {"min_steps": 7}, 7),
        ("step", {"min_epochs": 2, "max_epochs": 3}, 10),
        ("validation", {"val_check_interval": 2}, 2),
    ],
)
def test_early_exit(where: str, arguments: dict[str, Any], steps: int) -> None:
    for mine in assert_like_stock(fitting(partial(Stops, where), samples=20, **arguments), *EAGER):
        assert mine.trainer.global_step == steps


@pytest.mark.parametrize("how", ["max_time", "callback"])
def test_time_runs_out(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that counts a second whenever it is asked."""

    def tick(self: Timer, stage: str = "train") -> float:
        self.asked = getattr(self, "asked", 0) + 1
        return float(self.asked)

    monkeypatch.setattr(Timer, "time_elapsed", tick)
    limit = {"max_time": "00:00:00:05"} if how == "max_time" else {}
    callbacks: Any = (lambda m: [Timer(duration={"seconds": 5}, verbose=False)]) if how == "callback" else lambda m: []
    for mine in assert_like_stock(fitting(Encoder, callbacks=callbacks, **limit), *EAGER):
        assert mine.trainer.global_step == 4  # the first question comes before the first step


class Interrupts(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 3:
            raise KeyboardInterrupt


def test_keyboard_interrupt_keeps_what_was_trained() -> None:
    def scenario(stage: Stage) -> Outcome:
        module = Encoder()
        trainer = stage.trainer(callbacks=[Interrupts()])
        with pytest.raises(SystemExit):
            trainer.fit(module, loader(20))
        return Outcome(module, trainer, trainer.interrupted)

    for mine in assert_like_stock(scenario, *EAGER):
        assert mine.trainer.global_step == 3
