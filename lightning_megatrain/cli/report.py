"""The table and the sample that end a training run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class TrainReport:
    """What one run reached; None where it is not known.

    Args:
        val_loss: before and after training, nats per token.
        val_perplexity: before and after training.
        tokens_per_s: mean rate of training.
        host_bytes_per_parameter: persistent host memory of the strategy, bytes.
        peak_host_rss: of this process so far, bytes.
        checkpoint: path of the last checkpoint.
        log: path of the metrics.
    """

    val_loss: tuple[float | None, float | None]
    val_perplexity: tuple[float | None, float | None]
    tokens_per_s: float | None
    host_bytes_per_parameter: float | None
    peak_host_rss: int | None
    checkpoint: Path | None
    log: Path | None

    def table(self) -> Table:
        """Lay the report out, one fact a row."""
        table = Table(show_header=False, title="megatrain train", title_justify="left")
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        table.add_row("validation loss", _change(self.val_loss, ".3f"))
        table.add_row("validation perplexity", _change(self.val_perplexity, ".2f"))
        table.add_row("tokens/s", _known(self.tokens_per_s, ",.0f"))
        table.add_row("host bytes per parameter", _known(self.host_bytes_per_parameter, ".2f"))
        rss = None if self.peak_host_rss is None else self.peak_host_rss / 2**30
        table.add_row("peak host RSS", _known(rss, ".2f", " GiB"))
        table.add_row("checkpoint", str(self.checkpoint or "-"))
        table.add_row("log", str(self.log or "-"))
        return table

    def print(self) -> None:
        """Print the table."""
        # Paths must stay whole when the output goes to a file, where rich assumes 80 columns.
        Console(soft_wrap=False, width=None if sys.stdout.isatty() else 160).print(self.table())


def print_sample(sample: str) -> None:
    """Print a sampled continuation."""
    console = Console()
    console.print(Text("sample", style="bold"))
    console.print(Text(sample), soft_wrap=True)


def print_sweep(runs: Sequence[tuple[str, TrainReport]]) -> None:
    """Print one row for each run of a sweep: its overrides and what it reached."""
    table = Table(title="megatrain train", title_justify="left")
    for heading in ("overrides", "validation loss", "perplexity", "tokens/s", "host bytes/parameter"):
        table.add_column(heading, justify="left" if heading == "overrides" else "right", overflow="fold")
    for overrides, report in runs:
        table.add_row(
            overrides,
            _change(report.val_loss, ".3f"),
            _known(report.val_perplexity[1], ".2f"),
            _known(report.tokens_per_s, ",.0f"),
            _known(report.host_bytes_per_parameter, ".2f"),
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _change(pair: tuple[float | None, float | None], form: str) -> str:
    return "-" if pair == (None, None) else f"{_known(pair[0], form)} -> {_known(pair[1], form)}"


def _known(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
