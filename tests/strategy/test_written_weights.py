"""What code between and within steps writes to weights counts, however it writes; what it kept stays as it was."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import zoo
from fitting import QUIET, SCHEDULES, MegaTrainStrategy, assert_same_bits, fit, loader, stock, under
from torch import Tensor, nn
from writing import WritesWithin

from lightning_megatrain.stream.engine import Engine
from lightning_megatrain.update.updater import Updater
from lightning_megatrain.update.worker import Worker

make = partial(zoo.Encoder, layers=2, log_norm=False)


class Between(L.Callback):
    """Does something to the weights after the third and the fifth step."""

    def __init__(self, act: Callable[[zoo.Zoo, dict[str, Any]], None]) -> None:
        self.act, self.kept = act, {}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if trainer.global_step in (3, 5):
            with torch.no_grad():
                self.act(pl_module, self.kept)


def exchange_and_put_back(module: zoo.Zoo, kept: dict[str, Any]) -> None:
    """The usual averaging code: keep `data`, put another in its place, look, put it back."""
    backup = {name: p.data for name, p in module.named_parameters()}
    for p in module.parameters():
        p.data = torch.full_like(p, 0.01)
    kept.setdefault("seen", []).append(module.loss(torch.zeros(2, 4, dtype=torch.long)))
    for name, p in module.named_parameters():
        p.data = backup[name]


def leave_exchanged(module: zoo.Zoo, kept: dict[str, Any]) -> None:
    """The second time, put back what was kept the first time."""
    if "backup" in kept:
        for name, p in module.named_parameters():
            p.data = kept["backup"][name]
        return
    kept["backup"] = {name: p.data for name, p in module.named_parameters()}
    for p in module.parameters():
        p.data = p.data * 0.5


def swap(module: zoo.Zoo, kept: dict[str, Any]) -> None:
    a, b = (layer.linear1.weight for layer in module.net.layers)
    a.data, b.data = b.data, a.data


def transpose(module: zoo.Zoo, kept: dict[str, Any]) -> None:
    p = module.net.layers[0].self_attn.out_proj.weight
    p.data = p.data.t()


def clamp_data(module: zoo.Zoo, kept: dict[str, Any]) -> None:
    for p in module.parameters():
        p.data.clamp_(-0.05, 0.05)


ACTS = [exchange_and_put_back, leave_exchanged, swap, transpose, clamp_data]


@pytest.mark.parametrize("act", ACTS)
def test_between_steps(act: Any) -> None:
    a, _ = fit(make, stock(), callbacks=[Between(act)], max_steps=8)
    for update in SCHEDULES:
        with under(update):
            b, _ = fit(make, MegaTrainStrategy(update=update), callbacks=[Between(act)], max_steps=8)
            assert_same_bits(a, b)


@pytest.mark.parametrize("training", [True, False])
def test_between_forwards_outside_a_step(training: bool) -> None:
    """No weight is fetched ahead of such a forward, for it may be written to before it is used."""

    class Outside(L.Callback):
        seen: list[Tensor]

        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            batch = torch.arange(8).reshape(2, 4)
            self.seen = []
            with torch.set_grad_enabled(training):
                for _ in range(3):
                    self.seen += [pl_module.loss(batch).detach() for _ in range(3)]
                    for parameter in pl_module.parameters():
                        parameter.data.mul_(1.25)

    seen = []
    for strategy in (stock(), MegaTrainStrategy()):
        callback = Outside()
        fit(partial(zoo.Encoder, layers=4, dropout=0.0, log_norm=False), strategy, callbacks=[callback], max_steps=2)
        seen.append(torch.stack(callback.seen))
    assert torch.equal(*seen)
    assert len(set(seen[0].tolist())) == 3


def test_masters_survive_an_exchange_in_bf16_mixed() -> None:
    still = partial(make, dropout=0.0)  # looking draws no random numbers
    plain, _ = fit(still, MegaTrainStrategy(), precision="bf16-mixed", max_steps=8)
    callbacks = [Between(exchange_and_put_back)]
    exchanged, _ = fit(still, MegaTrainStrategy(), precision="bf16-mixed", max_steps=8, callbacks=callbacks)
    plain.losses = exchanged.losses = []
    assert_same_bits(plain, exchanged)


class Clipped(zoo.Encoder):
    """Optimizes by hand and clips its weights within the step, after the optimizer's and before another forward."""

    def __init__(self, how: str) -> None:
        super().__init__(layers=2, log_norm=False, dropout=0.0)
        self.automatic_optimization = False
        self.how = how

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.losses.append(loss.detach())
            self.manual_backward(loss)
            optimizer.step()
            with torch.no_grad():
                for p in self.parameters():
                    if self.how == "in place":
                        p.clamp_(-0.05, 0.05)
                    elif self.how == "data in place":
                        p.data.clamp_(-0.05, 0.05)
                    else:
                        p.data = p.data.clamp(-0.05, 0.05)


