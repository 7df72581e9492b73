"""The one class that owns every stream and event.

There are three lanes. *compute* is whatever stream the caller runs its kernels on; *fetch* carries wire bytes to the
device and *push* carries gradients back, each on a stream of its own so that the two directions of the link and the
compute units work at the same time. On the CPU every operation is complete when it returns, and the same calls do
nothing else: the engine has one code path.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Lane = Literal["compute", "fetch", "push"]


class Event:
    """A point in a lane. ``wait`` blocks the calling host thread, without the GIL, until the lane has passed it."""

    def __init__(self, event: "torch.cuda.Event | None" = None) -> None:
        self.event = event

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

    @staticmethod
    def on(device: torch.device) -> "Streams":
        """The lanes for ``device``."""
        return CudaStreams(device) if device.type == "cuda" else HostStreams(device)

    @abstractmethod
    def record(self) -> Event:
        """Mark this point of the compute lane."""

    @abstractmethod
    def compute_after(self, event: Event) -> None:
        """Make the compute lane wait for ``event``; the host goes on."""

    @abstractmethod
    def copy(self, lane: Lane, target: Tensor, source: Tensor, after: Iterable[Event] = ()) -> Copy:
        """Start ``target.copy_(source)`` on ``lane`` once the events in ``after`` have passed."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until every lane is idle."""

    def random_state(self) -> list[Tensor]:
        """State of every generator that a block's forward may draw from: the CPU's and the device's."""
        return [torch.get_rng_state()]

    def set_random_state(self, state: list[Tensor]) -> None:
        """Restore what :meth:`random_state` returned."""
        torch.set_rng_state(state[0])


class HostStreams(Streams):
    """Lanes of a CPU run: all work is done when its call returns."""

    def record(self) -> Event:  # noqa: D102
        return Event()

    def compute_after(self, event: Event) -> None:  # noqa: D102
        return

    def copy(self, lane: Lane, target: Tensor, source: Tensor, after: Iterable[Event] = ()) -> Copy:  # noqa: D102
        if self.delay is not None:
            self.delay(lane)
        target.copy_(source)
        return Copy(target, source, Event())

    def synchronize(self) -> None:  # noqa: D102
        return


class CudaStreams(Streams):
    """Lanes of one CUDA device."""

    def __init__(self, device: torch.device, delay: Callable[[Lane], None] | None = None) -> None:
        super().__init__(device, delay)
        self._streams = {"fetch": torch.cuda.Stream(device), "push": torch.cuda.Stream(device)}

    def record(self) -> Event:  # noqa: D102
        stream = torch.cuda.current_stream(self.device)
        if self.delay is not None:
            self.delay("compute")
        event = torch.cuda.Event()
        event.record(stream)
        return Event(event)

    def compute_after(self, event: Event) -> None:  # noqa: D102
        if event.event is not None:
            torch.cuda.current_stream(self.device).wait_event(event.event)

    def copy(self, lane: Lane, target: Tensor, source: Tensor, after: Iterable[Event] = ()) -> Copy:  # noqa: D102
        stream = torch.cuda.current_stream(self.device) if lane == "compute" else self._streams[lane]
        for event in after:
            if event.event is not None:
                stream.wait_event(event.event)
        with torch.cuda.stream(stream):
            if self.delay is not None:
                self.delay(lane)
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(stream)
        return Copy(target, source, Event(done))

    def synchronize(self) -> None:  # noqa: D102
        torch.cuda.synchronize(self.device)

    def random_state(self) -> list[Tensor]:  # noqa: D102
        return [torch.get_rng_state(), torch.cuda.get_rng_state(self.device)]

    def set_random_state(self, state: list[Tensor]) -> None:  # noqa: D102
        torch.set_rng_state(state[0])
        torch.cuda.set_rng_state(state[1], self.device)
