"""`megatrain bench host`: what this machine's memory and update kernel can do."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from lightning_megatrain.cli.app import UserError, run_app
from lightning_megatrain.cli.values import check_values

USAGE = "usage: megatrain bench host [output=json] [key=value ...]"

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
    """Run the command: what to measure, then Hydra overrides and flags.

    Returns:
        The exit status: 0, or 2 where what to measure is missing or unknown.
    """
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if not argv or argv[0] != "host":
        problem = f"cannot measure '{argv[0]}'" if argv else "what to measure is missing"
        print(f"megatrain bench: {problem}\n{USAGE}", file=sys.stderr)
        return 2
    run_app(bench_host, command="bench host", config_name="bench", argv=argv[1:])
    return 0


def bench_host(cfg: DictConfig) -> None:
    """Measure the host as `cfg.host` says and print the figures as `cfg.output` says.

    Raises:
        UserError: if `cfg.output` is neither "table" nor "json".
    """
    check_values(cfg)
    if cfg.output not in ("table", "json"):
        raise UserError(f"output={cfg.output!r} is not valid: it must be table or json.")
    figures = instantiate(cfg.host)
    if cfg.output == "json":
        print(json.dumps(dict(figures)))
    else:
        Console().print(_table(figures))


def _table(figures: Mapping[str, Any]) -> Table:
    table = Table(show_header=False, title="megatrain bench host", title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right")
    for key, (label, form) in ROWS.items():
        table.add_row(label, form.format(figures[key]))
    return table
