"""Slots that keep weights from the forward to the backward: only where that is waited for, and with the same bits."""

from collections import Counter
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import zoo
from fitting import MegaTrainStrategy, assert_same_bits, fit

import lightning_megatrain.session
from lightning_megatrain.memory.device import DeviceMemory
from lightning_megatrain.memory.slots import SlotRing
from lightning_megatrain.stream.cache import WeightCache
from lightning_megatrain.stream.spans import Span
from lightning_megatrain.stream.streams import HostStreams

LAYERS, PREFETCH = 8, 2


class Memory(DeviceMemory):
    """So much is left beside what steps take."""

    limit = 10**12

    def allocated(self) -> int:
        return 10**6

    def reset_peak(self) -> None: ...

    def peak(self) -> int:
        return 10**7


class Slow(HostStreams):
    """The backward waits for `waits` fetches of a second each, if a clock that says so is believed."""

    waits = 0.0

    def attach(self, listener: Any) -> None:
        if getattr(listener, "__func__", None) is not WeightCache._note:
            super().attach(listener)
            return
        self.told = listener

    def collect(self) -> None:
        super().collect()
        listener = self.__dict__.get("told")
        if listener is not None:
            listener(Span("fetch", "fetch layers.1", 1e9, 1e9 + 1.0))
            listener(Span("wait", "fetch layers.1", 1e9, 1e9 + self.waits))
            listener(Span("wait", "fetch", 1e9, 1e9 + 100.0))  # residents
            listener(Span("wait", "fetch input", 1e9, 1e9 + 100.0))
            listener(Span("wait", "fetch layers.2", 0.0, 100.0))  # in the forward


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> type[Slow]:
    monkeypatch.setattr(lightning_megatrain.session, "device_memory", lambda *_: Memory())
    monkeypatch.setattr("lightning_megatrain.session.Streams.on", staticmethod(Slow))
    monkeypatch.setattr(Slow, "waits", 0.0)
    return Slow


class Fetches(L.Callback):
    """Counts the fetches of each step's units."""

    reads_weights = False

    def __init__(self) -> None:
        self.steps: list[Counter[str]] = []

    def setup(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.steps.append(Counter())

    def on_train_start(self, trainer: Any, *args: Any) -> None:
        self.engine = trainer.strategy._engine
        self.engine.streams.attach(self.note)

    def note(self, span: Span) -> None:
        if span.lane == "fetch" and span.unit.startswith("net"):
            self.steps[-1][span.unit] += 1

    def on_train_batch_end(self, *args: Any) -> None:
        HostStreams.collect(self.engine.streams)  # which does not tell of waits
        self.slots = len(self.engine._fetcher.ring.slots)
        self.steps.append(Counter())


def run(steps: int = 6, **strategy: Any) -> tuple[zoo.Zoo, Fetches]:
    seen = Fetches()
    chosen = MegaTrainStrategy(prefetch=PREFETCH, device_update="never", **strategy)
    module, _ = fit(
        partial(zoo.Encoder, layers=LAYERS, log_norm=False),
        chosen,
        precision="bf16-mixed",
        max_steps=steps,
        callbacks=[seen],
    )
    seen.steps.pop()  # begun when the last step ended
    return module, seen


@pytest.mark.parametrize("update", ["blocking", "next_forward", "in_backward"])
def test_each_slot_saves_a_fetch_and_no_bit_changes(slow: type[Slow], update: str) -> None:
    plain, before = run(update=update)
    assert before.slots == PREFETCH + 1
    slow.waits = 2.5
    cached, after = run(update=update)
    assert after.slots == PREFETCH + 1 + 3  # as many as make up for what was waited for
    assert_same_bits(plain, cached)
    counts = [step.total() for step in after.steps]
    assert counts[:2] == [step.total() for step in before.steps[:2]]
    assert [step.total() for step in before.steps[2:]] == [2 * LAYERS - PREFETCH - 1] * 4
    assert counts[2:] == [2 * LAYERS - PREFETCH - 1 - 3] * 4
    # The last units', which the backward begins with, and each weight is fetched for the forward.
    assert sorted(after.steps[-1].values()) == [1] * (PREFETCH + 1 + 3) + [2] * (LAYERS - PREFETCH - 4)


def test_never_more_than_there_are_units(slow: type[Slow]) -> None:
    slow.waits = 1000.0
    _, seen = run()
    assert seen.slots == LAYERS
    assert seen.steps[-1].total() == LAYERS


def test_what_the_forward_waits_for_is_no_reason(slow: type[Slow]) -> None:
    _, seen = run()  # residents, inputs and the forward's fetches are
    assert seen.slots == PREFETCH + 1


def test_only_where_memory_may_be_spent(slow: type[Slow], monkeypatch: pytest.MonkeyPatch) -> None:
    slow.waits = 1000.0
    for recompute in ("always", "never"):
        _, seen = run(recompute=recompute)
        assert seen.slots == PREFETCH + 1
    monkeypatch.setattr(Memory, "limit", 10**7)
    _, seen = run()
    assert seen.slots == PREFETCH + 1


def test_slots_are_dropped_when_memory_runs_out(slow: type[Slow], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = run()
    slow.waits = 1000.0
    monkeypatch.setattr("lightning_megatrain.stream.budget.Budget.relieve", lambda self: False)  # no graphs to drop
    add, room = SlotRing.add, [PREFETCH + 1 + 2]

    def limited(self: SlotRing) -> Any:
        if not room[0]:
            raise torch.OutOfMemoryError("planted")
        room[0] -= 1
        return add(self)

    monkeypatch.setattr(SlotRing, "add", limited)

    class Crowded(zoo.Encoder):
        """Memory runs out once, in the fifth step's forward."""

        passes = 0

        def __init__(self) -> None:
            super().__init__(layers=LAYERS, log_norm=False)
            inner = self.net.layers[3].linear1.forward

            def forward(x: Any) -> Any:
                Crowded.passes += 1
                if Crowded.passes == 2 + 3 + 1:  # only the first step recomputes it
                    raise torch.OutOfMemoryError("planted")
                return inner(x)

            self.net.layers[3].linear1.forward = forward

    seen = Fetches()
    chosen = MegaTrainStrategy(prefetch=PREFETCH, device_update="never")
    module, _ = fit(Crowded, chosen, precision="bf16-mixed", max_steps=6, callbacks=[seen])
    assert [step.total() for step in seen.steps[3:4]] == [2 * LAYERS - PREFETCH - 1 - 2]  # what found room
    assert seen.slots == PREFETCH + 1
    assert_same_bits(plain, module)
