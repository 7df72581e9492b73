"""Sums of spans and peaks of memory: what the callbacks show as numbers."""

from __future__ import annotations

import sys
from collections import defaultdict

import lightning as L
import torch

from lightning_megatrain.memory.device import highest_allocated
from lightning_megatrain.strategy import MegaTrainStrategy
from lightning_megatrain.stream.spans import Span
from lightning_megatrain.stream.streams import Streams

CAUSES = ("fetch", "push", "slab", "update", "worker")
"""What the computing device can wait for: the weights of a unit; a gradient buffer that is still being pushed; and,
because the host has nothing to launch, a slab to push into; the update of a unit that is needed; all gradients and
updates under way."""


class Tally:
    """Adds spans up; :meth:`add` listens to :class:`Streams`.

    Attributes:
        waits: seconds without work of the computing device, by cause.
        busy: seconds in which each lane worked.
    """

    def __init__(self) -> None:
        self.waits: defaultdict[str, float] = defaultdict(float)
        self.busy: defaultdict[str, float] = defaultdict(float)
        self._seconds: defaultdict[str, float] = defaultdict(float)  # in which bytes were moved
        self._nbytes: defaultdict[str, int] = defaultdict(int)

    def add(self, span: Span) -> None:
        """Count one span."""
        if span.lane == "wait":
            self.waits[span.verb] += span.seconds
            return
        self.busy[span.lane] += span.seconds
        if span.nbytes:
            self._seconds[span.lane] += span.seconds
            self._nbytes[span.lane] += span.nbytes

    def bytes_per_s(self, lane: str) -> float | None:
        """Rate of a lane while it moved something; None if it did not."""
        return self._nbytes[lane] / self._seconds[lane] if self._seconds[lane] else None

    def rates(self) -> dict[str, float]:
        """Rates of the lanes that worked: GB/s of the link in either direction, and billions of parameters updated."""
        scales = {
            "fetch_gb_per_s": 1e9,
            "push_gb_per_s": 1e9,
            "update_gparams_per_s": 4e9,
        }  # an update's bytes are fp32
        found = {name: (self.bytes_per_s(name.partition("_")[0]), scale) for name, scale in scales.items()}
        return {name: rate / scale for name, (rate, scale) in found.items() if rate is not None}


def streams_of(trainer: L.Trainer) -> Streams | None:
    """What tells the spans of the run under way; None with another strategy than megatrain."""
    strategy = trainer.strategy
    return strategy.streams if isinstance(strategy, MegaTrainStrategy) else None


def peak_device_bytes(device: torch.device) -> int | None:
    """The most bytes that tensors took on the device in this run; None for the CPU. Does not wait for the device."""
    return highest_allocated(device) if device.type == "cuda" else None


def peak_host_rss() -> int | None:
    """The largest resident size of this process so far, in bytes; None where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
