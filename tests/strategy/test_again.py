"""Memory that runs out in the user's own code, outside the units, costs time, and no run."""

import random
import weakref
from collections import UserDict
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import lightning as L
import numpy as np
import pytest
import torch
import zoo
from devices import Room
from fitting import (
    QUIET,
    SCHEDULES,
    MegaTrainStrategy,
    assert_same_bits,
    assert_same_optimizer_bits,
    fit,
    loader,
    stock,
)
from torch import Tensor
from torch.utils.data import DataLoader
from writing import UNITS, Writer, assert_same_text

import lightning_megatrain.session
from lightning_megatrain.memory.device import SPENDABLE
from lightning_megatrain.stream.share import DeviceShare


class Graph:
    """Is alive as long as a graph is."""

    alive: ClassVar[weakref.WeakSet["Graph"]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.alive.add(self)


class RunsOut(torch.autograd.Function):
    """Asks whether there is memory, in the forward or the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ask: Callable[[str], None]) -> Tensor:
        ask("forward")
        ctx.ask, ctx.graph = ask, Graph()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.ask("backward")
        return gradient, None


class Head(zoo.Encoder):
    """A head whose forward or backward has memory only while the strategy spends little on speed."""

    def __init__(
        self, where: str, spends: Callable[[Any], int] = lambda strategy: strategy.kept_graphs, most: int = 2
    ) -> None:
        super().__init__(layers=4, log_norm=False, dropout=0.1)
        self.where, self.spends, self.most = where, spends, most
        self.asked: list[int] = []
        self.by_batch: dict[int, Tensor] = {}

    def ask(self, where: str) -> None:
        if where == self.where and self.trainer.training and self.trainer.global_step >= 4:
            self.asked.append(self.spends(self.trainer.strategy))
            if self.asked[-1] > self.most:
                raise torch.OutOfMemoryError("planted")

    def loss(self, batch: Tensor) -> Tensor:
        return RunsOut.apply(super().loss(batch), self.ask)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert not Graph.alive, "the memory of what failed was not free"
        loss = self.loss(batch)
        self.by_batch[batch_idx] = loss.detach()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    Graph.alive.clear()
    monkeypatch.setattr(lightning_megatrain.session, "device_memory", lambda *_: Room())


def assert_same_run(a: Head, b: Head) -> None:
    assert_same_bits(a, b)
    assert a.by_batch.keys() == b.by_batch.keys()
    assert all(torch.equal(value, b.by_batch[index]) for index, value in a.by_batch.items())


@pytest.mark.parametrize("update", SCHEDULES)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_graphs_are_given_back_and_the_batch_runs_again(where: str, update: str, roomy: None) -> None:
    arguments: dict[str, Any] = {"precision": "bf16-mixed", "max_steps": 8, "samples": 32}
    plain, trainer_a = fit(partial(Head, "nowhere"), MegaTrainStrategy(update=update), **arguments)
    with pytest.warns(RuntimeWarning, match="outside the units"):
        ours, trainer_b = fit(partial(Head, where), MegaTrainStrategy(update=update), **arguments)
    assert ours.asked[:3] == [4, 3, 2]
    assert max(ours.asked[3:]) == 2  # and from then on there is memory
    assert_same_run(plain, ours)
    assert_same_optimizer_bits(trainer_a, trainer_b)
    assert torch.equal(trainer_a.callback_metrics["loss"], trainer_b.callback_metrics["loss"])


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_gradients_of_earlier_batches_stay(where: str, roomy: None) -> None:
    arguments: dict[str, Any] = {"max_steps": 6, "accumulate_grad_batches": 3, "gradient_clip_val": 0.2}
    plain, _ = fit(partial(Head, "nowhere"), MegaTrainStrategy(), **arguments)
    with pytest.warns(RuntimeWarning, match="outside the units"):
        ours, _ = fit(partial(Head, where), MegaTrainStrategy(), **arguments)
    assert ours.asked[0] == 4
    assert_same_run(plain, ours)


@pytest.mark.parametrize("most", [2, 0])  # the residents stay, or go as well
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_groups_on_the_device_come_home(where: str, most: int, roomy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceShare, "_last_step", lambda self: (1.0, 0.9, 1.0))
    arguments: dict[str, Any] = {"precision": "bf16-mixed", "max_steps": 8}
    settings: dict[str, Any] = {"update": "next_forward", "recompute": "always"}
    plain, trainer_a = fit(partial(Head, "nowhere"), MegaTrainStrategy(**settings), **arguments)
    make = partial(Head, where, lambda strategy: strategy.device_groups, most)
    with pytest.warns(RuntimeWarning, match="outside the units"):
        ours, trainer_b = fit(make, MegaTrainStrategy(**settings), **arguments)
    assert ours.asked[0] > 2
    assert ours.asked[-1] <= most
    assert_same_run(plain, ours)
    assert_same_optimizer_bits(trainer_a, trainer_b)


class TakesApart(Head):
    """Takes the batch apart, draws from all generators and returns more than the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert not Graph.alive, "the memory of what failed was not free"
        inner, rest = batch.pop("inner"), batch.pop("rest")
        tokens = inner.pop() + rest["nothing"] + random.randrange(2) + np.random.randint(2)
        loss = self.loss(tokens % zoo.VOCAB)
        self.by_batch[batch_idx] = loss.detach()
        return {"loss": loss, "again": loss * 2}


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_batch_is_whole_again_and_random_numbers_are_the_same(where: str, roomy: None) -> None:
    def run(where: str) -> Head:
        L.seed_everything(1, verbose=False)
        module = TakesApart(where)
        trainer = L.Trainer(strategy=MegaTrainStrategy(), accelerator="cpu", devices=1, max_steps=8, **QUIET)
        L.seed_everything(2, verbose=False)
        data = [{"inner": [tokens], "rest": UserDict(nothing=0)} for tokens in loader(32)]
        trainer.fit(module, DataLoader(data, batch_size=None))
        return module

    plain = run("nowhere")
    with pytest.warns(RuntimeWarning, match="outside the units"):
        ours = run(where)
    assert ours.asked[:3] == [4, 3, 2]
    assert_same_run(plain, ours)


class LogsOfItsOwn(Head):
    """Has a `log` of its own, which must be there afterwards."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.logged: list[int] = []
        self.log = lambda *args, **kwargs: self.logged.append(self.trainer.global_step)


def test_what_was_logged_is_not_logged_again(roomy: None) -> None:
    with pytest.warns(RuntimeWarning, match="outside the units"):
        ours, _ = fit(partial(LogsOfItsOwn, "backward"), MegaTrainStrategy(), max_steps=8)
    assert ours.logged == list(range(8))


def test_in_an_evaluation_the_error_speaks_of_no_graphs(roomy: None) -> None:
    class Fails(Head):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            if self.trainer.strategy.kept_graphs:
                raise torch.OutOfMemoryError("planted")

        def val_dataloader(self) -> Any:
            return loader(4)

    with pytest.raises(torch.OutOfMemoryError, match=r"^planted$"):
        fit(partial(Fails, "nowhere"), MegaTrainStrategy(device_update="never"), max_steps=8, val_check_interval=4)


class Late(Head):
    """Memory runs out between two units, when gradients of one have gone already."""

    def __init__(self) -> None:
        super().__init__("backward")
        self.most = 0
        self.net.layers[1].register_forward_hook(lambda module, args, output: RunsOut.apply(output, self.ask))

    def loss(self, batch: Tensor) -> Tensor:
        return zoo.Encoder.loss(self, batch)


class Manual(Head):
    def __init__(self) -> None:
        super().__init__("forward")
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.optimizers().step()
        self.optimizers().zero_grad()


class Weighs(Head):
    """A hook changes the loss."""

    def __init__(self) -> None:
        super().__init__("backward")

    def on_before_backward(self, loss: Tensor) -> None:
        loss.mul_(0.5)


class ChangesTheBatch(Head):
    def __init__(self) -> None:
        super().__init__("forward")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        batch.add_(1).remainder_(zoo.VOCAB)
        return super().training_step(batch, batch_idx)


class Iterates(Head):
    def __init__(self) -> None:
        super().__init__("forward")

    def training_step(self, dataloader_iter: Any) -> Tensor:
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


@pytest.mark.parametrize("make", [Late, Manual, Weighs, ChangesTheBatch, Iterates])
def test_what_cannot_be_undone_is_not_run_again(make: Any, roomy: None) -> None:
    """The error says what memory was spent on."""
    with pytest.raises(torch.OutOfMemoryError, match=r"graphs of \d of them kept .* set a smaller .*device_memory"):
        fit(make, MegaTrainStrategy(update="in_backward" if make is Late else "auto"), max_steps=8)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_where_nothing_was_spent_the_error_is_the_users(where: str, roomy: None) -> None:
    settings = {"recompute": "always", "device_update": "never"}
    with pytest.raises(torch.OutOfMemoryError, match=r"^planted$"):
        fit(partial(Head, where, most=-1), MegaTrainStrategy(**settings), max_steps=8)


class InEvaluation(Writer):
    """Writing finds no memory once weights stay on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.failed = 0

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        text = self.write(batch)
        fetcher = getattr(self.trainer.strategy, "_engine", None) and self.trainer.strategy._engine._fetcher
        if fetcher and any(slot.kept for slot in fetcher.ring.slots):
            self.failed += 1
            raise torch.OutOfMemoryError("planted")
        self.written.append(torch.cat([text.flatten().float(), self(batch).flatten()]).cpu())


def test_weights_that_stayed_for_an_evaluation_go(monkeypatch: pytest.MonkeyPatch) -> None:
    left = int((100_000 + 2 * UNITS * 10**4) / SPENDABLE)
    monkeypatch.setattr(lightning_megatrain.session, "device_memory", lambda *_: Room(left, taken=0, most=100_000))
    runs = []
    for strategy in (stock(), MegaTrainStrategy(prefetch=1)):
        L.seed_everything(1, verbose=False)
        module = InEvaluation()
        trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=1, **QUIET)
        if runs:
            with pytest.warns(RuntimeWarning, match="outside the units"):
                trainer.validate(module, loader(12))
        else:
            trainer.validate(module, loader(12))
        runs.append(module)
    assert runs[1].failed == 1
    assert_same_text(*runs)
