"""The one class that owns every stream and event.

There are three lanes. *compute* is whatever stream the caller runs its kernels on; *fetch* carries wire bytes to the
device and *push* carries gradients back, each on a stream of its own so that the two directions of the link and the
compute units work at the same time. On the CPU every operation is complete when it returns, and the same calls do
nothing else: the engine has one code path.

Who wants to know what each lane did, and when, attaches a listener. Events then mark the begin and the end of what is
put on a lane; nobody ever waits for them: :meth:`Streams.collect` reads those that have passed.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from lightning_megatrain.stream.spans import LANES, HostMark, Listener, Mark, SpanLane, SpanLog

Lane = Literal["compute", "fetch", "push"]


class Event:
    """A point in a lane. ``wait`` blocks the calling host thread, without the GIL, until the lane has passed it.

    ``label`` says what ends there, a lane and a unit, for those who are found waiting for it.
    """

    def __init__(self, event: "torch.cuda.Event | None" = None, label: str = "") -> None:
        self.event = event
        self.label = label

    def wait(self) -> None:
        """Block the host until the work before this point is done."""
        if self.event is not None:
            self.event.synchronize()


class Copy(NamedTuple):
    """A copy under way: nobody reads ``target`` or lets go of ``source`` before ``done`` has passed."""

    target: Tensor
    source: Tensor
    done: Event


class Streams(ABC):
    """Lanes of one device.

    Args:
        device: the device that computes.
        delay: called with a lane's name, with that lane current, before each operation is put on it. Tests use it to
            slow lanes down at random; None in production.
    """

    def __init__(self, device: torch.device, delay: Callable[[Lane], None] | None = None) -> None:
        self.device = device
        self.delay = delay
        self._log = SpanLog()
        self._copying: dict[str, str] = {}  # lane: label of the span open on it

    @staticmethod
    def on(device: torch.device) -> "Streams":
        """The lanes for ``device``."""
        return CudaStreams(device) if device.type == "cuda" else HostStreams(device)

    @abstractmethod
    def record(self) -> Event:
        """Mark this point of the compute lane."""

    @abstractmethod
    def mark(self) -> Mark:
        """Mark this point of the compute lane, to learn later when it passed."""

    @abstractmethod
    def compute_after(self, event: Event) -> None:
        """Make the compute lane wait for ``event``; the host goes on."""

    @abstractmethod
    def copy(self, lane: Lane, target: Tensor, source: Tensor, after: Iterable[Event] = ()) -> Copy:
        """Start ``target.copy_(source)`` on ``lane`` once the events in ``after`` have passed.

        It times itself; the :meth:`span` around it, on the same lane, gives it its label.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until every lane is idle."""

    def random_state(self) -> list[Tensor]:
        """State of every generator that a block's forward may draw from: the CPU's and the device's."""
        return [torch.get_rng_state()]

    def set_random_state(self, state: list[Tensor]) -> None:
        """Restore what :meth:`random_state` returned."""
        torch.set_rng_state(state[0])

    # Who wants to know

    def attach(self, listener: Listener, lanes: Collection[SpanLane] = LANES) -> None:
        """Have ``listener`` called with every span of these lanes from now on, when :meth:`collect` finds it done."""
        self.set_clock()
        self._log.attach(listener, lanes)

    def detach(self, listener: Listener) -> None:
        """Call ``listener`` no more; what it has not been told yet it never is. Does nothing if it is not attached."""
        self._log.detach(listener)

    def collect(self) -> None:
        """Tell the listeners of all spans that are done, in no particular order. Never waits."""
        self._log.collect()

    def span(self, lane: SpanLane, label: str, nbytes: int = 0) -> AbstractContextManager[object]:
        """What happens inside this context is a span; torch's profiler shows it as ``megatrain.<label>``.

        On ``"compute"`` it is the work that is launched inside. On ``"fetch"`` and ``"push"`` it is each copy of that
        lane that is started inside: copies time themselves. On ``"update"`` it is what the calling thread does. On
        ``"wait"`` it is the part of the calling thread's time in which the compute lane had nothing left to do, and
        nothing if it had enough; the profiler shows ``megatrain.wait <label>``.

        Args:
            lane: where the span belongs.
            label: a verb and the name of a unit, such as ``"forward model.layers.3"``; of a wait, its cause first.
            nbytes: bytes moved; of an update, 4 for each parameter. Copies know theirs.
        """
        shown = record_function(f"megatrain.wait {label}" if lane == "wait" else f"megatrain.{label}")
        return self._timed(shown, lane, label, nbytes) if lane in self._log.lanes else shown

    @contextmanager
    def _timed(self, shown: record_function, lane: SpanLane, label: str, nbytes: int) -> Iterator[None]:
        with shown:
            if lane in ("fetch", "push"):
                outer, self._copying[lane] = self._copying.get(lane, lane), label
                try:
                    yield
                finally:
                    self._copying[lane] = outer
                return
            starts = self._starts(lane)
            try:
                yield
            finally:
                self._log.note(lane, label, starts, self._end(lane), nbytes)

    def _starts(self, lane: SpanLane) -> tuple[Mark, ...]:
        """The points after which what follows on ``lane`` begins."""
        return (HostMark(time.perf_counter()),)

    def _end(self, lane: SpanLane) -> Mark:
        return HostMark(time.perf_counter())

    def set_clock(self) -> None:  # noqa: B027  # the host needs none
        """Put the device's times on the host's clock anew. Called between steps, of which each gets its own."""


