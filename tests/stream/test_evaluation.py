"""Weights of units stay on the device from one use to the next where nothing trains, if there is room."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from devices import Room
from fitting import QUIET, MegaTrainStrategy, assert_same_bits, fit, loader, stock
from torch import Tensor
from writing import TOKENS, UNITS, Rewards, Validated, Writer, assert_same_text

import lightning_megatrain.session
from lightning_megatrain.memory.device import SPENDABLE
from lightning_megatrain.stream.budget import Budget
from lightning_megatrain.stream.fetcher import Fetcher

UNIT_BYTES = 4 * (32 * 32 + 3 * 128)
"""Each parameter begins at a multiple of 512 bytes."""


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each unit was fetched."""
    found: Counter[int] = Counter()
    fetch = Fetcher._fetch

    def counting(self: Fetcher, group: int) -> Any:
        found[group] += 1
        return fetch(self, group)

    monkeypatch.setattr(Fetcher, "_fetch", counting)
    return found


def with_left(nbytes: int, most: int = 100_000) -> Room:
    """A device in which so many bytes were never taken."""
    return Room(int((most + nbytes) / SPENDABLE) + 1, taken=0, most=most)


def room(monkeypatch: pytest.MonkeyPatch, units: float) -> None:
    """Half of the room is for so many units."""
    left = int(2 * units * UNIT_BYTES)
    monkeypatch.setattr(lightning_megatrain.session, "device_memory", lambda *_: with_left(left))


def evaluate(make: Callable[[], Writer], strategy: Any, what: str = "validate", batches: int = 3) -> Writer:
    L.seed_everything(1, verbose=False)
    module = make()
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_steps=1, **QUIET)
    getattr(trainer, what)(module, loader(4 * batches))
    return module


@pytest.mark.parametrize("units", [0.9, 1, 2.5, 4, UNITS, 100])
@pytest.mark.parametrize("what", ["validate", "predict"])
def test_a_unit_with_room_is_fetched_twice(
    units: float, what: str, fetched: Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    room(monkeypatch, units)
    ours = evaluate(Writer, MegaTrainStrategy(prefetch=1), what)
    stays = min(int(units), UNITS)
    assert sum(count <= 2 for count in fetched.values()) == stays
    if stays < UNITS - 2:  # so many find a place in the ring, within a step
        assert max(fetched.values()) >= 3 * (TOKENS + 1) - 1
    assert_same_text(evaluate(Writer, stock(), what), ours)


def test_on_a_device_whose_memory_is_not_known_nothing_stays(fetched: Counter[int]) -> None:
    evaluate(Writer, MegaTrainStrategy(prefetch=1))
    assert min(fetched.values()) >= 3 * (TOKENS + 1)


def halve(module: Writer) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)


def assign(module: Writer) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data * 0.5


def swap(module: Writer) -> None:
    a, b = module.blocks[1][1].weight, module.blocks[4][1].weight
    a.data, b.data = b.data, a.data


def one_of_the_head(module: Writer) -> None:
    with torch.no_grad():
        module.head.weight[3] += 1


