"""`megatrain plan`: what a training needs and how fast it would go, before anything is allocated."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from lightning_megatrain.cli.app import UserError, run_app
from lightning_megatrain.cli.values import check_values
from lightning_megatrain.memory.forecast import Forecast, Machine, Schedule, Work, forecast, tokens_to_hide, work_of
from lightning_megatrain.memory.host import available_host_bytes, format_bytes, parse_bytes
from lightning_megatrain.memory.layout import Group
from lightning_megatrain.memory.plan import Plan, make_plan
from lightning_megatrain.memory.store import StoreFormat
from lightning_megatrain.recipes.flops import TokenFlops, token_flops
from lightning_megatrain.stream.bench import TRAINING_SHARE, bench_device
from lightning_megatrain.stream.discovery import find_units, make_groups
from lightning_megatrain.stream.gradients import GRADIENT_BUFFERS
from lightning_megatrain.update.bench import bandwidth
from lightning_megatrain.update.gradients import SLABS

USAGE = """\
usage: megatrain plan [model=NAME] [host=NAME] [gpu=NAME] [output=json] [key=value ...]

Nothing is allocated. Takes what `megatrain train` takes; host=auto and gpu=auto are this machine.

examples:
  megatrain plan model=qwen2_5_14b host=workstation_256gb gpu=h200 precision=bf16_mixed data.seq_len=2048
  megatrain plan model=dense_120b host=server_1_5tb gpu=h200 precision=bf16_mixed output=json
  megatrain plan -m model=qwen2_5_7b,qwen2_5_14b host=workstation_128gb,workstation_256gb precision=bf16_mixed"""

FORMATS = {"32-true": StoreFormat.FP32, "bf16-mixed": StoreFormat.SPLIT, "bf16-true": StoreFormat.BF16}

SYSTEM_BYTES = 4 * 2**30
"""Host memory left to the system and to Python, where the config says what is installed and not what is free."""

_rows: list[dict[str, Any]] = []


def main(argv: Sequence[str]) -> int:
    """Run the command with Hydra overrides and flags; returns the exit status."""
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    _rows.clear()
    run_app(plan, command="plan", config_name="plan", argv=argv)
    if len(_rows) > 1:
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
    result = _Planner(cfg).result()
    if HydraConfig.get().mode is RunMode.MULTIRUN and cfg.output == "table":
        _rows.append({"overrides": ",".join(HydraConfig.get().overrides.task), **result})
    elif cfg.output == "json":
        print(json.dumps(result))
    else:
        _print(result)
    return result


class _Planner:
    """One configuration, its model on the meta device."""

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        if "prefetch" not in cfg.strategy:
            raise UserError("plan is for the megatrain strategy; leave strategy=... at megatrain.")
        self.strategy: dict[str, Any] = OmegaConf.to_object(cfg.strategy)  # type: ignore[assignment]
        if cfg.precision.lightning not in FORMATS:
            raise UserError(f"precision {cfg.precision.lightning!r} is not planned; set precision=bf16_mixed.")
        with torch.device("meta"):
            optim = OmegaConf.to_container(cfg.optim, resolve=True)
            module = instantiate(cfg.model, **optim)  # type: ignore[arg-type]
        units = find_units(module, self.strategy["units"])
        self.units = len(units)
        self.groups: list[Group] = make_groups(module, units)
        self.flops: TokenFlops = token_flops(module.model, cfg.data.seq_len)
        self.batches: int = cfg.trainer.accumulate_grad_batches
        self.tokens: int = cfg.data.batch_size * cfg.data.seq_len * self.batches
        self.format = FORMATS[cfg.precision.lightning]
        self.machine = _machine(cfg, self.format)

    def schedule(self) -> tuple[Schedule, str]:
        """The schedule that will run, and why."""
        if self.strategy["update"] != "auto":
            return self.strategy["update"], "as asked"
        if self.cfg.trainer.gradient_clip_val:
            return "next_forward", "gradients are clipped"
        if self.batches > 1:
            return "next_forward", "gradients are accumulated over batches"
        return "in_backward", "nothing needs all gradients at once"

    def bytes_with(self, schedule: str, store_format: StoreFormat, moments_dtype: str) -> Plan:
        """The strategy's own plan."""
        sums_fp32 = self.batches > 1 and store_format is not StoreFormat.FP32 and schedule != "in_backward"
        return make_plan(
            self.groups,
            store_format,
            training=True,
            moment_bytes=2 * (4 if moments_dtype == "float32" else 2),
            gradients_coexist=schedule != "in_backward",
            gradient_bytes=4 if sums_fp32 and self.strategy["accumulate_dtype"] != "bfloat16" else None,
            slots=min(self.strategy["prefetch"] + 1, self.units),
            gradient_buffers=GRADIENT_BUFFERS,
            slabs=SLABS,
        )

    def remedy(self, schedule: str) -> str:
        """The smallest change that would make it fit."""
        moments = self.strategy["moments_dtype"]
        options: list[tuple[str, str, StoreFormat, str]] = []
        if schedule != "in_backward":
            options.append(("no clipping and no accumulation, so that update=in_backward is possible", "in_backward",
                            self.format, moments))  # fmt: skip
        split = StoreFormat.SPLIT
        if self.format is StoreFormat.FP32:
            options.append(("precision=bf16_mixed", schedule, split, moments))
        options += [
            ("precision=bf16_mixed strategy.moments_dtype=bfloat16", schedule, split, "bfloat16"),
            ("precision=bf16_true", schedule, StoreFormat.BF16, "float32"),
            ("precision=bf16_true strategy.moments_dtype=bfloat16", schedule, StoreFormat.BF16, "bfloat16"),
        ]
        for text, when, store_format, moments_dtype in options:
            if self.bytes_with(when, store_format, moments_dtype).host_bytes <= self.machine.host_bytes:
                return f"it would fit with {text}"
        needed = self.bytes_with(schedule, self.format, moments).host_bytes
        return f"no setting fits; {format_bytes(needed + SYSTEM_BYTES)} of host memory would"

    def result(self) -> dict[str, Any]:
        """Everything that is printed."""
        schedule, why = self.schedule()
        planned = self.bytes_with(schedule, self.format, self.strategy["moments_dtype"])
        moment_bytes = 8 if self.strategy["moments_dtype"] == "float32" else 4
        work = work_of(
            self.groups,
            self.format,
            tokens=self.tokens,
            batches=self.batches,
            flops_per_token=self.flops.model,
            block_flops_per_token=self.flops.blocks,
            moment_bytes=moment_bytes,
        )
        predicted = forecast(work, self.machine, schedule)
        fits_host = planned.host_bytes <= self.machine.host_bytes
        fits_device = planned.device_bytes <= self.machine.device_bytes or self.machine.link_bytes_per_s is None
        return {
            "parameters": planned.parameters,
            "parameters_per_token": self.flops.parameters,
            "fits": fits_host and fits_device,
            "remedy": None if fits_host else self.remedy(schedule),
            "update": schedule,
            "update_because": why,
            "host_bytes": planned.host_bytes,
            "host_available_bytes": self.machine.host_bytes,
            "host_bytes_by_item": planned.host,
            "host_bytes_per_parameter": planned.host_bytes_per_parameter,
            "device_bytes": planned.device_bytes,
            "device_available_bytes": self.machine.device_bytes,
            "device_bytes_by_item": planned.device,
            "tokens_per_step": self.tokens,
            **{f"{k}_s" if k != "binds" else k: v for k, v in dataclasses.asdict(predicted).items()},
            "tokens_per_s": self.tokens / predicted.step,
            "model_tflops": work.model_flops / predicted.step / 1e12,
            "tokens_to_hide": tokens_to_hide(work, self.machine, schedule),
            **self._money(work, predicted, planned),
        }

    def _money(self, work: Work, predicted: Forecast, planned: Plan) -> dict[str, Any]:
        """Hours and money for a billion tokens, here and on the rented node."""
        cfg, node = self.cfg, self.cfg.node
        hours = 1e9 / self.tokens * predicted.step / 3600
        prices = [cfg.host.price_per_hour, cfg.gpu.price_per_hour]
        node_rate = node.gpus * node.bf16_tflops * 1e12 * node.mfu
        node_hours = 1e9 * self.flops.model / node_rate / 3600
        node_bytes = node.gpus * parse_bytes(node.memory)
        return {
            "hours_per_billion_tokens": hours,
            "price_per_billion_tokens": None if None in prices else hours * sum(prices),
            "rented": {
                "name": node.name,
                "fits": planned.parameters * node.bytes_per_parameter <= node_bytes,
                "hours_per_billion_tokens": node_hours,
                "price_per_billion_tokens": node_hours * node.price_per_hour,
            },
        }


