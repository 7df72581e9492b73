"""A few steps, span by span, and their form for Chrome's and Perfetto's trace viewers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_megatrain.callbacks.measure import Tally
from lightning_megatrain.stream.spans import Span

LANES = ("fetch", "compute", "push", "update", "wait")
"""From top to bottom."""


@dataclass
class Recording:
    """What happened in some steps that follow each other.

    Attributes:
        inline: the host computes, so the lanes take turns.
        steps: number of each step, and when it began, in seconds on the host's clock.
        end: when the last one ended.
        pauses: begin and end of what came between two batches and is no part of a step: validation, the end of an
            epoch, a checkpoint.
        spans: those that touch the time of steps, in the order in which they began.
    """

    inline: bool
    steps: list[tuple[int, float]] = field(default_factory=list)
    end: float = 0.0
    pauses: list[tuple[float, float]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    @property
    def start(self) -> float:
        """When the first step began."""
        return self.steps[0][1]

    @property
    def seconds(self) -> float:
        """How long all steps took, pauses left out."""
        return self.of_steps(self.start, self.end)

    @property
    def name(self) -> str:
        """``step_5``, or ``steps_5-7``."""
        first, last = self.steps[0][0], self.steps[-1][0]
        return f"step_{first}" if first == last else f"steps_{first}-{last}"

    def of_steps(self, start: float, end: float) -> float:
        """Seconds between two times that belong to the steps."""
        pieces = [(self.start, self.end, 1), *((*pause, -1) for pause in self.pauses)]
        return sum(sign * max(0.0, min(end, last) - max(start, first)) for first, last, sign in pieces)

    def take(self, spans: Sequence[Span]) -> None:
        """Keep those that touch the time of the steps."""
        touching = [span for span in spans if span.end > self.start and span.start < self.end]
        touching = [s for s in touching if not any(a <= s.start and s.end <= b for a, b in self.pauses)]
        self.spans = sorted(touching, key=lambda span: span.start)

    def describe(self) -> str:
        """Seconds, share of them that the device waited, and the lanes' rates, in one line."""
        tally = Tally()
        for span in self.spans:
            tally.add(span)
        waits = [s for s in self.spans if s.lane == "wait"]
        waited = sum(self.of_steps(s.start, s.end) for s in waits) / self.seconds
        rates = tally.rates()
        units = {"fetch_gb_per_s": "GB/s", "push_gb_per_s": "GB/s", "update_gparams_per_s": "G parameters/s"}
        parts = [f"{name.partition('_')[0]} {rates[name]:.3g} {unit}" for name, unit in units.items() if name in rates]
        if self.pauses:
            parts.append(f"{self.end - self.start - self.seconds:.3g} s that belong to no step left out")
        return ", ".join([f"{self.seconds / len(self.steps):.3g} s a step", f"waited {waited:.1%}", *parts])

    def write_trace(self, path: Path) -> None:
        """Write Chrome's trace events as JSON: a row for the steps, which begin at 0, and one for each lane."""
        path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": [*self._rows(), *self._events()]}))

    def _rows(self) -> list[dict[str, Any]]:
        rows = []
        for index, name in enumerate(("steps", *LANES)):
            where = {"ph": "M", "pid": 0, "tid": index}
            rows.append({**where, "name": "thread_name", "args": {"name": name}})
            rows.append({**where, "name": "thread_sort_index", "args": {"sort_index": index}})
        return rows

    def _events(self) -> list[dict[str, Any]]:
        ends = [*(start for _, start in self.steps[1:]), self.end]
        events = [self._event("no step", 0, *pause, {}) for pause in self.pauses]
        for (step, start), end in zip(self.steps, ends, strict=True):
            inside = [time for pause in self.pauses for time in pause if start < time <= end]
            pieces = zip([start, *inside[1::2]], [*inside[::2], end], strict=True)
            events += [self._event(f"step {step}", 0, *piece, {}) for piece in pieces if piece[0] < piece[1]]
        for span in self.spans:
            details = {"bytes": span.nbytes, "GB/s": span.nbytes / span.seconds / 1e9} if span.nbytes else {}
            events.append(self._event(span.label, 1 + LANES.index(span.lane), span.start, span.end, details))
        return events

    def _event(self, name: str, row: int, start: float, end: float, details: dict[str, float]) -> dict[str, Any]:
        microseconds = {"ts": (start - self.start) * 1e6, "dur": (end - start) * 1e6}
        return {"name": name, "ph": "X", "pid": 0, "tid": row, **microseconds, "args": details}
