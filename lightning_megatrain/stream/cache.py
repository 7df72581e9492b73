"""Weights that stay in slots from the forward to the backward, where the backward waits for the link."""

import math
import time

import torch

from lightning_megatrain.memory.slots import SlotRing
from lightning_megatrain.stream.share import WORTH
from lightning_megatrain.stream.spans import Mark, Span
from lightning_megatrain.stream.streams import Streams

_JUDGED = 2
"""Steps that are over when it is decided: what the first waited for were kernels being chosen as well."""


class WeightCache:
    """Spends device memory on more slots than fetching ahead needs.

    Slots are recycled least recently used first, so what more of them hold when the forward ends are the weights of its
    last units, with which the backward begins: each saves one fetch a step. How many are added is decided once, from
    what the backward of the second step waited for. A forward needs every weight once, and gains nothing.

    Args:
        ring: the ring; it is made longer.
        most: slots that are of use: as many as there are units.
        streams: the lanes of the device.
    """

    def __init__(self, ring: SlotRing, most: int, streams: Streams) -> None:
        self._ring = ring
        self._least = len(ring.slots)
        self._most = most
        self._streams = streams
        self._steps = 0
        self._began = time.perf_counter()
        self._turned: Mark | None = None  # where this step's backward began
        self._spans: list[Span] = []
        if most > self._least:
            streams.attach(self._note)

    def begin(self, spare: int) -> int:
        """A training step begins: add slots if it is time and they pay.

        Args:
            spare: device bytes that may be taken.

        Returns:
            Bytes that were taken.
        """
        if self._steps > _JUDGED:
            return 0
        self._steps += 1
        wanted = self._wanted()
        if self._steps <= _JUDGED:
            return 0
        self.close()
        each = self._ring.slots[0].buffer.nbytes
        return each * self._add(min(wanted, self._most - self._least, spare // each))

    def _wanted(self) -> int:
        """Slots that would make up for what the backward of the step that is over waited for."""
        self._streams.collect()
        now = time.perf_counter()
        step, spans, turned = now - self._began, self._spans, self._turned
        self._began, self._spans, self._turned = now, [], None
        fetches = [span.seconds for span in spans if span.lane == "fetch"]
        if turned is None or not turned.passed() or not fetches:
            return 0
        after = turned.seconds()
        waited = sum(span.seconds for span in spans if span.lane == "wait" and span.start >= after)
        return math.ceil(waited * len(fetches) / sum(fetches)) if waited > WORTH * step else 0

    def begin_backward(self) -> None:
        """The step's backward begins."""
        if self._steps <= _JUDGED:
            self._turned = self._streams.mark()

    def _add(self, count: int) -> int:
        for added in range(count):
            try:
                slot = self._ring.add()
            except torch.OutOfMemoryError:
                return added
            slot.released = self._streams.record()  # what had this memory before is done with it
        return count

    def give_back(self) -> int:
        """Memory ran out: drop added slots that are not in use, for good; returns device bytes that are free again."""
        freed = 0
        for slot in [s for s in self._ring.slots[self._least :] if not s.users]:
            if slot.filled is not None:
                self._streams.compute_after(slot.filled.done)  # whatever has its memory next is computed
            self._ring.slots.remove(slot)
            freed += slot.buffer.nbytes
        return freed

    def close(self) -> None:
        """Look at steps no more."""
        self._streams.detach(self._note)

    def _note(self, span: Span) -> None:
        # Residents, which have no name here, come in any case, and so do inputs that wait on the host.
        if span.lane in ("fetch", "wait") and span.verb == "fetch" and span.unit not in ("", "input"):
            self._spans.append(span)