def _machine(cfg: DictConfig, store_format: StoreFormat) -> Machine:
    """The machine that `cfg` names; what it leaves open is read from this one, or measured."""
    host, gpu = cfg.host, cfg.gpu
    if cfg.strategy.host_memory != "auto":
        memory = parse_bytes(cfg.strategy.host_memory)
    elif host.memory is not None:
        memory = parse_bytes(host.memory) - SYSTEM_BYTES
    else:
        memory = available_host_bytes()
    dram = bandwidth() if host.dram_gb_per_s is None else host.dram_gb_per_s * 1e9
    dtype = torch.float32 if store_format is StoreFormat.FP32 else torch.bfloat16
    peak = gpu.fp32_tflops if store_format is StoreFormat.FP32 else gpu.bf16_tflops
    if peak is None:
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", 0) if cuda else torch.device("cpu")
        measured = bench_device(device, dtype)
        device_bytes = torch.cuda.get_device_properties(0).total_memory if cuda else 0
        rate, link = measured.flops_per_s * TRAINING_SHARE, measured.link_bytes_per_s
    else:
        device_bytes, rate = parse_bytes(gpu.memory), peak * 1e12 * gpu.achievable
        link = None if gpu.link_gb_per_s is None else gpu.link_gb_per_s * 1e9
    if link is not None and host.pcie_gb_per_s is not None:
        link = min(link, host.pcie_gb_per_s * 1e9)
    return Machine(memory, device_bytes, dram, link, rate)


def _print(result: dict[str, Any]) -> None:
    """One table for people."""
    table = Table(show_header=False, title="megatrain plan", title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right")
    fits = "yes" if result["fits"] else f"no: {result['remedy'] or 'the device is too small for its units'}"
    rented, here = result["rented"], result["price_per_billion_tokens"]
    rows = {
        "parameters": f"{result['parameters']:,}",
        "fits": fits,
        "update": f"{result['update']} ({result['update_because']})",
        "host memory": f"{format_bytes(result['host_bytes'])} of {format_bytes(result['host_available_bytes'])}",
        **{f"  {item}": format_bytes(size) for item, size in result["host_bytes_by_item"].items()},
        "  per parameter": f"{result['host_bytes_per_parameter']:.2f} bytes",
        "device memory, activations not counted": (
            f"{format_bytes(result['device_bytes'])} of {format_bytes(result['device_available_bytes'])}"
        ),
        **{f"  {item}": format_bytes(size) for item, size in result["device_bytes_by_item"].items()},
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
        table.add_column(heading, justify="left" if heading in ("overrides", "waits for") else "right")
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
