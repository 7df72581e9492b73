"""Checkpoints come every so many steps and at the end, whatever the end is."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from fitting import MegaTrainStrategy, fit
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatrain.callbacks.checkpoint import StepCheckpoint

make = partial(zoo.Encoder, layers=2, log_norm=False)


def steps_saved(folder: Path, *, max_steps: int, **arguments: Any) -> tuple[list[int], set[str]]:
    """Steps at which a fit saved, and what is there when it is over."""
    saved: list[int] = []

    class Noting(StepCheckpoint):
        def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
            saved.append(trainer.global_step)
            super()._save_checkpoint(trainer, filepath)

    saving = Noting(folder, filename="{step}", save_on_train_epoch_end=True, **arguments)
    fit(make, MegaTrainStrategy(), max_steps=max_steps, callbacks=[saving], enable_checkpointing=True)
    return saved, {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("every", "max_steps", "expected"),
    [(2, 5, [2, 4, 5]), (2, 4, [2, 4]), (100, 3, [3]), (None, 3, [3]), (0, 3, [3])],
)
def test_steps_and_the_end_are_saved_once(
    tmp_path: Path, every: int | None, max_steps: int, expected: list[int]
) -> None:
    saved, there = steps_saved(tmp_path, max_steps=max_steps, every_n_train_steps=every)
    assert saved == expected
    assert there == {f"step={expected[-1]}.ckpt"}
    assert torch.load(tmp_path / f"step={expected[-1]}.ckpt")["global_step"] == expected[-1]


def test_all_are_kept_and_the_last_is_the_last_on_request(tmp_path: Path) -> None:
    _, there = steps_saved(tmp_path, max_steps=5, every_n_train_steps=2, save_top_k=-1, save_last=True)
    assert there == {"step=2.ckpt", "step=4.ckpt", "step=5.ckpt", "last.ckpt"}
    assert torch.load(tmp_path / "last.ckpt")["global_step"] == 5


def test_with_a_metric_the_end_is_saved_if_it_is_among_the_best(tmp_path: Path) -> None:
    _, there = steps_saved(tmp_path, max_steps=5, every_n_train_steps=2, monitor="step", mode="max", save_top_k=2)
    assert there == {"step=4.ckpt", "step=5.ckpt"}


def test_lightnings_own_would_lose_the_end(tmp_path: Path) -> None:
    """Why there is a class of ours."""
    saving = ModelCheckpoint(tmp_path, filename="{step}", save_on_train_epoch_end=True, every_n_train_steps=2)
    fit(make, MegaTrainStrategy(), max_steps=5, callbacks=[saving], enable_checkpointing=True)
    assert [path.name for path in tmp_path.iterdir()] == ["step=4.ckpt"]
