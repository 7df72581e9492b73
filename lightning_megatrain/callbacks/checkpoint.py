"""Checkpoints every so many steps and where an epoch or the training ends."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint


class StepCheckpoint(ModelCheckpoint):
    """Lightning's `ModelCheckpoint`, with `every_n_train_steps` besides the ends of epochs and not instead of them.

    Lightning's own saves at one of the two: at steps alone, what comes after the last multiple is lost. `max_steps`
    ends an epoch too, and so the last step of a training is always saved. Arguments are those of `ModelCheckpoint`.
    """

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save what was not saved at this step."""
        super().on_train_epoch_end(trainer, pl_module)
        if not self._should_skip_saving_checkpoint(trainer):
            candidates = self._monitor_candidates(trainer)
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)
