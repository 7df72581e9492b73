"""Runs that save every five steps, stop after ten and go on in another trainer."""

import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import zoo
from fitting import QUIET, assert_same_bits, assert_same_optimizer_bits, tokens
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_megatrain import checkpoints

COSINE = partial(zoo.Cosine, dropout=0.1, log_norm=False)


class Resumable:
    """A loader that knows how many batches it gave, and draws a random number for each."""

    def __init__(self, batches: int = 12) -> None:
        self.data = tokens(4 * batches).view(batches, 4, -1)
        self.given = 0

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Tensor]:
        while self.given < len(self.data):
            self.given += 1
            yield (self.data[self.given - 1] + torch.randint(0, 2, ())) % zoo.VOCAB
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


class Plain(Resumable):
    """The same batches, without random numbers: the stock strategy does not save their state."""

    def __iter__(self) -> Iterator[Tensor]:
        for batch in super().__iter__():
            yield batch * 0 + self.data[self.given - 1]


def run(
    strategy: Any,
    folder: Path,
    *,
    make: Any = COSINE,
    steps: int = 20,
    data: Any = Resumable,
    ckpt_path: Path | None = None,
    seed: int = 1,
    accelerator: str = "cpu",
    callbacks: Any = (),
    **arguments: Any,
) -> tuple[zoo.Zoo, L.Trainer]:
    """Fit with a checkpoint every five steps. A resumed run has another seed: all it knows is the checkpoint."""
    L.seed_everything(seed, verbose=False)
    module = make()
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator=accelerator,
        devices=1,
        max_steps=steps,
        callbacks=[saver, *callbacks],
        **{**QUIET, "enable_checkpointing": True, **arguments},
    )
    trainer.fit(module, data(), ckpt_path=ckpt_path, weights_only=True)
    return module, trainer


def resumed_run(first: Any, second: Any, folder: Path, **arguments: Any) -> tuple[zoo.Zoo, L.Trainer]:
    """Ten steps, then ten more in another trainer."""
    run(first, folder / "first", steps=10, **arguments)
    return run(second, folder / "second", ckpt_path=folder / "first" / "step=10.ckpt", seed=7, **arguments)


def assert_same_end(straight: tuple[zoo.Zoo, L.Trainer], resumed: tuple[zoo.Zoo, L.Trainer]) -> None:
    """Weights, optimizer state and the losses after the resume."""
    (a, trainer_a), (b, trainer_b) = straight, resumed
    assert trainer_a.global_step == trainer_b.global_step == 20
    a.losses = a.losses[-len(b.losses) :]
    assert len(b.losses) == 10
    assert_same_bits(a, b)
    assert_same_optimizer_bits(trainer_a, trainer_b)
    schedulers = [[c.scheduler.state_dict() for c in t.lr_scheduler_configs] for t in (trainer_a, trainer_b)]
    assert [s["last_epoch"] for s in schedulers[0]] == [s["last_epoch"] for s in schedulers[1]]


class Steps(L.Callback):
    """Keeps a copy of the weights after each step."""

    reads_weights = False  # what it reads is waited for by the strategy itself

    def __init__(self) -> None:
        self.states: dict[int, dict[str, Tensor]] = {}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        state = trainer.strategy.lightning_module_state_dict()
        self.states[trainer.global_step] = {name: value.cpu().clone() for name, value in state.items()}


def write_slowly(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Make every save take its time, so that training would overtake it if it could.

    Returns:
        For each save that was finished, whether it was written beside training.
    """
    write, beside = checkpoints._write, []

    def slow(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.05)
        write(*args, **kwargs)
        beside.append(threading.current_thread() is not threading.main_thread())

    monkeypatch.setattr(checkpoints, "_write", slow)
    return beside
