"""Lightning's callbacks that watch, count, stop and save, under every schedule, against the stock strategy."""

import csv
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import zoo
from fitting import SCHEDULES, loader, stock
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.model_summary import summarize
from matrix import (
    BF16,
    COLLECTING,
    EAGER,
    SMALL,
    Encoder,
    Outcome,
    Scenario,
    Stage,
    assert_like_stock,
    assert_schedules_agree,
    fitting,
    play,
)
from torch import Tensor


def found(outcome: Outcome, kind: type) -> Any:
    (callback,) = (c for c in outcome.trainer.callbacks if type(c) is kind)
    return callback


def test_early_stopping() -> None:
    """The loss falls, which this callback is told to dislike."""

    def state(outcome: Outcome) -> list[Any]:
        stopping = found(outcome, EarlyStopping)
        return [stopping.stopped_epoch, stopping.wait_count, stopping.best_score, stopping.stopping_reason_message]

    scenario = fitting(
        partial(Encoder, scheduler=True),
        callbacks=lambda m: [EarlyStopping("val_loss", patience=2, mode="max")],
        facts=state,
        max_epochs=9,
    )
    for mine in assert_like_stock(scenario, *EAGER):
        assert mine.facts[0] == 2


def logging(make: Callable[[], zoo.Zoo], callbacks: Callable[[], list[L.Callback]], columns_only: bool) -> Scenario:
    """A fit whose facts are what a CSV logger wrote, or its column names."""

    def scenario(stage: Stage) -> Outcome:
        module, logger = make(), CSVLogger(stage.directory)
        trainer = stage.trainer(logger=logger, log_every_n_steps=1, callbacks=callbacks())
        trainer.fit(module, loader(12), loader(4))
        with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        return Outcome(module, trainer, sorted(rows[0]) if columns_only else rows)

    return scenario


def test_learning_rate_monitor() -> None:
    monitors = partial(LearningRateMonitor, logging_interval="step", log_momentum=True, log_weight_decay=True)
    scenario = logging(partial(zoo.Cosine, log_norm=False), lambda: [monitors()], columns_only=False)
    for mine in assert_like_stock(scenario, *SCHEDULES):
        rates = [row["lr-AdamW/pg1"] for row in mine.facts if row["lr-AdamW/pg1"]]
        assert len(set(rates)) == 6


def test_device_stats_monitor() -> None:
    for mine in assert_like_stock(logging(Encoder, lambda: [DeviceStatsMonitor(True)], columns_only=True), *EAGER):
        assert any(name.startswith("DeviceStatsMonitor.on_train_batch_end/cpu") for name in mine.facts)


class Shaped(zoo.Frozen):
    """Has a forward, so that a summary can tell shapes, and frozen parameters."""

    def __init__(self) -> None:
        super().__init__(log_norm=False)
        self.example_input_array = torch.zeros(2, 5, dtype=torch.long)

    def forward(self, batch: Tensor) -> Tensor:
        return self.head(self.net(self.embed(batch)))


SUMMARIES: list[Any] = []


class Noted(ModelSummary):
    @staticmethod
    def summarize(summary_data: Any, *args: Any, **kwargs: Any) -> None:
        SUMMARIES.append((counts(summary_data), *args))


class RichNoted(RichModelSummary):
    @staticmethod
    def summarize(summary_data: Any, *args: Any, **kwargs: Any) -> None:
        RichModelSummary.summarize(summary_data, *args, **kwargs)
        SUMMARIES.append((counts(summary_data), *args))


def counts(data: list[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    """Without the operations, which depend on the kernels that a precision takes."""
    return [column for column in data if column[0] != "FLOPs"]


class SummaryMidway(L.Callback):
    """Asks for a summary in the middle of an epoch."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        summary = summarize(pl_module, max_depth=-1)
        SUMMARIES.append((counts(summary._get_summary_data()), summary.total_parameters, summary.trainable_parameters))


@pytest.mark.parametrize("precision", ["32-true", *BF16])
@pytest.mark.parametrize("kind", [Noted, RichNoted])
def test_summaries_tell_true_counts(kind: Any, precision: str) -> None:
    """The stock strategy prints the same in every precision."""
    scenario = fitting(Shaped, callbacks=lambda m: [kind(max_depth=-1), SummaryMidway()], max_steps=2)
    printed = []
    for strategy in (stock(), "megatrain"):
        SUMMARIES.clear()
        module = play(scenario, strategy, precision).module
        printed.append(list(SUMMARIES))
    assert printed[0] == printed[1]
    total = sum(p.numel() for p in module.parameters())
    trainable = sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert printed[1][0][1:3] == (total, trainable)
    assert printed[1][1][1:] == (total, trainable)


@pytest.mark.parametrize("kind", [ModelSummary, RichModelSummary])
def test_the_printed_table_names_the_counts(
    kind: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning.pytorch.callbacks.model_summary.log.info", print)
    outcome = play(fitting(Encoder, callbacks=lambda m: [kind()], max_steps=1), "megatrain", "bf16-mixed")
    total = sum(p.numel() for p in outcome.module.parameters())
    assert f"{total / 1000:.1f} K" in capsys.readouterr().out


class LogsProgress(zoo.Encoder):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss


def test_rich_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    scenario = fitting(
        partial(LogsProgress, **SMALL),
        callbacks=lambda m: [RichProgressBar(refresh_rate=1)],
        facts=lambda outcome: outcome.trainer.progress_bar_metrics,
        enable_progress_bar=True,
        val_check_interval=2,
    )
    for mine in assert_like_stock(scenario, *EAGER):
        assert {"loss_step", "loss_epoch"} <= mine.facts.keys()


def test_timer_that_only_watches() -> None:
    def stages(outcome: Outcome) -> list[bool]:
        timer = found(outcome, Timer)
        return [timer.time_elapsed(stage) > 0 for stage in ("train", "validate", "test")]

    for mine in assert_like_stock(fitting(Encoder, callbacks=lambda m: [Timer()], facts=stages), *EAGER):
        assert mine.facts == [True, True, False]


ACCUMULATION: dict[str, Any] = {
    "callbacks": lambda m: [GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})],
    "max_epochs": 3,
    "samples": 16,
}


@pytest.mark.parametrize("clip", [None, 0.2])
def test_gradient_accumulation_scheduler(clip: float | None) -> None:
    scenario = fitting(partial(zoo.Odd, scheduler=True), gradient_clip_val=clip, **ACCUMULATION)
    for mine in assert_like_stock(scenario, *COLLECTING):
        assert mine.trainer.global_step == 4 + 2 + 2


@pytest.mark.parametrize("precision", BF16)
def test_gradient_accumulation_scheduler_in_bf16(precision: str) -> None:
    assert_schedules_agree(fitting(zoo.Encoder, **ACCUMULATION), precision, COLLECTING)