class HostStreams(Streams):
    """Lanes of a CPU run: all work is done when its call returns."""

    def record(self) -> Event:  # noqa: D102
        return Event()

    def mark(self) -> Mark:  # noqa: D102
        return HostMark(time.perf_counter())

    def compute_after(self, event: Event) -> None:  # noqa: D102
        return

    def copy(self, lane: Lane, target: Tensor, source: Tensor, after: Iterable[Event] = ()) -> Copy:  # noqa: D102
        start = self.mark() if lane in self._log.lanes else None
        if self.delay is not None:
            self.delay(lane)
        target.copy_(source)
        if start is not None:
            self._log.note(lane, self._copying.get(lane, lane), (start,), self.mark(), target.nbytes)
        return Copy(target, source, Event())

    def synchronize(self) -> None:  # noqa: D102
        return


class _Clock(NamedTuple):
    """Puts the device's times on the host's clock: an event, and the host's time when it passed."""

    event: "torch.cuda.Event"
    moment: float


class _DeviceMark(NamedTuple):
    event: "torch.cuda.Event"
    clock: _Clock

    def passed(self) -> bool:
        return self.event.query() and self.clock.event.query()

    def seconds(self) -> float:
        return self.clock.moment + self.clock.event.elapsed_time(self.event) / 1e3


class CudaStreams(Streams):
    """Lanes of one CUDA device."""

    def __init__(self, device: torch.device, delay: Callable[[Lane], None] | None = None) -> None:
        super().__init__(device, delay)
        self._streams = {"fetch": torch.cuda.Stream(device), "push": torch.cuda.Stream(device)}
        self.set_clock()

    def record(self) -> Event:  # noqa: D102
        stream = torch.cuda.current_stream(self.device)
        if self.delay is not None:
            self.delay("compute")
        event = torch.cuda.Event()
        event.record(stream)
        return Event(event)

    def mark(self) -> Mark:  # noqa: D102
        return self._mark_on(torch.cuda.current_stream(self.device))

    def compute_after(self, event: Event) -> None:  # noqa: D102
        if event.event is None:
            return
        start = self.mark() if "wait" in self._log.lanes else None
        torch.cuda.current_stream(self.device).wait_event(event.event)
        if start is not None:
            self._log.note("wait", event.label, (start,), self.mark())

    def copy(self, lane: Lane, target: Tensor, source: Tensor, after: Iterable[Event] = ()) -> Copy:  # noqa: D102
        stream = torch.cuda.current_stream(self.device) if lane == "compute" else self._streams[lane]
        label = self._copying.get(lane, lane)
        for event in after:
            if event.event is not None:
                stream.wait_event(event.event)
        with torch.cuda.stream(stream):
            # After what the copy waits for: that is not its time.
            start = self._mark_on(stream) if lane in self._log.lanes else None
            if self.delay is not None:
                self.delay(lane)
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event(enable_timing=start is not None)
            done.record(stream)
        if start is not None:
            self._log.note(lane, label, (start,), _DeviceMark(done, self._clock), target.nbytes)
        return Copy(target, source, Event(done, f"{lane} {label.partition(' ')[2]}".rstrip()))

    def synchronize(self) -> None:  # noqa: D102
        torch.cuda.synchronize(self.device)

    def random_state(self) -> list[Tensor]:  # noqa: D102
        return [torch.get_rng_state(), torch.cuda.get_rng_state(self.device)]

    def set_random_state(self, state: list[Tensor]) -> None:  # noqa: D102
        torch.set_rng_state(state[0])
        torch.cuda.set_rng_state(state[1], self.device)

    def _mark_on(self, stream: "torch.cuda.Stream") -> _DeviceMark:
        return _DeviceMark(_timed_event(stream), self._clock)

    def _starts(self, lane: SpanLane) -> tuple[Mark, ...]:
        now = HostMark(time.perf_counter())
        if lane == "update":
            return (now,)
        # A waiting host keeps the device from work only from when that has done what was launched before.
        return (self.mark(), now) if lane == "wait" else (self.mark(),)

    def _end(self, lane: SpanLane) -> Mark:
        return self.mark() if lane == "compute" else HostMark(time.perf_counter())

    def set_clock(self) -> None:  # noqa: D102
        # Between two steps the push lane is idle, for a backward ends when its last push has landed: an event there
        # passes at once. Clocks drift, and elapsed times are 32-bit floats.
        event = _timed_event(self._streams["push"])
        self._clock = _Clock(event, time.perf_counter())


def _timed_event(stream: "torch.cuda.Stream") -> "torch.cuda.Event":
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event
