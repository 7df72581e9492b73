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
from fitting import loader
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    OnExceptionCheckpoint,
    RichModelSummary,
    RichProgressBar,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.model_summary import summarize
from matrix import (
    BF16,
    COLLECTING,
    SCHEDULES,
    Outcome,
    Scenario,
    Stage,
    assert_like_stock,
    assert_schedules_agree,
    fitting,
    play,
    stock,
    weights,
)
from torch import Tensor, nn

Encoder = partial(zoo.Encoder, log_norm=False)


def found(outcome: Outcome, kind: type) -> Any:
    (callback,) = (c for c in outcome.trainer.callbacks if type(c) is kind)
    return callback


@pytest.mark.parametrize("update", SCHEDULES)
def test_early_stopping(update: str) -> None:
    """At this learning rate the loss diverges."""

    def state(outcome: Outcome) -> list[Any]:
        stopping = found(outcome, EarlyStopping)
        return [stopping.stopped_epoch, stopping.wait_count, stopping.best_score, stopping.stopping_reason_message]

    scenario = fitting(
        partial(Encoder, lr=0.5, scheduler=True),
        callbacks=lambda m: [EarlyStopping("val_loss", patience=2)],
        facts=state,
        max_epochs=9,
    )
    _, mine = assert_like_stock(scenario, update)
    assert 0 < mine.facts[0] < 8


def logging(make: Callable[[], zoo.Zoo], callbacks: Callable[[], list[L.Callback]], columns_only: bool) -> Scenario:
    """A fit whose facts are what a CSV logger wrote, or its column names."""

    def scenario(stage: Stage) -> Outcome:
        module, logger = make(), CSVLogger(stage.directory)
        trainer = stage.trainer(logger=logger, log_every_n_steps=1, callbacks=callbacks())
        trainer.fit(module, loader(12), loader(8))
        with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        return Outcome(module, trainer, sorted(rows[0]) if columns_only else rows)

    return scenario


@pytest.mark.parametrize("update", SCHEDULES)
def test_learning_rate_monitor(update: str) -> None:
    monitors = partial(LearningRateMonitor, logging_interval="step", log_momentum=True, log_weight_decay=True)
    scenario = logging(partial(zoo.Cosine, log_norm=False), lambda: [monitors()], columns_only=False)
    _, mine = assert_like_stock(scenario, update)
    rates = [row["lr-AdamW/pg1"] for row in mine.facts if row["lr-AdamW/pg1"]]
    assert len(set(rates)) == 6


@pytest.mark.parametrize("update", SCHEDULES)
def test_device_stats_monitor(update: str) -> None:
    _, mine = assert_like_stock(logging(Encoder, lambda: [DeviceStatsMonitor(True)], columns_only=True), update)
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
    def summarize(*args: Any, **kwargs: Any) -> None:
        SUMMARIES.append((args, kwargs))


class RichNoted(RichModelSummary):
    @staticmethod
    def summarize(*args: Any, **kwargs: Any) -> None:
        RichModelSummary.summarize(*args, **kwargs)
        SUMMARIES.append((args, kwargs))


