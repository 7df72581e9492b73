"""The chart of a recording: what each lane did, and where the device had nothing to do."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_megatrain.callbacks.recording import LANES, Recording
from lightning_megatrain.stream.spans import Span

WIDTH, HEIGHT = 1200, 400
"""Pixels of the picture as it is shown; the file has twice as many."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 14, 66, 42  # pixels around the rows
_LETTER = 5.4  # pixels that a letter takes
_COLOURS = {
    "fetch": "#2a9d8f",
    "forward": "#86b3e0",
    "recompute": "#c2d6ee",
    "backward": "#33609c",
    "push": "#e9a03b",
    "update": "#8e6bbf",
    "sum": "#c8b5e4",
    "stall": "#d1495b",
    "other": "#9a9a9a",
    "outside units": "#ececec",
}
"""By verb, in the order of the legend."""
_DARK = {"backward", "fetch", "update", "stall"}


def require_matplotlib() -> None:
    """Refuse to go on without matplotlib.

    Raises:
        ModuleNotFoundError: says how to get it.
    """
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "Charts need matplotlib, which is not installed; run pip install 'lightning-megatrain[notebooks]', or set "
            "png=False (callbacks.timeline.png=false on the command line)."
        )


def draw(recording: Recording, path: Path) -> None:
    """Write the chart as a PNG, to be shown :data:`WIDTH` pixels wide."""
    chart(recording).savefig(path, format="png")


def chart(recording: Recording) -> Any:
    """The chart as a ``matplotlib.figure.Figure`` with one pair of axes: seconds to the right, a row for each lane.

    Pauses are cut out: after them time goes on where it stood.
    """
    figure = import_module("matplotlib.figure").Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=200)
    size = (1 - (_LEFT + _RIGHT) / WIDTH, 1 - (_TOP + _BOTTOM) / HEIGHT)
    axes = figure.add_axes((_LEFT / WIDTH, _BOTTOM / HEIGHT, *size))
    pixel = recording.seconds / (WIDTH - _LEFT - _RIGHT)  # seconds
    bars = {lane: _visible(recording, lane, pixel) for lane in LANES}
    kinds: set[str] = set()
    if not recording.inline:
        kinds.add("outside units")
        for start, end in _gaps([*bars["compute"], *bars["wait"]], recording.seconds):
            axes.broken_barh(
                [(start, end - start)], _span_of_row(LANES.index("compute")), color=_COLOURS["outside units"]
            )
    for row, lane in enumerate(LANES):
        by_kind: dict[str, list[Span]] = {}
        for span in bars[lane]:
            by_kind.setdefault(_kind(span), []).append(span)
        for kind, spans in by_kind.items():
            _bars(axes, row, spans, kind, pixel)
        kinds |= by_kind.keys()
    _frame(axes, recording)
    _legend(axes, [kind for kind in _COLOURS if kind in kinds])
    return figure


def _kind(span: Span) -> str:
    """Its colour's name."""
    if span.lane == "wait":
        return "stall"
    return next((kind for kind in (span.verb, span.lane) if kind in _COLOURS), "other")


def _visible(recording: Recording, lane: str, pixel: float) -> list[Span]:
    """The lane's spans in seconds of steps, cut to the picture; what has one label and no gap is one."""
    found: list[Span] = []
    for span in recording.spans:
        if span.lane != lane:
            continue
        start, end = (recording.of_steps(recording.start, t) for t in (span.start, span.end))
        if found and found[-1].label == span.label and start - found[-1].end < pixel:
            found[-1] = found[-1]._replace(end=max(end, found[-1].end))
        else:
            found.append(span._replace(start=start, end=end))
    return [span for span in found if lane != "wait" or span.seconds > pixel]


def _gaps(spans: list[Span], seconds: float) -> list[tuple[float, float]]:
    """Stretches from 0 to ``seconds`` that no span covers."""
    found, covered = [], 0.0
    for span in sorted(spans, key=lambda s: s.start):
        if span.start > covered:
            found.append((covered, span.start))
        covered = max(covered, span.end)
    return [*found, (covered, seconds)] if covered < seconds else found


def _span_of_row(row: int) -> tuple[float, float]:
    return (row - 0.4, 0.8)


def _bars(axes: Any, row: int, spans: list[Span], kind: str, pixel: float) -> None:
    """Draw spans of one kind. They are labelled where that fits, unless it does for few of them."""
    for span in spans:
        edge = 0.4 if span.seconds > 4 * pixel else 0.0
        where = [(span.start, max(span.seconds, pixel))]  # short ones too are seen
        axes.broken_barh(where, _span_of_row(row), facecolor=_COLOURS[kind], edgecolor="white", linewidth=edge)
        if kind == "stall":  # seen in every row: the device did nothing meanwhile
            axes.axvspan(span.start, span.end, color=_COLOURS[kind], alpha=0.16, linewidth=0, zorder=0)
    names = [span.verb if kind == "stall" else _short(span) for span in spans]
    fits = [_LETTER * len(name) + 2 < span.seconds / pixel for span, name in zip(spans, names, strict=True)]
    if kind != "stall" and sum(fits) < 0.8 * len(fits):
        return
    colour = "white" if kind in _DARK else "#222222"
    for span, name, fit in zip(spans, names, fits, strict=True):
        if fit:
            middle = (span.start + span.end) / 2
            axes.text(middle, row, name, ha="center", va="center", fontsize=6.5, color=colour, clip_on=True)


def _short(span: Span) -> str:
    """The number of the unit, or else the last part of its name."""
    numbers = re.findall(r"\d+", span.unit)
    return numbers[-1] if numbers else span.unit.rpartition(".")[2] or span.verb


def _frame(axes: Any, recording: Recording) -> None:
    axes.set_xlim(0, recording.seconds)
    axes.set_ylim(len(LANES) - 0.5, -0.5)
    axes.set_yticks(range(len(LANES)), [*LANES[:-1], "stall"], fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel("seconds", fontsize=8.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    for step, began in recording.steps:
        start = recording.of_steps(recording.start, began)
        axes.axvline(start, color="#444444", linewidth=0.8, linestyle=(0, (4, 3)))
        if len(recording.steps) > 1:
            axes.text(start, -0.55, f" step {step}", fontsize=7.5, color="#444444", va="bottom")
    first, last = recording.steps[0][0], recording.steps[-1][0]
    title = f"Step {first}" if first == last else f"Steps {first} to {last}"
    axes.set_title(f"{title}: {recording.describe()}", loc="left", fontsize=9.5, pad=32)


def _legend(axes: Any, kinds: list[str]) -> None:
    patch = import_module("matplotlib.patches").Patch
    axes.legend(
        handles=[patch(color=_COLOURS[kind], label=kind) for kind in kinds],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.05),
        ncols=max(1, len(kinds)),
        fontsize=8,
        frameon=False,
        handlelength=1.0,
        handleheight=1.0,
        columnspacing=1.2,
        borderaxespad=0.0,
    )
