"""The tables of `megatrain bench step`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from lightning_megatrain.memory.host import format_bytes

Size = dict[str, Any]


def _known(count: int | None) -> str:
    return "-" if count is None else format_bytes(count)


_FIGURES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "step_s": ("seconds per step", "{:.4g}".format),
    "tokens_per_s": ("tokens/s", "{:,.0f}".format),
    "model_tflops": ("model TFLOP/s", "{:,.4g}".format),
    "peak_device_allocated_bytes": ("peak device memory, allocated", _known),
    "peak_device_reserved_bytes": ("peak device memory, reserved", _known),
}
"""Label and form of each figure, of ours and of the ceiling."""


def step_tables(result: dict[str, Any]) -> list[RenderableType]:
    """One result for people: what was trained and on what, and a table with a column for each size.

    Args:
        result: what `bench_step` returns.
    """
    clip = "no clipping" if result["clip"] is None else f"clipped to {result['clip']:g}"
    what = (
        f"{result['model']}, {result['parameters']:,} parameters, {result['precision']}, {result['seq_len']:,} tokens "
        f"a row, {clip}; update {result['schedule']}, {result['host_bytes_per_parameter']:.2f} host bytes per parameter"
    )
    where = (
        f"{result['hardware']['device']}, torch {result['versions']['torch']}, commit {result['commit'] or 'unknown'}"
    )
    sizes: Sequence[Size] = result["sizes"]
    table = Table(title="megatrain bench step", title_justify="left")
    table.add_column("rows", style="bold", no_wrap=True)
    for size in sizes:
        table.add_column(f"{size['rows']:,}", justify="right")
    table.add_row("tokens per step", *(f"{size['tokens']:,}" for size in sizes))
    for key, (label, form) in _FIGURES.items():
        table.add_row(label, *(form(size[key]) for size in sizes))
    table.add_row("peak host RSS", *(_known(size["peak_host_rss_bytes"]) for size in sizes))
    if any("ceiling" in size for size in sizes):
        table.add_section()
        table.add_row("the same in device memory, no optimizer", *(_shortage(size["ceiling"]) for size in sizes))
        for key, (label, form) in _FIGURES.items():
            table.add_row(f"  {label}", *(form(c[key]) if key in c else "-" for c in (s["ceiling"] for s in sizes)))
        table.add_row("tokens/s, ours of these", *(_share(size) for size in sizes))
    return [table, Text(what), Text(where)]


def sweep_table(results: Sequence[tuple[str, dict[str, Any]]]) -> Table:
    """One row for each size of each run of a sweep.

    Args:
        results: overrides, and what `bench_step` returned.
    """
    table = Table(title="megatrain bench step", title_justify="left")
    headings = (
        "overrides",
        "rows",
        "update",
        "s/step",
        "tokens/s",
        "TFLOP/s",
        "device",
        "reserved",
        "host RSS",
        "ratio",
    )
    for heading in headings:
        left = heading in ("overrides", "update")
        table.add_column(heading, justify="left" if left else "right", overflow="fold")
    for overrides, result in results:
        for size in result["sizes"]:
            table.add_row(
                overrides,
                str(size["rows"]),
                result["schedule"],
                *(form(size[key]) for key, (_, form) in _FIGURES.items()),
                _known(size["peak_host_rss_bytes"]),
                _share(size),
            )
    return table


def _shortage(ceiling: dict[str, Any]) -> str:
    if "needed" not in ceiling:
        return ""
    return f"does not fit: {format_bytes(ceiling['needed'])} or more, of {format_bytes(ceiling['available'])}"


def _share(size: Size) -> str:
    return f"{size['of_ceiling']:.3f}" if "of_ceiling" in size else "-"
