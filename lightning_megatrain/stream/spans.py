"""What was done when: the record that monitors and timelines are made of."""

from collections import deque
from collections.abc import Callable, Collection
from typing import Literal, NamedTuple, Protocol, get_args

SpanLane = Literal["fetch", "compute", "push", "update", "wait"]
LANES: tuple[SpanLane, ...] = get_args(SpanLane)


class Span(NamedTuple):
    """Something that took time.

    Attributes:
        lane: where it happened. ``"wait"`` is time in which the computing device had nothing to do.
        label: a verb and mostly the name of a unit, ``"forward model.layers.3"``; of a wait its cause, ``"fetch
            model.layers.3"``.
        start: seconds, on the clock of :func:`time.perf_counter`.
        end: the same.
        nbytes: bytes that were copied; of an update, 4 for each parameter.
    """

    lane: SpanLane
    label: str
    start: float
    end: float
    nbytes: int = 0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start

    @property
    def verb(self) -> str:
        """What was done, or waited for."""
        return self.label.partition(" ")[0]

    @property
    def unit(self) -> str:
        """What it was done to; empty if that has no name."""
        return self.label.partition(" ")[2]


Listener = Callable[[Span], None]


class Mark(Protocol):
    """A point in a lane that tells its time once it has passed."""

    def passed(self) -> bool:
        """Whether the work before it is done; never waits."""

    def seconds(self) -> float:
        """When it passed, on the clock of :func:`time.perf_counter`. Only asked once it has."""


class HostMark(NamedTuple):
    """A moment on the host, which has passed."""

    moment: float

    def passed(self) -> bool:
        """Always."""
        return True

    def seconds(self) -> float:
        """The moment."""
        return self.moment


class _Pending(NamedTuple):
    lane: SpanLane
    label: str
    nbytes: int
    starts: tuple[Mark, ...]
    end: Mark
    listeners: tuple[Listener, ...]


class SpanLog:
    """Keeps spans until their marks have passed, and then tells the listeners. Any thread may :meth:`note` one."""

    def __init__(self) -> None:
        self.lanes: frozenset[SpanLane] = frozenset()
        """Those that somebody listens to."""
        self._listeners: tuple[tuple[Listener, frozenset[SpanLane]], ...] = ()
        self._pending: deque[_Pending] = deque()

    def attach(self, listener: Listener, lanes: Collection[SpanLane] = LANES) -> None:
        """Call ``listener`` with every span of these lanes noted from now on; does nothing if it is attached."""
        if all(known != listener for known, _ in self._listeners):
            self._set((*self._listeners, (listener, frozenset(lanes))))

    def detach(self, listener: Listener) -> None:
        """Call it no more; does nothing if it is not attached."""
        # By equality: a bound method is a new object each time it is looked up.
        self._set(tuple((known, lanes) for known, lanes in self._listeners if known != listener))
        if not self._listeners:
            self._pending.clear()

    def _set(self, listeners: tuple[tuple[Listener, frozenset[SpanLane]], ...]) -> None:
        self._listeners = listeners
        self.lanes = frozenset().union(*(lanes for _, lanes in listeners))

    def note(self, lane: SpanLane, label: str, starts: tuple[Mark, ...], end: Mark, nbytes: int = 0) -> None:
        """A span from the last of ``starts`` to ``end``; it is dropped if that leaves no time."""
        listeners = tuple(listener for listener, lanes in self._listeners if lane in lanes)
        self._pending.append(_Pending(lane, label, nbytes, starts, end, listeners))

    def collect(self) -> None:
        """Tell the listeners of all spans that are done, in no particular order. Never waits."""
        attached, under_way = [listener for listener, _ in self._listeners], []
        for _ in range(len(self._pending)):
            lane, label, nbytes, starts, end, listeners = pending = self._pending.popleft()
            if not all(mark.passed() for mark in (end, *starts)):
                under_way.append(pending)
                continue
            span = Span(lane, label, max(mark.seconds() for mark in starts), end.seconds(), nbytes)
            if span.end > span.start:
                for listener in listeners:  # those that were there when it was noted
                    if listener in attached:
                        listener(span)
        self._pending.extend(under_way)
