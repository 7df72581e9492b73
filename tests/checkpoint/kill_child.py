"""The run that test_kill.py kills: a small fit that says in a log what it has just begun or finished."""

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
import zoo
from fitting import QUIET, MegaTrainStrategy, tokens
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_megatrain.checkpoint import files

MAX_STEPS, SAVE_EVERY, BATCHES = 14, 3, 8
"""A save is due every few steps; the epoch changes in the middle; the last step has no save of its own."""


@dataclass(frozen=True)
class Run:
    """A run and all that its processes have in common."""

    folder: Path
    checkpoint_format: str = "ckpt"
    save_async: bool = False
    update: str = "blocking"
    top_k: int = 1
    save_last: bool = True
    process_id: int | None = None
    """Every process of the run believes that this is its id, as in a container."""
    stand_still: tuple[str, str] | None = None
    """Before this, ``"placing"`` or ``"deleting"``, is done to a file or folder of a name that contains this."""

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def result(self) -> Path:
        return self.folder / "result.pt"


class Encoder(zoo.Encoder):
    """Dropout, and a learning rate that changes with the steps."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Log:
    """Lines of time, event and details; each is whole however the process ends."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(self, event: str, *details: object) -> None:
        os.write(self._file, " ".join(map(str, (time.monotonic(), event, *details))).encode() + b"\n")


class Batches:
    """A loader that goes on where it was saved."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._tokens = tokens(2 * BATCHES).split(2)
        self._given = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Tensor]:
        self._given %= BATCHES
        while self._given < BATCHES:
            self._given += 1
            self._log.say("batch", self._given)
            yield self._tokens[self._given - 1]

    def state_dict(self) -> dict[str, int]:
        return {"given": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._given = state["given"]


class Strategy(MegaTrainStrategy):
    """Says when saves begin and what is done to their files and folders."""

    def __init__(self, log: Log, stand_still: tuple[str, str] | None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.log, self.stand_still = log, stand_still
        self.saved_step: dict[str, int] = {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        self.saved_step[Path(filepath).name] = checkpoint["global_step"]
        self.log.say("began", checkpoint["global_step"])
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        put, delete, rename = files._put_in_place, files._delete, Path.rename
        named: dict[Path, Path] = {}  # what goes is moved to a name that says nothing first

        def note_and_rename(old: Path, new: Path) -> Path:
            named[new] = old
            return rename(old, new)

        def put_and_say(new: Path, path: Path) -> None:
            self.about_to("placing", path)
            put(new, path)
            self.log.say("finished", self.saved_step[path.name], threading.current_thread().name)

        def say_and_delete(path: Path) -> None:
            if os.path.lexists(path):
                self.about_to("deleting", named.get(path, path))
            delete(path)

        with (
            mock.patch.object(files, "_put_in_place", put_and_say),
            mock.patch.object(files, "_delete", say_and_delete),
            mock.patch.object(Path, "rename", note_and_rename),
        ):
            yield

    def about_to(self, what: str, path: Path) -> None:
        if self.stand_still is not None and what == self.stand_still[0] and self.stand_still[1] in path.name:
            self.log.say("standing")
            time.sleep(60)


def train(run: Run, log_path: Path, resume: Path | None, seed: int) -> None:
    """Fit to the end and leave what is left of the run in ``run.result``. The seed is of use only without resume."""
    log = Log(log_path)
    log.say("started")
    torch.set_num_threads(1)
    try:
        if run.process_id is None:
            _train(run, log, resume, seed)
        else:
            with mock.patch("os.getpid", return_value=run.process_id):
                _train(run, log, resume, seed)
    except BaseException:
        log_path.with_suffix(".error").write_text(traceback.format_exc())
        raise


def _train(run: Run, log: Log, resume: Path | None, seed: int) -> None:
    L.seed_everything(seed, verbose=False)
    module = Encoder(layers=2, width=64, log_norm=False)
    strategy = Strategy(
        log,
        run.stand_still,
        checkpoint_format=run.checkpoint_format,
        save_async=run.save_async,
        update=run.update,
        threads=1,
    )
    saving = ModelCheckpoint(
        run.checkpoints,
        monitor="step",
        mode="max",
        every_n_train_steps=SAVE_EVERY,
        save_top_k=run.top_k,
        save_last=run.save_last,
    )
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_steps=MAX_STEPS,
        callbacks=[saving],
        **{**QUIET, "enable_checkpointing": True},
    )
    with strategy.watched():
        trainer.fit(module, Batches(log), ckpt_path=resume)
    result = {
        "weights": module.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "progress": (trainer.global_step, trainer.current_epoch),
        "losses": module.losses,
    }
    torch.save(result, run.result)
