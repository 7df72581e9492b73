"""Keeps updates that run behind the next forward out of sight of code that reads weights between steps."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    ProgressBar,
    ThroughputMonitor,
    Timer,
)

from lightning_megatrain.hooks import overrides

_BETWEEN_STEPS = ("on_train_batch_end", "on_train_batch_start", "on_before_zero_grad")

_READ_NO_WEIGHTS = (
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,  # asks the strategy for the weights, which waits
    ModelSummary,
    ProgressBar,
    ThroughputMonitor,
    Timer,
)


class Fence(Callback):
    """First of the trainer's callbacks: waits for updates before the others may look.

    Lightning has no strategy hook that runs before users' ``on_train_batch_end``.

    Args:
        drain: waits for all updates.
        every_batch: wait after every batch, and not only where an epoch, a validation or the training ends.
    """

    def __init__(self, drain: Callable[[], None], *, every_batch: bool) -> None:
        self.drain = drain
        self.every_batch = every_batch

    def on_train_batch_end(self, *args: Any) -> None:
        """Wait, if somebody may look after every batch."""
        if self.every_batch:
            self.drain()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait."""
        self.drain()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait."""
        self.drain()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait."""
        self.drain()


def who_looks_between_steps(trainer: Trainer) -> str | None:
    """Name of the first module or callback that may read or write weights between two steps, or None.

    A callback that does not can say so with a class attribute ``reads_weights = False``.
    """
    for hook in _BETWEEN_STEPS:
        if overrides(trainer.lightning_module, hook):
            return f"the module's {hook}"
    for callback in trainer.callbacks:
        own = type(callback).__module__.split(".")[0] == __package__
        if own or not getattr(callback, "reads_weights", True):
            continue
        if type(callback).__module__.startswith("lightning.") and isinstance(callback, _READ_NO_WEIGHTS):
            continue
        for hook in _BETWEEN_STEPS:
            if overrides(callback, hook):
                return f"{type(callback).__name__}.{hook}"
    return None
