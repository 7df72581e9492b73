"""A resumed run ends as the straight one does, bit for bit, in and across formats, schedules and precisions."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import zoo
from fitting import (
    FORMATS,
    QUIET,
    SCHEDULES,
    MegaTrainStrategy,
    assert_same_bits,
    assert_same_optimizer_bits,
    loader,
    stock,
    tokens,
)
from resuming import Plain, Resumable, assert_same_end, resumed_run, run
from torch import Tensor
from torch.utils.data import DataLoader


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


class Draws(L.Callback):
    """Uses random numbers when training begins, which the straight run did once."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        torch.rand(7)


@pytest.mark.parametrize("shuffled", [False, True])
def test_hooks_that_draw_when_training_begins(shuffled: bool, tmp_path: Path) -> None:
    data = (lambda: DataLoader(tokens(20), batch_size=4, shuffle=True)) if shuffled else Resumable
    straight = run(MegaTrainStrategy(), tmp_path / "straight", data=data, callbacks=[Draws()])
    resumed = resumed_run(MegaTrainStrategy(), MegaTrainStrategy(), tmp_path, data=data, callbacks=[Draws()])
    assert_same_end(straight, resumed)


def test_a_resume_without_training_leaves_random_numbers_alone(tmp_path: Path) -> None:
    module, _ = run(MegaTrainStrategy(), tmp_path, steps=5)
    again = L.Trainer(strategy=MegaTrainStrategy(), accelerator="cpu", devices=1, max_steps=5, **QUIET)
    again.fit(module, Resumable(), ckpt_path=tmp_path / "step=5.ckpt", weights_only=True)
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    again.validate(module, loader(8), verbose=False)
    torch.manual_seed(4)
    again.strategy.process_dataloader(None)
    assert torch.equal(torch.rand(3), expected)


class FreezesLate(zoo.Encoder):
    """Its first layer trains in the first five steps."""

    def __init__(self) -> None:
        super().__init__(layers=2, log_norm=False)
        self.embed.requires_grad_(False)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.net.layers[0].requires_grad_(self.global_step < 5)


def test_what_trained_once_is_not_excluded(tmp_path: Path) -> None:
    strategy = partial(MegaTrainStrategy, exclude_frozen_parameters=True)
    run(strategy(), tmp_path, steps=10, make=FreezesLate)
    saved = torch.load(tmp_path / "step=10.ckpt", weights_only=True)["state_dict"]
    assert any(name.startswith("net.layers.0.") for name in saved)
    assert "embed.weight" not in saved


class Halving(zoo.Encoder):
    """Loading code of its own, which changes values and needs some."""

    def __init__(self) -> None:
        super().__init__(layers=2, log_norm=False)
        self.register_buffer("scale", torch.tensor(2.0))
        self.head._register_load_state_dict_pre_hook(self._halve)

    def _halve(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        assert self.scale.item() == 2.0
        state[prefix + "weight"].mul_(0.5)


def test_loading_hooks_count_once(tmp_path: Path) -> None:
    module, _ = run(MegaTrainStrategy(), tmp_path, steps=5, make=Halving)
    fresh = Halving()
    evaluation = L.Trainer(strategy=MegaTrainStrategy(), accelerator="cpu", devices=1, **QUIET)
    evaluation.validate(fresh, loader(8), ckpt_path=tmp_path / "step=5.ckpt", verbose=False, weights_only=True)
    assert torch.equal(fresh.head.weight, module.head.weight * 0.5)