@pytest.mark.parametrize("act", [halve, assign, swap, one_of_the_head])
@pytest.mark.parametrize("when", [-1, -2])  # after the first batch or the second
@pytest.mark.parametrize("units", [0, 3, 100])
def test_what_is_written_between_two_steps_counts(
    act: Callable[[Writer], None], when: int, units: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def between(module: Writer, index: int) -> None:
        if index == when:
            act(module)

    room(monkeypatch, units)
    make = partial(Writer, between)
    plain = evaluate(make, stock())
    assert_same_text(plain, evaluate(make, MegaTrainStrategy()))
    with pytest.raises(AssertionError):
        assert_same_text(plain, evaluate(Writer, stock()))


class Noisy(Writer):
    """Looks at each batch with its weights as they are and with noise, which it takes off again, or not."""

    def __init__(self, *, off: bool) -> None:
        super().__init__()
        self.off = off

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        clean = self(batch)
        weight = self.blocks[2][1].weight
        noise = torch.full_like(weight, 0.5)
        with torch.no_grad():
            weight.add_(noise)
            noisy = self(batch)
            if self.off:
                weight.sub_(noise)
        self.written.append(torch.stack([clean, noisy]).cpu())


@pytest.mark.parametrize("off", [True, False])
@pytest.mark.parametrize("units", [0, 3, 100])
def test_what_is_written_within_a_step_counts(off: bool, units: int, monkeypatch: pytest.MonkeyPatch) -> None:
    room(monkeypatch, units)
    make = partial(Noisy, off=off)
    assert_same_text(evaluate(make, stock()), evaluate(make, MegaTrainStrategy()))


class Follows(Writer):
    """A teacher is used twice without gradients, moved before the optimizer's step, and used again."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.teacher = Writer().requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        with torch.no_grad():
            aims = [self.teacher(batch) for _ in range(3)]
        optimizer.zero_grad()
        self.manual_backward((self(batch) - aims[0]).square().mean())
        with torch.no_grad():
            aims += [self.teacher(batch) for _ in range(2)]
        optimizer.step()
        with torch.no_grad():
            aims.append(self.teacher(batch))
        self.losses.append(torch.stack(aims).sum())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with torch.no_grad():
            for parameter in self.teacher.parameters():
                parameter.mul_(0.9)


@pytest.mark.parametrize("units", [0, 3, 100])
def test_what_a_hook_writes_within_a_step_counts(units: int, monkeypatch: pytest.MonkeyPatch) -> None:
    room(monkeypatch, units)
    a, _ = fit(Follows, stock(), max_steps=4)
    b, _ = fit(Follows, MegaTrainStrategy(), max_steps=4)
    assert_same_bits(a, b)


def test_training_in_between_starts_from_what_it_would_have(
    fetched: Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that change are fetched again, and the device is left as it was found."""
    slots = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            slots.append(len(trainer.strategy._running()._fetcher.ring.slots))

    room(monkeypatch, 100)
    settings = {"max_steps": 6, "val_check_interval": 2, "limit_val_batches": 2, "num_sanity_val_steps": 2}
    fits = [
        fit(Validated, strategy, callbacks=callbacks, **settings)[0]
        for strategy, callbacks in ((stock(), []), (MegaTrainStrategy(prefetch=1), [Watch()]))
    ]
    assert_same_bits(*fits)
    assert_same_text(*fits)
    assert set(slots) == {2}
    assert max(fetched.values()) <= 6 * 2 + 4 * 2 + 6  # forward and backward; sanity check and validations; ahead


def test_text_that_is_written_in_a_training_step(fetched: Counter[int], monkeypatch: pytest.MonkeyPatch) -> None:
    room(monkeypatch, 100)
    a, _ = fit(Rewards, stock(), max_steps=4)
    b, _ = fit(Rewards, MegaTrainStrategy(prefetch=1, recompute="always"), max_steps=4)
    assert_same_bits(a, b)
    assert max(fetched.values()) <= 4 * 4


class Crowded(Writer):
    """Memory runs out in one use of a unit."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        for block in self.blocks:
            block[1].register_forward_hook(self.check)

    def check(self, *args: Any) -> None:
        self.at -= 1
        if self.at == 0:
            raise torch.OutOfMemoryError("planted")


def test_what_stays_goes_when_memory_runs_out(fetched: Counter[int], monkeypatch: pytest.MonkeyPatch) -> None:
    room(monkeypatch, 100)
    ours = evaluate(partial(Crowded, 4 * UNITS + 2), MegaTrainStrategy(prefetch=1))
    assert_same_text(evaluate(Writer, stock()), ours)
    assert min(fetched.values()) >= 3 * (TOKENS + 1) - 4  # and nothing stays from then on
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        evaluate(partial(Crowded, 2), MegaTrainStrategy())


@pytest.mark.parametrize("runs_out_at", range(1, UNITS + 1))
def test_a_slot_for_which_there_is_no_memory(
    runs_out_at: int, fetched: Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    room(monkeypatch, 100)
    made = 0
    keep = lightning_megatrain.stream.fetcher.SlotRing.keep

    def refused(ring: Any, slot: Any) -> Any:
        nonlocal made
        made += 1
        if made == runs_out_at:
            raise torch.OutOfMemoryError("planted")
        return keep(ring, slot)

    monkeypatch.setattr(lightning_megatrain.stream.fetcher.SlotRing, "keep", refused)
    assert_same_text(evaluate(Writer, stock()), evaluate(Writer, MegaTrainStrategy(prefetch=1)))
    assert made == runs_out_at


def test_what_an_evaluation_takes_is_seen_before_more_is_lent() -> None:
    """Also where training, known before, took less; and the next batch of it is judged by what that takes."""
    memory = with_left(80_000, most=20_000)
    budget = Budget("auto", memory)
    budget.begin()
    assert not budget.keeps((torch.empty(1, 4),))
    budget.end()
    memory.most = 70_000  # the first evaluation's, in a loss
    budget.evaluate()
    assert [budget.borrow(5_000) for _ in range(7)] == [True] * 3 + [False] * 4
    budget.returned()
    budget.begin()
    assert budget.spare <= 30_000


def test_of_the_memory_that_is_left_half_is_lent() -> None:
    memory = with_left(1000)
    budget = Budget("auto", memory)
    assert [budget.borrow(100) for _ in range(7)] == [True] * 5 + [False] * 2
    budget.returned()
    memory.most += 500  # a larger batch's, by now
    assert [budget.borrow(100) for _ in range(4)] == [True] * 2 + [False] * 2
    assert not Budget("auto", None).borrow(1)
