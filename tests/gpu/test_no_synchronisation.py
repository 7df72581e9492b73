"""A step makes the host wait for the device only where its schedule needs that."""

import warnings
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import zoo
from fitting import MegaTrainStrategy, fit

pytestmark = pytest.mark.gpu


class Counted(L.Callback):
    """Synchronising operations between the starts of two batches, with the model's own left out."""

    reads_weights = False

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.caught: Any = None

    def on_train_batch_start(self, *args: Any) -> None:
        if self.caught is not None:
            self.batches.append(sum("synchronizing CUDA operation" in str(w.message) for w in self.seen))
            self.caught.__exit__(None, None, None)
        self.caught = warnings.catch_warnings(record=True)
        self.seen = self.caught.__enter__()
        warnings.simplefilter("always")

    def on_train_start(self, *args: Any) -> None:
        torch.cuda.set_sync_debug_mode("warn")

    def on_train_end(self, *args: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")
        self.caught.__exit__(None, None, None)


class Quiet(zoo.Encoder):
    """Keeps no loss on the host."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)


@pytest.mark.parametrize("layers", [3, 9])
@pytest.mark.parametrize(
    ("update", "clip", "allowed"), [("in_backward", None, 0), ("next_forward", 1.0, 1), ("next_forward", None, 0)]
)
def test_synchronising_operations_of_a_step(update: str, clip: float | None, allowed: int, layers: int) -> None:
    counted = Counted()
    fit(
        partial(Quiet, layers=layers, log_norm=False),
        MegaTrainStrategy(update=update, host_memory="32GiB", device_update="never"),
        precision="bf16-mixed",
        accelerator="gpu",
        max_steps=8,
        gradient_clip_val=clip,
        callbacks=[counted],
    )
    assert max(counted.batches[3:]) <= allowed
