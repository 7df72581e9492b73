"""What is told of lanes, when, and to whom."""

import threading
from typing import NamedTuple

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lightning_megatrain.stream import streams as streams_module
from lightning_megatrain.stream.spans import HostMark, Span, SpanLog
from lightning_megatrain.stream.streams import Streams
from lightning_megatrain.update.worker import Worker


@pytest.fixture
def clock(monkeypatch):
    now = {"seconds": 10.0}
    monkeypatch.setattr(streams_module.time, "perf_counter", lambda: now["seconds"])
    return now


@pytest.fixture
def streams():
    return Streams.on(torch.device("cpu"))


def test_a_span_knows_its_lane_its_label_and_its_time(streams, clock):
    told = []
    streams.attach(told.append)
    with streams.span("compute", "forward layers.3"):
        clock["seconds"] += 2.0
    with streams.span("update", "update layers.3", 400):
        clock["seconds"] += 1.0
    assert told == []  # nobody is told in the middle of a step
    streams.collect()
    assert told == [
        Span("compute", "forward layers.3", 10.0, 12.0),
        Span("update", "update layers.3", 12.0, 13.0, 400),
    ]
    assert (told[0].verb, told[0].unit, told[0].seconds) == ("forward", "layers.3", 2.0)
    streams.collect()
    assert len(told) == 2


def test_a_listener_is_told_of_nothing_that_was_noted_before_it_came(streams, clock):
    """Nor, in the next step, of what nobody had collected yet."""
    first, second = [], []
    streams.attach(first.append)
    with streams.span("compute", "forward a"):
        clock["seconds"] += 1.0
    streams.attach(second.append)
    with streams.span("compute", "forward b"):
        clock["seconds"] += 1.0
    streams.detach(first.append)
    streams.collect()
    assert first == []
    assert [span.label for span in second] == ["forward b"]


def test_a_listener_may_listen_to_some_lanes_and_others_are_not_timed_for_it(streams, clock):
    updates, everything = [], []
    streams.attach(updates.append, ("update",))
    noted = len(streams._log._pending)
    with streams.span("compute", "forward a"):
        clock["seconds"] += 1.0
    streams.copy("fetch", torch.empty(6), torch.ones(6))
    assert len(streams._log._pending) == noted
    streams.attach(everything.append)
    for lane in ("compute", "update"):
        with streams.span(lane, f"{lane} b"):
            clock["seconds"] += 1.0
    streams.collect()
    assert [span.lane for span in updates] == ["update"]
    assert [span.lane for span in everything] == ["compute", "update"]
    streams.detach(everything.append)
    assert streams._log.lanes == {"update"}


def test_copies_time_themselves_under_the_label_around_them(streams, clock):
    told = []
    streams.attach(told.append)

    def slow(lane):
        clock["seconds"] += 0.5

    streams.delay = slow
    source = torch.ones(6)
    with streams.span("push", "push layers.0"):
        clock["seconds"] += 5.0  # what is done before the copy is no copying
        streams.copy("push", torch.empty(6), source)
        with streams.span("fetch", "fetch layers.1"):
            streams.copy("push", torch.empty(6), source)
    streams.copy("push", torch.empty(6), source)
    streams.collect()
    assert told == [
        Span("push", "push layers.0", 15.0, 15.5, 24),
        Span("push", "push layers.0", 15.5, 16.0, 24),
        Span("push", "push", 16.0, 16.5, 24),
    ]


def test_a_span_that_ends_in_an_error_is_told_and_the_error_goes_on(streams, clock):
    told = []
    streams.attach(told.append)

    def fail():
        with streams.span("compute", "forward a"):
            clock["seconds"] += 1.0
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    streams.collect()
    assert [span.label for span in told] == ["forward a"]


def test_every_listener_is_told_until_it_is_detached(streams, clock):
    first, second = [], []
    streams.attach(first.append)
    streams.attach(second.append)
    for _ in range(2):
        with streams.span("compute", "forward a"):
            clock["seconds"] += 1.0
        streams.collect()
        streams.detach(second.append)
    streams.detach(second.append)
    assert (len(first), len(second)) == (2, 1)
    with streams.span("compute", "forward b"):
        clock["seconds"] += 1.0
    streams.detach(first.append)
    streams.attach(first.append)
    streams.collect()  # what was begun for a listener that left is told to nobody
    assert len(first) == 2


class Later(NamedTuple):
    """A mark that passes when it is told to."""

    at: float
    gate: threading.Event

    def passed(self):
        return self.gate.is_set()

    def seconds(self):
        assert self.gate.is_set(), "asked before it has passed"
        return self.at


def test_what_has_not_passed_is_told_later():
    log, told, gate = SpanLog(), [], threading.Event()
    log.attach(told.append)
    log.note("fetch", "fetch a", (HostMark(1.0),), Later(2.0, gate))
    log.note("fetch", "fetch b", (HostMark(3.0),), HostMark(4.0))
    log.collect()
    assert [span.label for span in told] == ["fetch b"]
    gate.set()
    log.collect()
    log.collect()
    assert [span.label for span in told] == ["fetch b", "fetch a"]


def test_a_wait_lasts_from_when_the_device_ran_dry_and_is_none_if_it_did_not():
    log, told, gate = SpanLog(), [], threading.Event()
    gate.set()
    log.attach(told.append)
    log.note("wait", "update a", (Later(5.0, gate), HostMark(2.0)), HostMark(7.0))
    log.note("wait", "update b", (Later(1.0, gate), HostMark(2.0)), HostMark(7.0))
    log.note("wait", "update c", (Later(8.0, gate), HostMark(2.0)), HostMark(7.0))
    log.collect()
    assert told == [Span("wait", "update a", 5.0, 7.0), Span("wait", "update b", 2.0, 7.0)]


@pytest.mark.parametrize("listened", [True, False])
def test_torchs_profiler_shows_every_span(streams, listened):
    if listened:
        streams.attach(lambda span: None)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with streams.span("compute", "forward layers.3"), streams.span("wait", "update layers.2"):
            pass
        with streams.span("fetch", "fetch layers.4"):
            pass
    shown = {event.name for event in profiler.events()}
    assert {"megatrain.forward layers.3", "megatrain.wait update layers.2", "megatrain.fetch layers.4"} <= shown


def test_marks_take_times(streams, clock):
    first = streams.mark()
    clock["seconds"] += 4.0
    second = streams.mark()
    assert second.seconds() - first.seconds() == 4.0


def test_waits_for_the_worker_are_spans_and_having_nothing_to_wait_for_is_none(streams):
    told, worker, gate, began = [], Worker(), threading.Event(), threading.Event()
    streams.attach(told.append)
    noted = []

    def span(*arguments):
        noted.append(arguments)
        gate.set()  # now somebody waits
        return streams.span(*arguments)

    worker.span = span

    def task():
        began.set()
        gate.wait()

    worker.wait(3)
    worker.wait()
    worker.submit(3, task)
    began.wait()
    worker.wait(2)
    assert noted == []
    worker.wait(3)
    gate.clear()
    worker.submit(4, task)
    worker.wait()
    worker.close()
    streams.collect()
    assert noted == [("wait", "update"), ("wait", "worker")]
    assert [(span.lane, span.label) for span in told] == noted