class SummaryMidway(L.Callback):
    """Asks for a summary in the middle of an epoch."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        summary = summarize(pl_module, max_depth=-1)
        SUMMARIES.append((summary._get_summary_data(), summary.total_parameters, summary.trainable_parameters))


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
    assert printed[1][0][0][1:3] == (total, trainable)
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


@pytest.mark.parametrize("update", SCHEDULES)
def test_rich_progress_bar(update: str, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = fitting(
        partial(LogsProgress, log_norm=False),
        callbacks=lambda m: [RichProgressBar(refresh_rate=1)],
        facts=lambda outcome: outcome.trainer.progress_bar_metrics,
        enable_progress_bar=True,
        val_check_interval=2,
    )
    _, mine = assert_like_stock(scenario, update)
    assert {"loss_step", "loss_epoch"} <= mine.facts.keys()


@pytest.mark.parametrize("update", SCHEDULES)
def test_timer_that_only_watches(update: str) -> None:
    def stages(outcome: Outcome) -> list[bool]:
        timer = found(outcome, Timer)
        return [timer.time_elapsed(stage) > 0 for stage in ("train", "validate", "test")]

    _, mine = assert_like_stock(fitting(Encoder, callbacks=lambda m: [Timer()], facts=stages), update)
    assert mine.facts == [True, True, False]


ACCUMULATION: dict[str, Any] = {
    "callbacks": lambda m: [GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})],
    "max_epochs": 3,
    "samples": 16,
}


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("update", COLLECTING)
def test_gradient_accumulation_scheduler(update: str, clip: float | None) -> None:
    scenario = fitting(partial(zoo.Odd, scheduler=True), gradient_clip_val=clip, **ACCUMULATION)
    _, mine = assert_like_stock(scenario, update)
    assert mine.trainer.global_step == 4 + 2 + 2


@pytest.mark.parametrize("precision", BF16)
def test_gradient_accumulation_scheduler_in_bf16(precision: str) -> None:
    assert_schedules_agree(fitting(zoo.Encoder, **ACCUMULATION), precision, COLLECTING)


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


@pytest.mark.parametrize("update", SCHEDULES)
@pytest.mark.parametrize("wrap", WRAPS)
def test_lambda_callback_reads_weights_every_step(wrap: str, update: str) -> None:
    _, mine = assert_like_stock(looking(HOOKS, WRAPS[wrap]), update)
    assert len(mine.facts) == 6 * 3 + 2 + 1
    assert not torch.equal(mine.facts[0], mine.facts[-1])


@pytest.mark.parametrize("hook", HOOKS)
def test_lambda_callback_with_a_single_hook_meets_updated_weights(hook: str) -> None:
    """Each hook alone must be reason enough to wait."""
    assert_like_stock(looking((hook,), WRAPS["function"]), "next_forward")


@pytest.mark.parametrize("precision", BF16)
def test_lambda_callback_reads_weights_in_bf16(precision: str) -> None:
    assert_schedules_agree(looking(HOOKS, WRAPS["function"]), precision)


def saved(path: Any) -> dict[str, Any]:
    checkpoint = torch.load(path, weights_only=True)
    return {k: checkpoint[k] for k in ("epoch", "global_step", "state_dict", "optimizer_states", "lr_schedulers")}


def checkpointing(make: Any, **arguments: Any) -> Scenario:
    """A fit whose facts are all files of the checkpoint callback."""

    def scenario(stage: Stage) -> Outcome:
        module, checkpoint = make(), ModelCheckpoint(stage.directory / "kept", **arguments)
        trainer = stage.trainer(callbacks=[checkpoint], enable_checkpointing=True, val_check_interval=2)
        trainer.fit(module, loader(16), loader(8))
        facts: dict[str, Any] = {p.name: saved(p) for p in sorted((stage.directory / "kept").iterdir())}
        facts["best"] = [Path(checkpoint.best_model_path).name, checkpoint.best_model_score]
        facts["last"] = Path(checkpoint.last_model_path).name
        return Outcome(module, trainer, facts)

    return scenario


SAVING: dict[str, dict[str, Any]] = {
    "every step": {"every_n_train_steps": 1, "save_top_k": -1},
    "best two": {"monitor": "val_loss", "save_top_k": 2, "save_last": True},
    "worst one": {"monitor": "val_loss", "mode": "max", "save_top_k": 1},
    "end of epoch": {"save_on_train_epoch_end": True, "save_last": "link"},
}


@pytest.mark.parametrize("update", SCHEDULES)
@pytest.mark.parametrize("how", SAVING)
def test_model_checkpoint(how: str, update: str) -> None:
    _, mine = assert_like_stock(checkpointing(partial(zoo.Cosine, log_norm=False), **SAVING[how]), update)
    count = {"every step": 8, "best two": 3, "worst one": 1, "end of epoch": 2}[how]
    assert sum(name.endswith(".ckpt") for name in mine.facts) == count


@pytest.mark.parametrize("precision", BF16)
def test_model_checkpoint_in_bf16(precision: str) -> None:
    assert_schedules_agree(checkpointing(partial(zoo.Cosine, log_norm=False), **SAVING["every step"]), precision)


class Fails(zoo.Encoder):
    """Fails where it is told to, once three steps have been taken, and never in the middle of an update."""

    def __init__(self, where: str) -> None:
        super().__init__(log_norm=False, scheduler=True)
        self.where = where
        self.net.layers[1].linear1.register_forward_pre_hook(self.fail_at("unit"))

    def fail_at(self, where: str) -> Callable[..., None]:
        def check(*args: Any) -> None:
            if self.where == where and self.trainer.global_step == 3:
                raise ZeroDivisionError(where)

        return check

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.fail_at("training step")()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.fail_at("validation step")()
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("update", SCHEDULES)
@pytest.mark.parametrize("where", ["unit", "training step", "validation step", "batch end"])
def test_on_exception_checkpoint(where: str, update: str) -> None:
    def scenario(stage: Stage) -> Outcome:
        module = Fails(where)
        guard = OnExceptionCheckpoint(stage.directory)
        batch_end = LambdaCallback(on_train_batch_end=lambda *args: module.fail_at("batch end")())
        trainer = stage.trainer(callbacks=[guard, batch_end], enable_checkpointing=True, val_check_interval=3)
        with pytest.raises(ZeroDivisionError, match=where):
            trainer.fit(module, loader(16), loader(8))
        return Outcome(module, trainer, saved(guard.ckpt_path))

    _, mine = assert_like_stock(scenario, update)
    assert mine.facts["global_step"] == 3
    assert all(isinstance(p, nn.Parameter) and p.dtype == torch.float32 for p in mine.module.parameters())
