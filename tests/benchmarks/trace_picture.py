"""Draws a trace of blocks on the GPU and updates on the host, as a chart with a row for each.

    python tests/benchmarks/trace_picture.py results/TRACE.json --picture TRACE.png --title "What was measured"

Takes Chrome's trace events with complete events ("ph": "X") whose names are a verb and the name of a unit, times in
microseconds. A trace of the Timeline callback has more lanes and comes with a picture of its own. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import Patch

WIDTH, HEIGHT = 1200, 280
"""Pixels of the picture."""

ROWS = {"gpu": "GPU", "host update": "host"}
"""From top to bottom: threads of the trace, and what the picture calls them."""

COLOURS = {"forward": "#86b3e0", "backward": "#33609c", "update": "#8e6bbf"}
"""By verb, in the order of the legend."""

BETWEEN = "#ececec"
"""Colour of the time in which no unit runs on the GPU."""


class Bar(NamedTuple):
    """One event: its row, what was done to which unit, and when, in seconds."""

    row: str
    verb: str
    unit: str
    start: float
    seconds: float

    @property
    def number(self) -> str:
        """Of the unit, a block; empty for what is outside blocks."""
        last = self.unit.rpartition(".")[2]
        return last if last.isdigit() else ""


def read(path: Path) -> list[Bar]:
    """The bars of a trace file."""
    bars = []
    for event in json.loads(path.read_text())["traceEvents"]:
        verb, _, unit = event["name"].partition(" ")
        bars.append(Bar(event["tid"], verb, unit, event["ts"] / 1e6, event["dur"] / 1e6))
    return bars


def chart(bars: list[Bar], title: str) -> Figure:
    """Seconds to the right, a row for each thread, blocks numbered where it fits."""
    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=100, layout="constrained")
    axes: Any = figure.subplots()
    end = max(bar.start + bar.seconds for bar in bars)
    axes.broken_barh([(0.0, end)], (-0.4, 0.8), color=BETWEEN)  # what the blocks leave of the GPU's row
    for bar in bars:
        row = list(ROWS).index(bar.row)
        where = [(bar.start, bar.seconds)]
        axes.broken_barh(where, (row - 0.4, 0.8), facecolor=COLOURS[bar.verb], edgecolor="white", linewidth=0.5)
        middle, wide = bar.start + bar.seconds / 2, bar.seconds / end * WIDTH > 18
        if bar.number and wide:
            axes.text(middle, row, bar.number, ha="center", va="center", fontsize=7.5, color="white")
        elif bar.number and int(bar.number) % 4 == 0:  # above it, where there is room for so many
            axes.text(middle, row - 0.43, bar.number, ha="center", va="bottom", fontsize=7.5, color="#444444")
    axes.set(xlim=(0, end), ylim=(len(ROWS) - 0.5, -0.62), xlabel="seconds")
    axes.set_yticks(range(len(ROWS)), list(ROWS.values()))
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(title, loc="left", fontsize=10, pad=26)
    names = {**COLOURS, "no block on the GPU": BETWEEN}
    axes.legend(
        handles=[Patch(color=colour, label=name) for name, colour in names.items()],
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=len(names),
        fontsize=8.5,
        frameon=False,
        borderaxespad=0.2,
    )
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="a JSON file of trace events")
    parser.add_argument("--picture", type=Path, required=True, help="a PNG file to draw to")
    parser.add_argument("--title", default="", help="what stands above the chart")
    given = parser.parse_args()
    chart(read(given.trace), given.title).savefig(given.picture, format="png")


if __name__ == "__main__":
    main()
