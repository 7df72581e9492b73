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
        come_home: does so, and brings what the device holds home: hooks of epochs may use optimizer state.
        every_batch: wait after every batch, and not only where an epoch, a validation or the training ends.
    """

    def __init__(self, drain: Callable[[], None], come_home: Callable[[], None], *, every_batch: bool) -> None:
        self.drain = drain
        self.come_home = come_home
        self.every_batch = every_batch

    def on_train_batch_end(self, *args: Any) -> None:
        """Wait, if somebody may look after every batch."""
        if self.every_batch:
            self.drain()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait."""
        self.come_home()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait."""
        self.come_home()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait."""
        self.come_home()


_WHILE_TRAINING = (
    *_BETWEEN_STEPS,
    "on_before_optimizer_step",
    "on_before_backward",
    "on_after_backward",
    "on_train_epoch_start",
    "on_train_epoch_end",
)
_WHILE_VALIDATING = (
    "on_validation_start",
    "on_validation_end",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_validation_batch_start",
    "on_validation_batch_end",
)


def who_may_write(trainer: Trainer) -> str | None:
    """Who may write weights while a checkpoint is written beside training, and how, or None.

    A module is trusted to leave them alone in its hooks of validation, where many log and reset metrics.
    """
    module = trainer.lightning_module
    if not module.automatic_optimization:
        return "a module that optimizes manually may change weights within a step"
    for hook in (*_WHILE_TRAINING, "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping"):
        if overrides(module, hook):
            return f"the module's {hook} may change weights"
    for callback in trainer.callbacks:
        if _is_known_harmless(callback):
            continue
        for hook in (*_WHILE_TRAINING, *_WHILE_VALIDATING):
            if overrides(callback, hook):
                return f"{type(callback).__name__}.{hook} may change weights"
    return None


def _is_known_harmless(callback: Callback) -> bool:
    """Whether a callback reads and writes no weights."""
    kind = type(callback)
    if kind.__module__.split(".")[0] == __package__ or not getattr(callback, "reads_weights", True):
        return True
    return kind.__module__.startswith("lightning.") and isinstance(callback, _READ_NO_WEIGHTS)


def who_looks_between_steps(trainer: Trainer) -> str | None:
    """Name of the first module or callback that may read or write weights between two steps, or None.

    A callback that does not can say so with a class attribute ``reads_weights = False``.
    """
    for hook in _BETWEEN_STEPS:
        if overrides(trainer.lightning_module, hook):
            return f"the module's {hook}"
    for callback in trainer.callbacks:
        if _is_known_harmless(callback):
            continue
        for hook in _BETWEEN_STEPS:
            if overrides(callback, hook):
                return f"{type(callback).__name__}.{hook}"
    return None
