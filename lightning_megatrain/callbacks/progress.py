"""Lightning's progress bar, with rates that people can read."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar

_FORMS = {"tokens_per_s": ("tokens_per_s", ",.0f"), "model_tflops": ("TFLOP/s", ",.4g"), "waited": ("waited", ".0%")}
"""By the name of a metric: how the bar calls it, and how it is written."""


class ProgressBar(TQDMProgressBar):
    """Lightning's tqdm bar that writes `tokens_per_s` as 12,345 where tqdm would write 1.23e+04.

    With :class:`Monitor` among the callbacks it shows the model's TFLOP/s too, where FLOPs are known, and which share
    of the time the computing device `waited`.

    Args:
        refresh_rate: batches between two refreshes; each one reads the logged loss, which waits for the device.
        leave: keep the finished bar on the screen.
    """

    def __init__(self, refresh_rate: int = 10, leave: bool = True) -> None:
        super().__init__(refresh_rate=refresh_rate, leave=leave)

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        """Return what the bar shows, by name."""
        metrics = super().get_metrics(trainer, pl_module)
        for name, (shown, form) in _FORMS.items():
            if name in metrics:
                metrics[shown] = format(metrics.pop(name), form)
        return metrics
