"""How often the launching thread waits for the device or the worker in a step: only where the schedule needs it."""

import threading
from collections import Counter
from functools import partial
from typing import Any

import lightning as L
import pytest
import zoo
from fitting import MegaTrainStrategy, fit

from lightning_megatrain.stream.streams import Event, HostStreams
from lightning_megatrain.update.worker import Worker

MAIN = threading.main_thread()


class Waits(L.Callback):
    """Counts waits of the last batches, by kind."""

    reads_weights = False

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.batches: list[Counter[str]] = []

    def note(self, kind: str) -> None:
        if threading.current_thread() is MAIN:
            self.now[kind] += 1

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches.append(self.now)
        self.now = Counter()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    counted = Waits()

    def note(cls: type, name: str, kind: str) -> None:
        original = getattr(cls, name)

        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            counted.note(kind)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(cls, name, noted)

    note(Event, "wait", "event")
    note(HostStreams, "synchronize", "device")
    note(Worker, "finish", "worker")
    return counted


@pytest.mark.parametrize("layers", [3, 9])
@pytest.mark.parametrize(
    ("update", "expected"),
    [
        ("in_backward", {"worker": 1, "event": 1}),  # the gradients that land last, and their update
        ("next_forward", {"worker": 1, "event": 1}),  # all gradients have landed before they are clipped
        ("blocking", {"worker": 2, "event": 1}),
    ],
)
def test_waits_of_a_step_do_not_grow_with_the_model(
    update: str, expected: dict[str, int], layers: int, waits: Waits
) -> None:
    make = partial(zoo.Encoder, layers=layers, log_norm=False)
    fit(make, MegaTrainStrategy(update=update), precision="bf16-mixed", max_steps=6, callbacks=[waits])
    for batch in waits.batches[1:]:
        assert batch["device"] == 0
        assert batch["worker"] <= expected["worker"]
        # One copy for each resident tensor of the group that landed last.
        assert batch["event"] <= 3 * expected["event"]
