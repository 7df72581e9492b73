"""A resumed run ends as the straight one does, bit for bit, in and across formats, schedules and precisions."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import zoo
from fitting import QUIET, MegaTrainStrategy, assert_same_bits, assert_same_optimizer_bits, loader, stock, tokens
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

SCHEDULES = ["blocking", "next_forward", "in_backward"]
FORMATS = ["ckpt", "sharded"]
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


def run(
    strategy: Any,
    folder: Path,
    *,
    make: Any = COSINE,
    steps: int = 20,
    data: Any = Resumable,
    ckpt_path: Path | None = None,
    seed: int = 1,
    **arguments: Any,
) -> tuple[zoo.Zoo, L.Trainer]:
    """Fit with a checkpoint every five steps. A resumed run has another seed: all it knows is the checkpoint."""
    L.seed_everything(seed, verbose=False)
    module = make()
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        callbacks=[saver],
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


@pytest.mark.parametrize("save_async", [False, True])
@pytest.mark.parametrize("update", SCHEDULES)
@pytest.mark.parametrize("checkpoint_format", FORMATS)
def test_middle_of_an_epoch(checkpoint_format: str, update: str, save_async: bool, tmp_path: Path) -> None:
    def strategy() -> MegaTrainStrategy:
        return MegaTrainStrategy(update=update, checkpoint_format=checkpoint_format, save_async=save_async)

    straight = run(strategy(), tmp_path / "straight")
    assert_same_end(straight, resumed_run(strategy(), strategy(), tmp_path))
    assert (tmp_path / "first" / "step=10.ckpt").is_dir() == (checkpoint_format == "sharded")


@pytest.mark.parametrize("checkpoint_format", FORMATS)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bf16(precision: str, checkpoint_format: str, tmp_path: Path) -> None:
    def strategy() -> MegaTrainStrategy:
        return MegaTrainStrategy(
            update="next_forward",
            checkpoint_format=checkpoint_format,
            save_async=True,
            stochastic_rounding=precision == "bf16-true",
        )

    make = partial(zoo.Llama, scheduler=True, log_norm=False)
    straight = run(strategy(), tmp_path / "straight", make=make, precision=precision)
    assert_same_end(straight, resumed_run(strategy(), strategy(), tmp_path, make=make, precision=precision))
    if checkpoint_format == "ckpt":
        saved = torch.load(tmp_path / "first" / "step=10.ckpt", weights_only=True)["state_dict"]
        assert {type(v) for v in saved.values()} == {Tensor}
        assert {v.dtype for v in saved.values()} == {torch.float32 if precision == "bf16-mixed" else torch.bfloat16}


@pytest.mark.parametrize(("first", "second"), [(a, b) for a in SCHEDULES for b in SCHEDULES if a != b])
def test_across_schedules(first: str, second: str, tmp_path: Path) -> None:
    straight = run(MegaTrainStrategy(update="blocking"), tmp_path / "straight")
    formats = {"checkpoint_format": "sharded"} if first == "in_backward" else {}
    assert_same_end(
        straight,
        resumed_run(MegaTrainStrategy(update=first, **formats), MegaTrainStrategy(update=second), tmp_path),
    )


class Plain(Resumable):
    """The same batches, without random numbers: the stock strategy does not save their state."""

    def __iter__(self) -> Iterator[Tensor]:
        for batch in super().__iter__():
            yield batch * 0 + self.data[self.given - 1]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor", "radam"])
@pytest.mark.parametrize("names", ["stock-mine-stock", "mine-stock-mine"])
def test_across_strategies(names: str, optimizer: str, tmp_path: Path) -> None:
    """Three legs, each by another strategy: the plain file is the same for both."""
    hyper = {"momentum": 0.9} if optimizer == "sgd" else {}
    make = partial(zoo.Cosine, dropout=0.0, log_norm=False, optimizer=optimizer, **hyper)
    straight = run(stock(), tmp_path / "straight", make=make, data=Plain)
    legs = [stock() if name == "stock" else MegaTrainStrategy() for name in names.split("-")]
    run(legs[0], tmp_path / "0", steps=5, make=make, data=Plain)
    run(legs[1], tmp_path / "1", steps=10, make=make, data=Plain, ckpt_path=tmp_path / "0" / "step=5.ckpt", seed=3)
    last = run(legs[2], tmp_path / "2", make=make, data=Plain, ckpt_path=tmp_path / "1" / "step=10.ckpt", seed=5)
    assert_same_end(straight, last)


@pytest.mark.parametrize("checkpoint_format", FORMATS)
def test_end_of_an_epoch_with_a_shuffled_loader(checkpoint_format: str, tmp_path: Path) -> None:
    """The next epoch's order is drawn from the generator that the checkpoint brings."""

    def shuffled() -> DataLoader[Tensor]:
        return DataLoader(tokens(20), batch_size=4, shuffle=True)

    def strategy() -> MegaTrainStrategy:
        return MegaTrainStrategy(checkpoint_format=checkpoint_format)

    straight = run(strategy(), tmp_path / "straight", data=shuffled)
    assert_same_end(straight, resumed_run(strategy(), strategy(), tmp_path, data=shuffled))


def test_accumulation_and_clipping(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    straight = run(MegaTrainStrategy(), tmp_path / "straight", data=partial(Resumable, 18), **arguments)
    resumed = resumed_run(MegaTrainStrategy(), MegaTrainStrategy(), tmp_path, data=partial(Resumable, 18), **arguments)
    straight[0].losses = straight[0].losses[-20:]
    assert len(resumed[0].losses) == 20
    assert_same_bits(straight[0], resumed[0])
    assert_same_optimizer_bits(straight[1], resumed[1])


def test_skipped_steps_are_counted_on(tmp_path: Path) -> None:
    class Overflowing(zoo.Encoder):
        def loss(self, batch: Tensor) -> Tensor:
            loss = super().loss(batch)
            return loss * float("inf") if len(self.losses) == 2 else loss

    make = partial(Overflowing, log_norm=False)
    arguments: dict[str, Any] = {"gradient_clip_val": 1.0, "make": make, "data": loader}
    first = MegaTrainStrategy(nonfinite="skip")
    run(first, tmp_path, steps=5, **arguments)
    assert first.skipped_steps == 1
    second = MegaTrainStrategy(nonfinite="skip")
    run(second, tmp_path / "second", steps=10, ckpt_path=tmp_path / "step=5.ckpt", **arguments)
    assert second.skipped_steps == 2
