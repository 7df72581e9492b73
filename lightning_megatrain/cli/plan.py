"""`megatrain plan`: what a training needs and how fast it would go, before anything is allocated."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from lightning_megatrain.cli.app import UserError, run_app
from lightning_megatrain.cli.planner import Planner
from lightning_megatrain.cli.values import check_values, require_positive
from lightning_megatrain.memory.host import format_bytes

USAGE = """\
usage: megatrain plan [model=NAME] [host=NAME] [gpu=NAME] [output=json] [key=value ...]

Nothing is allocated. Takes what `megatrain train` takes; host=auto and gpu=auto are this machine.

examples:
  megatrain plan model=qwen2_5_14b host=workstation_256gb gpu=h200 precision=bf16_mixed data.seq_len=2048
  megatrain plan model=dense_120b host=server_1_5tb gpu=h200 precision=bf16_mixed output=json
  megatrain plan -m model=qwen2_5_7b,qwen2_5_14b host=workstation_128gb,workstation_256gb precision=bf16_mixed"""

_ABOVE_ZERO = (
    "data.batch_size",
    "data.seq_len",
    "trainer.accumulate_grad_batches",
    "host.dram_gb_per_s",
    "host.pcie_gb_per_s",
    "gpu.bf16_tflops",
    "gpu.fp32_tflops",
    "gpu.achievable",
    "gpu.link_gb_per_s",
    "node.gpus",
    "node.bf16_tflops",
    "node.mfu",
)
"""What seconds are divided by."""

_rows: list[dict[str, Any]] = []


def main(argv: Sequence[str]) -> int:
    """Run the command with Hydra overrides and flags; returns the exit status."""
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    _rows.clear()
    try:
        run_app(plan, command="plan", config_name="plan", argv=argv)
    finally:  # a sweep that fails says what it has found
        if _rows:
            Console(width=200).print(_summary(_rows))
    return 0


def plan(cfg: DictConfig) -> dict[str, Any]:
    """Plan what `cfg`, the composed `plan.yaml`, describes, and print it.

    Returns:
        The plan: bytes, seconds and counts as numbers, by name.

    Raises:
        UserError: if a value is not valid.
    """
    if cfg.output not in ("table", "json"):
        raise UserError(f"output={cfg.output!r} is not valid: it must be table or json.")
    check_values(cfg, targets={"optim": cfg.model["_target_"]})
    require_positive(cfg, *_ABOVE_ZERO)
    with _prepared(cfg):
        result = Planner(cfg).result()
    if HydraConfig.get().mode is RunMode.MULTIRUN and cfg.output == "table":
        _rows.append({"overrides": ",".join(HydraConfig.get().overrides.task), **result})
    elif cfg.output == "json":
        print(json.dumps(result))
    else:
        _print(result)
    return result


@contextmanager
def _prepared(cfg: DictConfig) -> Iterator[None]:
    """Inside, there is what `cfg.prepare` makes before a training: in a folder that goes again, if it names its own."""
    with ExitStack() as stack:
        if cfg.prepare is not None:
            if "path" in cfg.prepare:
                cfg.prepare.path = str(Path(stack.enter_context(TemporaryDirectory()), "prepared"))
            instantiate(cfg.prepare)
        yield


def _print(result: dict[str, Any]) -> None:
    """One table for people."""
    table = Table(show_header=False, title="megatrain plan", title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right")
    fits = "yes" if result["fits"] else f"no: {result['remedy']}"
    best = result["best"]
    rented, here = result["rented"], result["price_per_billion_tokens"]
    rows = {
        "parameters": f"{result['parameters']:,}",
        "fits": fits,
        "update": f"{result['update']} ({result['update_because']})",
        "host memory": f"{format_bytes(result['host_bytes'])} of {format_bytes(result['host_available_bytes'])}",
        **{f"  {item}": format_bytes(size) for item, size in result["host_bytes_by_item"].items()},
        "  per parameter": f"{result['host_bytes_per_parameter']:.2f} bytes",
        "device memory" + ("" if result["activations_counted"] else ", activations not counted"): (
            f"{format_bytes(result['device_bytes'])} of {format_bytes(result['device_available_bytes'])}"
        ),
        **{f"  {item}": format_bytes(size) for item, size in result["device_bytes_by_item"].items()},
        "best here": " ".join(f"strategy.{key}={value or 'null'}" for key, value in best.items()),
        "tokens per step": f"{result['tokens_per_step']:,}",
        "seconds per step": f"{result['step_s']:.3g}, of which most waits for {result['binds']}",
        **{f"  {what}": f"{result[what + '_s']:.3g}" for what in ("fetch", "compute", "push", "update")},
        "tokens/s": f"{result['tokens_per_s']:,.0f}",
        "model TFLOP/s": f"{result['model_tflops']:,.3g}",
        **{f"tokens per batch to hide the {what}": f"{count:,}" for what, count in result["tokens_to_hide"].items()},
        "hours per billion tokens": f"{result['hours_per_billion_tokens']:,.1f}"
        + ("" if here is None else f", {here:,.0f} at the prices set"),
        f"the same on {rented['name']}": (
            f"{rented['hours_per_billion_tokens']:,.1f} hours, "
            f"{rented['price_per_billion_tokens']:,.0f} at the price set" + ("" if rented["fits"] else "; does not fit")
        ),
    }
    for label, value in rows.items():
        table.add_row(label, value)
    Console().print(table)


def _summary(rows: Sequence[dict[str, Any]]) -> Table:
    """One row for each plan of a sweep."""
    table = Table(title="megatrain plan", title_justify="left")
    for heading in ("overrides", "fits", "host", "of", "device", "s/step", "waits for", "tokens/s", "TFLOP/s"):
        left = heading in ("overrides", "waits for")
        table.add_column(heading, justify="left" if left else "right", overflow="fold")
    for row in rows:
        table.add_row(
            row["overrides"],
            "yes" if row["fits"] else "no",
            format_bytes(row["host_bytes"]),
            format_bytes(row["host_available_bytes"]),
            format_bytes(row["device_bytes"]),
            f"{row['step_s']:.3g}",
            row["binds"],
            f"{row['tokens_per_s']:,.0f}",
            f"{row['model_tflops']:,.3g}",
        )
    return table