@pytest.mark.parametrize("how", ["in place", "data in place", "assigned"])
def test_within_a_manual_step(how: str) -> None:
    a, _ = fit(partial(Clipped, how), stock(), max_steps=6)
    b, _ = fit(partial(Clipped, how), MegaTrainStrategy(), max_steps=6)
    assert_same_bits(a, b)
    assert max(p.abs().max() for p in b.parameters()) <= 0.05


class TwoLosses(zoo.Encoder):
    """Two graphs, then two backwards: the first must leave the second's weights where they are."""

    def __init__(self) -> None:
        super().__init__(layers=2, log_norm=False, dropout=0.0)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.loss(batch), self.loss(batch.flip(1))
        self.optimizers().zero_grad()
        self.manual_backward(first)
        self.manual_backward(second)
        self.optimizers().step()
        self.losses += [first.detach(), second.detach()]


def test_two_graphs_before_two_backwards() -> None:
    a, _ = fit(TwoLosses, stock(), max_steps=6)
    b, _ = fit(TwoLosses, MegaTrainStrategy(), max_steps=6)
    assert_same_bits(a, b)


class Renormed(zoo.Encoder):
    """The embedding writes to its own weight in every forward; the step also writes to the head before it."""

    def __init__(self) -> None:
        super().__init__(layers=2, log_norm=False, dropout=0.0)
        self.embed = nn.Embedding(zoo.VOCAB, 32, max_norm=1.0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.head.weight.clamp_(-0.1, 0.1)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("early", [False, True])
def test_within_an_automatic_step(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the forward wrote is there before an update begins, even if that is done before the step ends."""
    end_step = Engine.end_step

    def late(engine: Engine) -> None:
        if early and engine.sink is not None:
            engine.sink.drain()
        end_step(engine)

    monkeypatch.setattr(Engine, "end_step", late)
    a, _ = fit(Renormed, stock(), max_steps=6)
    for update in SCHEDULES:
        with under(update):
            b, _ = fit(Renormed, MegaTrainStrategy(update=update), max_steps=6)
            assert_same_bits(a, b)


@pytest.mark.parametrize("update", ["blocking", "in_backward"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("where", ["net.layers.1", "head"])
@pytest.mark.parametrize("how", ["assigned", "in place"])
def test_within_a_step_before_the_weights_are_used(how: str, where: str, late: bool, update: str) -> None:
    make = partial(WritesWithin, how, where, late=late)
    a, _ = fit(make, stock(), max_steps=4)
    b, _ = fit(make, MegaTrainStrategy(update=update), max_steps=4)
    assert_same_bits(a, b)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates are never over when the next step begins."""
    do = Worker._do

    def slowly(self: Worker, task: Callable[[], None]) -> None:
        time.sleep(0.02)
        do(self, task)

    monkeypatch.setattr(Worker, "_do", slowly)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("how", ["assigned", "in place"])
@pytest.mark.parametrize("late", [False, True])
def test_behind_the_forward_a_write_counts_or_is_refused(how: str, late: bool) -> None:
    for where in ("head", "net.layers.1"):
        make = partial(WritesWithin, how, where, late=late)
        if where == "net.layers.1":
            with pytest.raises(RuntimeError, match=r"'net\.layers\.1' were written to .* set MegaTrainStrategy\("):
                fit(make, MegaTrainStrategy(update="next_forward"), max_steps=4)
            continue
        a, _ = fit(make, stock(), max_steps=4)
        b, _ = fit(make, MegaTrainStrategy(update="next_forward"), max_steps=4)
        assert_same_bits(a, b)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_an_update_that_ends_in_the_next_step_is_no_write(optimizer: str) -> None:
    make = partial(zoo.Encoder, layers=3, log_norm=False, optimizer=optimizer)
    runs = [
        fit(make, MegaTrainStrategy(update=update), precision="bf16-mixed", max_steps=4)[0]
        for update in ("blocking", "next_forward")
    ]
    assert_same_bits(*runs)


class Swaps(zoo.Encoder):
    """Exchanges weights of two resident modules, or of two units, in each step; or hands them on in a ring."""

    def __init__(self, where: str) -> None:
        super().__init__(layers=3, log_norm=False, dropout=0.0)
        self.where = where
        self.a, self.b, self.c = (nn.Linear(32, 32) for _ in range(3))

    def loss(self, batch: Tensor) -> Tensor:
        x = self.net(self.embed(batch))
        return zoo.token_loss(self.head(x + self.a(x) + 2 * self.b(x) + 3 * self.c(x)), batch)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.where == "units":
            a, b = (layer.linear1.weight for layer in self.net.layers[:2])
        else:
            a, b = self.a.weight, self.b.weight
        if self.where == "ring":
            c = self.c.weight
            a.data, b.data, c.data = c.data, a.data, b.data
        else:
            a.data, b.data = b.data, a.data
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("where", "update"),
    [(where, update) for where in ("residents", "ring") for update in SCHEDULES]
    + [("units", "blocking"), ("units", "in_backward")],  # behind the forward that is refused
)
def test_swaps_within_a_step(where: str, update: str) -> None:
    a, _ = fit(partial(Swaps, where), stock(), max_steps=4)
    b, _ = fit(partial(Swaps, where), MegaTrainStrategy(update=update), max_steps=4)
    assert_same_bits(a, b)


class Momentum(zoo.Encoder):
    """A teacher that follows its pupil, moved by assignment or in place before it is used, or after."""

    def __init__(self, how: str, *, late: bool) -> None:
        super().__init__(layers=3, log_norm=False, dropout=0.0)
        self.teacher = zoo.Encoder(layers=3, log_norm=False, dropout=0.0).requires_grad_(False)
        self.how, self.late = how, late

    def move(self) -> None:
        with torch.no_grad():
            for kept, new in zip(self.teacher.net.parameters(), self.net.parameters(), strict=True):
                if self.how == "assigned":
                    kept.data = kept.data * 0.9 + new.data * 0.1
                else:
                    kept.mul_(0.9).add_(new, alpha=0.1)

    def loss(self, batch: Tensor) -> Tensor:
        if not self.late:
            self.move()
        with torch.no_grad():
            aim = self.teacher.head(self.teacher.net(self.teacher.embed(batch)))
        found = self.head(self.net(self.embed(batch)))
        if self.late:
            self.move()
        return (found - aim).square().mean() + zoo.token_loss(found, batch)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("how", ["assigned", "in place"])
def test_a_teacher_that_follows_within_the_step(how: str, late: bool) -> None:
    make = partial(Momentum, how, late=late)
    a, _ = fit(make, stock(), max_steps=5)
    b, _ = fit(make, MegaTrainStrategy(update="blocking"), max_steps=5)
    assert_same_bits(a, b)


class WrittenBetween(zoo.Encoder):
    """Writes to a unit's weights after its forward and before its backward."""

    def __init__(self, how: str) -> None:
        super().__init__(layers=2, log_norm=False, dropout=0.0)
        self.how = how

    def loss(self, batch: Tensor) -> Tensor:
        loss = super().loss(batch)
        weight = self.net.layers[0].linear1.weight
        with torch.no_grad():
            if self.how == "assigned":
                weight.data = weight.data * 0.9
            else:
                weight.mul_(0.9)
        return loss


class WrittenInside(nn.Module):
    """A unit that clips its own weight when it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.inner.weight.clamp_(-0.1, 0.1)
        return x + self.inner(x)


class ClipsInside(zoo.Zoo):
    def __init__(self) -> None:
        super().__init__(log_norm=False)
        self.embed, self.head = nn.Embedding(zoo.VOCAB, 32), nn.Linear(32, zoo.VOCAB)
        self.blocks = nn.Sequential(WrittenInside(), WrittenInside())

    def loss(self, batch: Tensor) -> Tensor:
        return zoo.token_loss(self.head(self.blocks(self.embed(batch))), batch)


@pytest.mark.parametrize("recompute", ["always", "never"])
def test_what_cannot_count_is_refused(recompute: str) -> None:
    for how in ("assigned", "in place"):
        with pytest.raises(RuntimeError, match=r"'net\.layers\.0' were updated between this forward and its backward"):
            fit(partial(WrittenBetween, how), MegaTrainStrategy(recompute=recompute), max_steps=2)
    with pytest.raises(RuntimeError, match=r"'blocks\.0\.inner\.weight' was written to while unit .* ran"):
        fit(ClipsInside, MegaTrainStrategy(recompute=recompute, units=["WrittenInside"]), max_steps=2)


class AssignsInValidation(zoo.Encoder):
    """Assigns to weights in its validation: what follows, there and later, has the new ones."""

    def __init__(self, where: str) -> None:
        super().__init__(layers=2, log_norm=False, dropout=0.0)
        self.where = where
        self.seen: list[Tensor] = []

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 1:
            for parameter in self.get_submodule(self.where).parameters():
                parameter.data = parameter.data * 0.5
        self.seen.append(self.loss(batch))

    def val_dataloader(self) -> Any:
        return loader(16)


@pytest.mark.parametrize("where", ["net.layers.1", "head", "embed"])
def test_within_a_validation(where: str) -> None:
    make, settings = partial(AssignsInValidation, where), {"max_steps": 4, "val_check_interval": 2}
    a, _ = fit(make, stock(), **settings)
    b, _ = fit(make, MegaTrainStrategy(), **settings)
    assert_same_bits(a, b)
    assert torch.equal(torch.stack(a.seen), torch.stack(b.seen))


class WrittenLate(zoo.Encoder):
    """Writes to the head when the last gradient is complete: a value that an update in backward cannot know of."""

    def __init__(self) -> None:
        super().__init__(layers=2, log_norm=False, dropout=0.0)

    def on_train_start(self) -> None:
        self.embed.weight.register_post_accumulate_grad_hook(self.write)

    def write(self, parameter: Tensor) -> None:
        with torch.no_grad():
            self.head.weight.mul_(0.5)


def test_a_write_after_the_update_began_is_refused() -> None:
    a, _ = fit(WrittenLate, stock(), max_steps=3)
    b, _ = fit(WrittenLate, MegaTrainStrategy(update="next_forward"), max_steps=3)
    assert_same_bits(a, b)
    with pytest.raises(RuntimeError, match=r"'head\.weight' was written to after .* set MegaTrainStrategy\(update='b"):
        fit(WrittenLate, MegaTrainStrategy(update="in_backward"), max_steps=3)


class Thaws(zoo.Encoder):
    def __init__(self) -> None:
        super().__init__(layers=2, log_norm=False)
        self.net.layers[0].requires_grad_(False)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.net.layers[0].requires_grad_(batch_idx > 1)


def test_an_error_while_a_layer_is_unfrozen_surfaces_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module is ordinary afterwards, with the values of the last step."""

    def fail(*args: Any) -> None:
        raise MemoryError("planted")

    monkeypatch.setattr(Updater, "relay", fail)
    L.seed_everything(1, verbose=False)
    module = Thaws()
    trainer = L.Trainer(strategy=MegaTrainStrategy(), accelerator="cpu", devices=1, max_steps=6, **QUIET)
    with pytest.raises(MemoryError, match="planted"):
        trainer.fit(module, loader())
    assert all("forward" not in m.__dict__ for m in module.modules())
    assert all(torch.isfinite(p).all() for p in module.parameters())
    assert module.loss(torch.zeros(2, 4, dtype=torch.long)).isfinite()
