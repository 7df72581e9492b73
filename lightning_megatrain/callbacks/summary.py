"""What a run is about to hold and do, and what became of it."""

from __future__ import annotations

import sys

import lightning as L
from rich.console import Console
from rich.table import Table

from lightning_megatrain.callbacks.measure import peak_device_bytes, peak_host_rss
from lightning_megatrain.callbacks.throughput import Throughput
from lightning_megatrain.memory.host import format_bytes
from lightning_megatrain.memory.plan import Plan
from lightning_megatrain.strategy import MegaTrainStrategy
from lightning_megatrain.update.kernel import describe as describe_kernel


class Summary(L.Callback):
    """Prints a table when a fit begins, and one with what was measured beside what was planned when it ends.

    With another strategy than megatrain there is nothing to say. The rate is that of a :class:`Throughput` or
    :class:`Monitor` among the callbacks.

    Args:
        predicted_tokens_per_s: what ``megatrain plan`` says of this run; None leaves it out.
    """

    def __init__(self, predicted_tokens_per_s: float | None = None) -> None:
        self.predicted_tokens_per_s = predicted_tokens_per_s

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print what was planned."""
        strategy = trainer.strategy
        if isinstance(strategy, MegaTrainStrategy) and strategy.plan is not None:
            _print(self._start(strategy, strategy.plan))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print what was reached."""
        strategy = trainer.strategy
        if isinstance(strategy, MegaTrainStrategy) and strategy.plan is not None:
            rates = [c.mean_tokens_per_s for c in trainer.callbacks if isinstance(c, Throughput)]
            _print(self._end(strategy, strategy.plan, next(filter(None, rates), None)))

    def _start(self, strategy: MegaTrainStrategy, plan: Plan) -> Table:
        names = strategy.unit_names
        table = Table(title="megatrain: what is planned", title_justify="left", show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        table.add_row("parameters", f"{plan.parameters:,}, {strategy.precision_plugin.precision}")
        table.add_row("streamed", f"{len(names)} units, {names[0]} to {names[-1]}" if names else "nothing")
        table.add_row("computes on", str(strategy.root_device))
        table.add_row("host memory", _items(plan.host, plan.host_bytes))
        table.add_row("device memory", f"{_items(plan.device, plan.device_bytes)}, before activations")
        table.add_row("host bytes a parameter", f"{plan.host_bytes_per_parameter:.2f}")
        table.add_row("update", f"{strategy.update_schedule} ({strategy.update_reason})")
        table.add_row("optimizer", f"{describe_kernel()}, {strategy.update_threads}")
        if self.predicted_tokens_per_s is not None:
            table.add_row("predicted tokens/s", f"{self.predicted_tokens_per_s:,.0f}")
        return table

    def _end(self, strategy: MegaTrainStrategy, plan: Plan, tokens_per_s: float | None) -> Table:
        table = Table(title="megatrain: what became of it", title_justify="left")
        for heading in ("", "planned", "measured"):
            table.add_column(heading, justify="right" if heading else "left")
        if tokens_per_s is not None:
            predicted = self.predicted_tokens_per_s
            table.add_row("tokens/s", "-" if predicted is None else f"{predicted:,.0f}", f"{tokens_per_s:,.0f}")
        device = peak_device_bytes(strategy.root_device)
        if device is not None:
            before = f"{format_bytes(plan.device_bytes)} and activations"
            table.add_row("peak device memory", before, format_bytes(device))
        host = peak_host_rss()
        if host is not None:
            table.add_row("host memory; measured: the whole process", format_bytes(plan.host_bytes), format_bytes(host))
        if strategy.skipped_steps:
            table.add_row("steps left out", "0", f"{strategy.skipped_steps:,}")
        return table


def _items(sizes: dict[str, int], total: int) -> str:
    items = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size)
    return f"{format_bytes(total)} ({items})"


def _print(table: Table) -> None:
    Console(width=None if sys.stdout.isatty() else 120).print(table)
