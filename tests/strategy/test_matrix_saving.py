"""Callbacks that save, under every schedule: each file holds what the stock strategy's would."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from fitting import loader
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, OnExceptionCheckpoint
from matrix import (
    BF16,
    EAGER,
    SMALL,
    Encoder,
    Outcome,
    Scenario,
    Stage,
    assert_like_stock,
    assert_schedules_agree,
)
from torch import Tensor, nn


def saved(path: Any) -> dict[str, Any]:
    checkpoint = torch.load(path, weights_only=True)
    return {k: checkpoint[k] for k in ("epoch", "global_step", "state_dict", "optimizer_states", "lr_schedulers")}


def checkpointing(make: Any, **arguments: Any) -> Scenario:
    """A fit whose facts are all files of the checkpoint callback."""

    def scenario(stage: Stage) -> Outcome:
        module, checkpoint = make(), ModelCheckpoint(stage.directory / "kept", **arguments)
        trainer = stage.trainer(callbacks=[checkpoint], enable_checkpointing=True, val_check_interval=2)
        trainer.fit(module, loader(12), loader(4))
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


@pytest.mark.parametrize("how", SAVING)
def test_model_checkpoint(how: str) -> None:
    count = {"every step": 6, "best two": 3, "worst one": 1, "end of epoch": 2}[how]
    for mine in assert_like_stock(checkpointing(partial(Encoder, scheduler=True), **SAVING[how]), *EAGER):
        assert sum(name.endswith(".ckpt") for name in mine.facts) == count


@pytest.mark.parametrize("precision", BF16)
def test_model_checkpoint_in_bf16(precision: str) -> None:
    assert_schedules_agree(checkpointing(partial(Encoder, scheduler=True), **SAVING["every step"]), precision)


class Fails(zoo.Encoder):
    """Fails where it is told to, once three steps have been taken, and never in the middle of an update."""

    def __init__(self, where: str) -> None:
        super().__init__(scheduler=True, **SMALL)
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


@pytest.mark.parametrize("where", ["unit", "training step", "validation step", "batch end"])
def test_on_exception_checkpoint(where: str) -> None:
    def scenario(stage: Stage) -> Outcome:
        module = Fails(where)
        guard = OnExceptionCheckpoint(stage.directory)
        batch_end = LambdaCallback(on_train_batch_end=lambda *args: module.fail_at("batch end")())
        trainer = stage.trainer(callbacks=[guard, batch_end], enable_checkpointing=True, val_check_interval=3)
        with pytest.raises(ZeroDivisionError, match=where):
            trainer.fit(module, loader(16), loader(4))
        return Outcome(module, trainer, saved(guard.ckpt_path))

    for mine in assert_like_stock(scenario, *EAGER):
        assert mine.facts["global_step"] == 3
        assert all(isinstance(p, nn.Parameter) and p.dtype == torch.float32 for p in mine.module.parameters())
