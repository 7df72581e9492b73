"""Copies into device memory begin after all that was done with the memory, and to it, before."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
import zoo
from devices import Room
from fitting import SCHEDULES, MegaTrainStrategy, fit
from torch import Tensor
from writing import Rewards, Validated

import lightning_megatrain.session
from lightning_megatrain.stream import saved
from lightning_megatrain.stream.share import DeviceShare
from lightning_megatrain.stream.streams import Copy, Event, HostStreams, Lane


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every fetch into memory that was made: whether it waits for a mark that was set after that.

    In torch's deterministic mode a device fills all memory that is made with NaN, in its compute lane.
    """
    clock, made, found = count(), dict[int, int](), list[bool]()

    def noted(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def making(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            made[tensor.untyped_storage().data_ptr()] = next(clock)
            return tensor

        return making

    for name in ("empty", "empty_strided"):
        monkeypatch.setattr(torch, name, noted(getattr(torch, name)))
    record, copy = HostStreams.record, HostStreams.copy

    def marked(self: HostStreams) -> Event:
        event = record(self)
        event.moment = next(clock)  # type: ignore[attr-defined]
        return event

    def checked(self: HostStreams, lane: Lane, target: Tensor, source: Tensor, after: Iterable[Event] = ()) -> Copy:
        after = list(after)
        born = made.get(target.untyped_storage().data_ptr()) if lane == "fetch" else None
        if born is not None:
            found.append(any(getattr(event, "moment", -1) > born for event in after))
        return copy(self, lane, target, source, after)

    monkeypatch.setattr(HostStreams, "record", marked)
    monkeypatch.setattr(HostStreams, "copy", checked)
    monkeypatch.setattr(lightning_megatrain.session, "device_memory", lambda *_: Room())
    return found


@pytest.mark.parametrize("make", [Validated, Rewards])
def test_of_weights_that_stay(make: Any, waited: list[bool]) -> None:
    fit(make, MegaTrainStrategy(prefetch=1), max_steps=4, val_check_interval=2, limit_val_batches=2)
    assert len(waited) > 20
    assert all(waited)


def test_of_inputs_that_waited_on_the_host(waited: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "_SMALLEST", 1)
    make = partial(zoo.Encoder, layers=4, log_norm=False)
    fit(make, MegaTrainStrategy(activations="host", recompute="always"), max_steps=3)
    assert len(waited) > 20
    assert all(waited)


@pytest.mark.parametrize("update", SCHEDULES)
def test_of_groups_that_the_device_takes(update: str, waited: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceShare, "_last_step", lambda self: (1.0, 0.9, 1.0))
    make = partial(zoo.Encoder, layers=4, log_norm=False)
    fit(make, MegaTrainStrategy(update=update), precision="bf16-mixed", max_steps=6)
    assert len(waited) > 20
    assert all(waited)
