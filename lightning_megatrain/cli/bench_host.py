"""`megatrain bench host`: what this machine's memory and update kernel can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.table import Table

from lightning_megatrain.cli.app import run_app
from lightning_megatrain.cli.bench_result import check_output, circumstances, finish
from lightning_megatrain.cli.values import check_values

USAGE = """\
usage: megatrain bench host [output=json] [to=FILE] [key=value ...]

  host.numel=N      parameters to update, about 34 bytes of memory each
  host.threads=N    of the update; auto by default
  host.repeats=N    of which the median counts

examples:
  megatrain bench host
  megatrain bench host host.threads=8 output=json to=host.json"""

ROWS = {
    "kernel_gparams_s": ("update kernel", "{:.3f} G params/s"),
    "torch_fused_gparams_s": ("torch fused AdamW", "{:.3f} G params/s"),
    "reference_gparams_s": ("torch reference", "{:.3f} G params/s"),
    "dram_gb_s": ("memory bandwidth", "{:.1f} GB/s"),
    "isa": ("instruction set", "{}"),
    "threads": ("threads", "{}"),
}
"""Label and form of each figure, by its key."""


def main(argv: Sequence[str]) -> int:
    """Run the measurement with Hydra overrides and flags; returns the exit status."""
    run_app(bench_host, command="bench host", config_name="bench_host", argv=argv)
    return 0


def bench_host(cfg: DictConfig) -> None:
    """Measure the host as `cfg`, the composed `bench_host.yaml`, says, and report the figures.

    Raises:
        UserError: if a value is not valid.
    """
    check_values(cfg)
    check_output(cfg)
    figures = instantiate(cfg.host)
    finish(cfg, {**figures, **circumstances("megatrain bench host", torch.device("cpu"))}, [_table(figures)])


def _table(figures: Mapping[str, Any]) -> Table:
    table = Table(show_header=False, title="megatrain bench host", title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right")
    for key, (label, form) in ROWS.items():
        table.add_row(label, form.format(figures[key]))
    return table
