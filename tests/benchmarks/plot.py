"""Draws and tabulates what `megatrain bench step ceiling=true to=FILE` measured.

    python tests/benchmarks/plot.py results/*.json --picture speed.png > results/table.md

Prints a Markdown table of all results, and draws one bar for each that has a ceiling: tokens per second as a share of
those of the same model wholly in device memory, recomputed in full, without an optimizer. The picture needs matplotlib.
"""

from __future__ import annotations

import argparse
import inspect
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_megatrain import MegaTrainStrategy

Row = dict[str, Any]

_GIB = 2**30


def rows_of(results: Sequence[dict[str, Any]]) -> list[Row]:
    """One row for each size of each result, with what tells it from all others as its `label`."""
    rows = [{**result, **size, "label": _label(result, size)} for result in results for size in result["sizes"]]
    alike, seen = Counter(row["label"] for row in rows), Counter[str]()
    for row in rows:
        label = row["label"]
        seen[label] += 1
        if alike[label] > 1:
            row["label"] += f", run {seen[label]}"
    return rows


_DEFAULTS = {name: p.default for name, p in inspect.signature(MegaTrainStrategy).parameters.items()}


def _label(result: dict[str, Any], size: dict[str, Any]) -> str:
    """The model and its size, the batch, and what is not set as it is by default; compiled is the rule here."""
    parts = [f"{result['model']} ({result['parameters'] / 1e9:.3g}B)", f"{size['rows']} x {result['seq_len']:,} tokens"]
    if result["precision"] != "bf16-mixed":
        parts.append(result["precision"])
    if result["clip"] is not None:
        parts.append(f"clip {result['clip']:g}")
    settings = {name: value for name, value in result["strategy"].items() if name != "compile"}
    parts += [f"{name} {value}" for name, value in settings.items() if name in _DEFAULTS and value != _DEFAULTS[name]]
    if not result["strategy"]["compile"]:
        parts.append("not compiled")
    return ", ".join(parts)


def markdown(rows: Sequence[Row]) -> str:
    """The table, with the hardware, versions and commits that its rows were measured with, and their commands."""
    headings = ["run", "schedule", "s/step", "tokens/s", "of the ceiling", "model TFLOP/s", "GPU GiB, allocated"]
    headings += ["GPU GiB, reserved", "host GiB, RSS", "host bytes/parameter"]
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    for row in rows:
        cells = [
            row["label"],
            f"`{row['schedule']}`",
            f"{row['step_s']:.3f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['of_ceiling']:.3f}" if "of_ceiling" in row else "does not fit" if "ceiling" in row else "",
            f"{row['model_tflops']:.0f}",
            _gib(row["peak_device_allocated_bytes"]),
            _gib(row["peak_device_reserved_bytes"]),
            _gib(row["peak_host_rss_bytes"]),
            f"{row['host_bytes_per_parameter']:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    for place in dict.fromkeys(map(_place, rows)):
        lines += ["", f"- {place}:"]
        lines += [f"  - {row['label']}: `{row['command']}`" for row in rows if _place(row) == place]
    return "\n".join(lines)


def _place(row: Row) -> str:
    hardware, versions = row["hardware"], row["versions"]
    return (
        f"{hardware['device']}, {hardware['cores']} cores of {hardware['cpu']}; torch {versions['torch']}, lightning "
        f"{versions['lightning']}, transformers {versions['transformers']}; commit {row['commit'] or 'unknown'}"
    )


def _gib(count: int | None) -> str:
    return "" if count is None else f"{count / _GIB:.1f}"


def draw(rows: Sequence[Row], path: Path) -> None:
    """One bar for each row that has a ceiling, to a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in rows if "of_ceiling" in row]
    figure, axes = pyplot.subplots(figsize=(11, 1.2 + 0.45 * len(shown)), layout="constrained")
    bars = axes.barh([row["label"] for row in shown], [row["of_ceiling"] for row in shown], color="#4c72b0", height=0.6)
    labels = [f"{row['of_ceiling']:.2f} ({row['tokens_per_s']:,.0f} tokens/s)" for row in shown]
    axes.bar_label(bars, labels, label_type="center", color="white")
    axes.axvline(1.0, color="#444444", linestyle="--", linewidth=1)
    axes.invert_yaxis()  # the first on top
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(
        "tokens/s, as a share of the same model's in device memory,\nrecomputed in full, without an optimizer"
    )
    axes.set_title(", ".join(dict.fromkeys(row["hardware"]["device"] for row in shown)), loc="left")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="JSON files of `megatrain bench step`")
    parser.add_argument("--picture", type=Path, help="a PNG file to draw to")
    given = parser.parse_args()
    rows = rows_of([json.loads(path.read_text()) for path in given.results])
    print(markdown(rows))
    if given.picture is not None:
        draw(rows, given.picture)


if __name__ == "__main__":
    main()
