"""Turns a composed `plan.yaml` into numbers: bytes, seconds, and what to set."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any

import lightning as L
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from lightning_megatrain.cli.app import UserError
from lightning_megatrain.memory.device import SPENDABLE
from lightning_megatrain.memory.forecast import (
    Forecast,
    Machine,
    Schedule,
    Work,
    forecast,
    on_device,
    tokens_to_hide,
    waited_update,
    work_of,
)
from lightning_megatrain.memory.host import available_host_bytes, format_bytes, parse_bytes
from lightning_megatrain.memory.layout import Group
from lightning_megatrain.memory.plan import Plan, make_plan
from lightning_megatrain.memory.store import StoreFormat
from lightning_megatrain.precision import Bf16Precision, FullPrecision, MegaTrainPrecision, SplitMasterPrecision
from lightning_megatrain.recipes.flops import TokenFlops, token_flops
from lightning_megatrain.stream.bench import TRAINING_SHARE, Traffic, bench_device
from lightning_megatrain.stream.chunked import require_child, without_child
from lightning_megatrain.stream.discovery import find_units, make_groups
from lightning_megatrain.stream.gradients import GRADIENT_BUFFERS
from lightning_megatrain.stream.microbatch import rows_of_slices
from lightning_megatrain.stream.rehearsal import MetaRehearsal, StepMemory, StepSettings, step_seconds
from lightning_megatrain.stream.share import RESERVE, WORTH
from lightning_megatrain.update.bench import update_bandwidth
from lightning_megatrain.update.gradients import SLABS, SUMS_WIDE

FORMATS = {"32-true": StoreFormat.FP32, "bf16-mixed": StoreFormat.SPLIT, "bf16-true": StoreFormat.BF16}

SYSTEM_BYTES = 4 * 2**30
"""Host memory left to the system and to Python, where the config says what is installed and not what is free."""

KERNEL_BYTES = 96 * 2**20
"""Device memory that libraries keep for their kernels (matrix products, attention), which no tensor shows."""

SUSTAINED = 0.9
"""Part of the update's rate on a gigabyte that is left on a whole model: 81 to 102 GB/s of 97 to 131 beside an H200."""


class Planner:
    """One configuration, its model on the meta device.

    Rows are taken for whole sequences: of rows that are packed, whose lengths only the data know, attention and model
    FLOP/s are too many.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        if "prefetch" not in cfg.strategy:
            raise UserError("plan is for the megatrain strategy; leave strategy=... at megatrain.")
        self.strategy: dict[str, Any] = OmegaConf.to_object(cfg.strategy)  # type: ignore[assignment]
        instantiate(cfg.strategy)  # which refuses what is out of range
        if cfg.precision.lightning not in FORMATS:
            raise UserError(f"precision {cfg.precision.lightning!r} is not planned; set precision=bf16_mixed.")
        self._rehearsed = module = self._module()  # cut short by the rehearsal, after it was counted here
        units = find_units(module, self.strategy["units"])
        self.units = len(units)
        self._has_slices = without_child(units) is None
        if self.strategy["sequence_chunks"]:
            require_child(units)
        self.groups: list[Group] = make_groups(module, units)
        self.flops: TokenFlops = token_flops(module.model, cfg.data.seq_len)
        self.batches: int = cfg.trainer.accumulate_grad_batches
        self.rows: int = cfg.data.batch_size
        self.tokens: int = self.rows * cfg.data.seq_len * self.batches
        self.format = FORMATS[cfg.precision.lightning]
        self._has_device = self._device_memory() > 0
        self._rehearsed_steps: dict[StepSettings, StepMemory | None] = {}

    def _module(self) -> L.LightningModule:
        """The model, without memory."""
        with torch.device("meta"):
            optim = OmegaConf.to_container(self.cfg.optim, resolve=True)
            return instantiate(self.cfg.model, **optim)  # type: ignore[arg-type]

    def schedule(self) -> tuple[Schedule, str]:
        """The schedule that will run, and why."""
        asked, why = self.strategy["update"], self._needs_all_gradients()
        if asked == "in_backward" and why:
            raise UserError(
                f"strategy.update=in_backward uses each gradient as it arrives, but {why}; set strategy.update=auto."
            )
        if asked != "auto":
            return asked, "as asked"
        if not why:
            return "in_backward", "nothing needs all gradients at once"
        if not self._has_device:
            return "blocking", f"{why}, and the CPU has nothing to hide an update behind"
        return "next_forward", why

    def _needs_all_gradients(self) -> str | None:
        """Why the update cannot run in the backward, if it cannot."""
        if self.cfg.trainer.gradient_clip_val:
            return "gradients are clipped"
        return "gradients are accumulated over batches" if self.batches > 1 else None

    @cached_property
    def machine(self) -> Machine:
        """The machine that the config names; what it leaves open is read from this one, or measured."""
        host, gpu = self.cfg.host, self.cfg.gpu
        dram = self._update_bandwidth() if host.dram_gb_per_s is None else host.dram_gb_per_s * 1e9
        peak = gpu.fp32_tflops if self.format is StoreFormat.FP32 else gpu.bf16_tflops
        if peak is None:
            rate, link = self._this_device()
        else:
            rate = peak * 1e12 * gpu.achievable
            link = None if gpu.link_gb_per_s is None else gpu.link_gb_per_s * 1e9
        if link is not None and host.pcie_gb_per_s is not None:
            link = min(link, host.pcie_gb_per_s * 1e9)
        device = None if gpu.memory_gb_per_s is None else gpu.memory_gb_per_s * 1e9
        return Machine(self.host_memory, dram, link, rate, device)

    @cached_property
    def host_memory(self) -> int:
        """Host bytes that may be used: what the strategy is set to, but no more than a host that is named leaves."""
        limit, installed = self.cfg.strategy.host_memory, self.cfg.host.memory
        if installed is None:
            return available_host_bytes() if limit == "auto" else parse_bytes(limit)
        left = parse_bytes(installed) - SYSTEM_BYTES
        return left if limit == "auto" else min(parse_bytes(limit), left)

    @staticmethod
    def _update_bandwidth() -> float:
        """Of this host, beside the copies that it makes while it trains."""
        traffic = Traffic(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        return SUSTAINED * update_bandwidth(beside=traffic)

    def _this_device(self) -> tuple[float, float | None]:
        """FLOPs a second in training, and link rate of the device that is here."""
        dtype = torch.float32 if self.format is StoreFormat.FP32 else torch.bfloat16
        if not torch.cuda.is_available():
            measured = bench_device(torch.device("cpu"), dtype)
            return measured.flops_per_s * TRAINING_SHARE, None
        measured = bench_device(torch.device("cuda", 0), dtype)
        return measured.flops_per_s * TRAINING_SHARE, measured.link_bytes_per_s

    @cached_property
    def measured(self) -> tuple[float, float] | None:
        """As :attr:`timed`, less what kept graphs save."""
        if self.timed is None or self.keeps_graphs:
            return self.timed
        forward, backward = self.timed
        # What a kept graph saves is a forward, which is a third of such a backward, or less where the host was slow.
        recompute = min(forward, backward / 3) * self.flops.blocks / self.flops.model
        return forward, backward - self.kept_graphs[0] / self.units * recompute

    @cached_property
    def timed(self) -> tuple[float, float] | None:
        """Seconds of a batch's forward and backward on the GPU that is here, if it is the one to plan for.

        With the graphs of all units kept, or of none.
        """
        if self.cfg.gpu.memory is not None or not torch.cuda.is_available():
            return None
        module, precision = self._module(), _PRECISIONS[self.format]()
        try:
            seconds = step_seconds(
                module,
                self.strategy["units"],
                self._settings(self.schedule()[0], self.microbatch),
                lambda where: self._loss(module, where),
                torch.device("cuda", 0),
                compute_context=precision.unit_context,
                step_context=precision.train_step_context,
            )
        except RuntimeError:  # no room, here or on the host, or an operation that this device has no kernel for
            return None
        return seconds.forward, seconds.backward

    def _settings(
        self, schedule: Schedule, microbatch: int | None, *, keeps_graphs: bool | None = None
    ) -> StepSettings:
        return StepSettings(
            store_format=self.format,
            prefetch=self.strategy["prefetch"],
            microbatch=microbatch,
            keeps_graphs=self.keeps_graphs if keeps_graphs is None else keeps_graphs,
            residents_early=schedule == "in_backward",
            norms=schedule != "in_backward" and self.format is not StoreFormat.FP32,
            activations=self.strategy["activations"],
            sequence_chunks=self.strategy["sequence_chunks"],
            device_limit=self._device_limit(),
            host_limit=max(0, self.host_memory - self._as_set(schedule).host_bytes),
        )

    def _loss(self, module: L.LightningModule, device: torch.device) -> Tensor:
        """Of one batch of the planned size, on the device."""
        shape = self.rows, self.cfg.data.seq_len
        vocabulary = module.model.get_input_embeddings().num_embeddings
        return module.loss({"input_ids": torch.randint(0, vocabulary, shape, device=device)})

    @cached_property
    def device_update(self) -> tuple[float, int]:
        """Part of the parameters that are updated on the device, and the device bytes that it takes.

        As many as a step would wait for on the host, and as there is room for beside :attr:`peak`.
        """
        may = self.strategy["device_update"] == "auto" and not self.strategy["save_async"]
        if not may or self.peak is None or self.batches > 1 or self.format is not StoreFormat.SPLIT:
            return 0.0, 0
        schedule = self.schedule()[0]
        wanted = waited_update(self._work(kept=0), self.machine, schedule, self.timed)
        trainable = sum(g.layout.trainable_numel for g in self.groups)
        each = 6 + self.moment_bytes
        room = max(0, int(self._device_limit() * SPENDABLE) - self.peak)
        part = min(wanted * RESERVE if wanted > WORTH else 0.0, room / max(1, trainable * each), 1.0)
        return part, int(part * trainable * each)

    @property
    def moment_bytes(self) -> int:
        """Bytes of Adam's moments per parameter."""
        return 8 if self.strategy["moments_dtype"] == "float32" else 4

    def _work(self, *, kept: int) -> Work:
        """What a step asks for, all of it the host's, with the graphs of ``kept`` units kept."""
        work = work_of(
            self.groups,
            self.format,
            tokens=self.tokens,
            batches=self.batches,
            flops_per_token=self.flops.model,
            # What is run in slices of the sequence is computed once more in the backward.
            block_flops_per_token=self.flops.blocks * (1 - kept / self.units)
            + (self.flops.feed_forward if self.strategy["sequence_chunks"] else 0.0),
            moment_bytes=self.moment_bytes,
        )
        saved = self.saved_on_host if self.keeps_graphs else int(self.saved_on_host * (1 - kept / self.units))
        return dataclasses.replace(work, saved_bytes=saved)

    @property
    def keeps_graphs(self) -> bool:
        """Whether the strategy is set to keep those of all units."""
        return self.strategy["recompute"] == "never"

    @property
    def _peak_of_all(self) -> int | None:
        """Device bytes with the graphs of all units kept."""
        return self.device_peak(self.schedule()[0], self.microbatch, keeps_graphs=True)

    @cached_property
    def kept_graphs(self) -> tuple[int, int]:
        """Units whose graph is kept, and the device bytes that it takes beyond :attr:`peak`."""
        if self.keeps_graphs:
            return self.units, 0
        of_all = None if self.strategy["recompute"] == "always" else self._peak_of_all
        if of_all is None or self.peak is None:
            return 0, 0
        each = max(1, -(-(of_all - self.peak) // self.units))
        spendable = int(self._device_limit() * SPENDABLE) - self.peak - self.device_update[1]
        count = min(self.units, max(0, spendable // each))
        return count, count * each

    @cached_property
    def _rehearsal(self) -> MetaRehearsal:
        return MetaRehearsal(self._rehearsed, self.strategy["units"])

    def _step_memory(self, settings: StepSettings) -> StepMemory | None:
        """What a step takes; None where that cannot be told, or no device is planned."""
        if not self._has_device:
            return None
        if settings not in self._rehearsed_steps:
            try:
                found = self._rehearsal.memory(settings, lambda where: self._loss(self._rehearsed, where))
            except (RuntimeError, NotImplementedError):  # an operation without a form on the meta device
                found = None
            self._rehearsed_steps[settings] = found
        return self._rehearsed_steps[settings]

    def device_peak(
        self, schedule: Schedule, microbatch: int | None, *, keeps_graphs: bool | None = None
    ) -> int | None:
        """Most device bytes in a step; None where they cannot be told, or no device is planned."""
        found = self._step_memory(self._settings(schedule, microbatch, keeps_graphs=keeps_graphs))
        return None if found is None else self._whole_peak(found)

    def _whole_peak(self, step: StepMemory) -> int:
        """With what the rehearsal does not see."""
        return step.peak + self._packed_mask_bytes() + KERNEL_BYTES

    @cached_property
    def saved_on_host(self) -> int:
        """Host bytes of units' inputs that wait there for their backward."""
        found = self._step_memory(self._settings(self.schedule()[0], self.microbatch))
        return 0 if found is None else found.saved_on_host

    def _packed_mask_bytes(self) -> int:
        """Of the mask that keeps packed sequences apart, as booleans and as what is added to the scores."""
        if not self.cfg.data.get("packing", False):
            return 0
        return self.rows * self.cfg.data.seq_len**2 * (1 + self.format.wire_dtype.itemsize)

    @cached_property
    def microbatch(self) -> int | None:
        """As set; else the largest with which the step fits the device, None for the whole batch."""
        return self._fitted[0]

    @cached_property
    def peak(self) -> int | None:
        """Device bytes with :attr:`microbatch`."""
        return self._fitted[1]

    @cached_property
    def _fitted(self) -> tuple[int | None, int | None]:
        schedule, wanted = self.schedule()[0], self.strategy["microbatch"]
        first = rows_of_slices(self.rows, self.cfg.data.seq_len) if wanted == "auto" else wanted
        asked = self.device_peak(schedule, first)
        memory = self._device_limit()
        if asked is None or asked <= memory or isinstance(wanted, int):
            return first, asked
        rows = first or self.rows
        while rows > 1:
            rows = -(-rows // 2)
            peak = self.device_peak(schedule, rows)
            if peak is not None and peak <= memory:
                return rows, peak
        return first, asked

    def _device_limit(self) -> int:
        """Of the device's memory, what the strategy is set to use."""
        total, wanted = self._device_memory(), self.strategy["device_memory"]
        return total if wanted == "auto" else min(total, parse_bytes(wanted, total=total or None))

    def _device_memory(self) -> int:
        if self.cfg.gpu.memory is not None:
            return parse_bytes(self.cfg.gpu.memory)
        return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0

    def _as_set(self, schedule: Schedule) -> Plan:
        """The strategy's own plan, with its settings and this schedule."""
        return self.bytes_with(schedule, self.format, self.strategy["moments_dtype"])

    def bytes_with(self, schedule: str, store_format: StoreFormat, moments_dtype: str) -> Plan:
        """The strategy's own plan with other settings."""
        wanted = self.strategy["accumulate_dtype"]
        summed = self.batches > 1 and store_format is not StoreFormat.FP32 and schedule != "in_backward"
        able = SUMS_WIDE or self.cfg.host.memory is not None  # another machine's torch is not known
        if summed and wanted == "float32" and not able:
            raise UserError(
                f"strategy.accumulate_dtype=float32 needs Tensor.grad_dtype, which torch {torch.__version__} does not "
                "have; set strategy.accumulate_dtype=bfloat16, or use a newer torch."
            )
        if summed and able and wanted != "bfloat16":
            wide = self._bytes_with(schedule, store_format, moments_dtype, gradient_bytes=4)
            if wanted == "float32" or wide.host_bytes <= self.host_memory:
                return wide
        return self._bytes_with(schedule, store_format, moments_dtype, gradient_bytes=None)

    def _bytes_with(
        self, schedule: str, store_format: StoreFormat, moments_dtype: str, *, gradient_bytes: int | None
    ) -> Plan:
        return make_plan(
            self.groups,
            store_format,
            training=True,
            moment_bytes=2 * (4 if moments_dtype == "float32" else 2),
            gradients_coexist=schedule != "in_backward",
            gradient_bytes=gradient_bytes,
            slots=min(self.strategy["prefetch"] + 1, self.units),
            gradient_buffers=GRADIENT_BUFFERS,
            slabs=SLABS,
            accumulates=self.batches > 1,
        )

    def remedy(self, schedule: Schedule) -> str:
        """The smallest change that would make it fit."""
        moments, as_set = self.strategy["moments_dtype"], self._as_set(schedule).host_bytes
        if self.saved_on_host and as_set <= self.host_memory:
            stay = dataclasses.replace(self._settings(schedule, self.microbatch), activations="device")
            found = self._step_memory(stay)
            if found is not None and self._whole_peak(found) <= self._device_limit():
                return "it would fit with strategy.activations=device"
        options: list[tuple[str, str, StoreFormat, str]] = []
        if schedule != "in_backward":
            needed = "no clipping and no accumulation, so that update=in_backward is possible"
            text = needed if self._needs_all_gradients() else "strategy.update=auto"
            options.append((text, "in_backward", self.format, moments))
        split = StoreFormat.SPLIT
        if self.format is StoreFormat.FP32:
            options.append(("precision=bf16_mixed", schedule, split, moments))
        options += [
            ("precision=bf16_mixed strategy.moments_dtype=bfloat16", schedule, split, "bfloat16"),
            ("precision=bf16_true", schedule, StoreFormat.BF16, "float32"),
            ("precision=bf16_true strategy.moments_dtype=bfloat16", schedule, StoreFormat.BF16, "bfloat16"),
        ]
        for text, when, store_format, moments_dtype in options:
            # Inputs of units have the dtype of what multiplies them.
            saved = self.saved_on_host * store_format.wire_dtype.itemsize // self.format.wire_dtype.itemsize
            if self.bytes_with(when, store_format, moments_dtype).host_bytes + saved <= self.host_memory:
                return f"it would fit with {text}"
        return f"no setting fits; {format_bytes(as_set + self.saved_on_host + SYSTEM_BYTES)} of host memory would"

    def _remedies(self, schedule: Schedule, fits_host: bool, fits_device: bool) -> str | None:
        """What to change, for the host and for the device."""
        found = [] if fits_host else [self.remedy(schedule)]
        if not fits_device:
            if self.strategy["microbatch"] not in (self.microbatch, "auto"):
                found.append(f"the device would hold it with strategy.microbatch={self.microbatch}")
            elif settings := self._smaller_on_device(schedule):
                found.append(f"the device would hold it with {settings}")
            else:
                found.append(
                    f"the device is too small for its units at data.batch_size={self.rows} and "
                    f"data.seq_len={self.cfg.data.seq_len}; set a smaller one of these"
                )
        return "; ".join(found) or None

    def _smaller_on_device(self, schedule: Schedule) -> str | None:
        """Settings with which a step of the same batch fits the device, the fewest that do."""
        now = self._settings(schedule, self.microbatch)
        host = self._as_set(schedule).host_bytes
        chunks = max(8, self.strategy["sequence_chunks"] or 0)
        options: list[dict[str, Any]] = [{"activations": "host"}]
        if self._has_slices:
            options += [
                {"sequence_chunks": chunks},
                {"activations": "host", "sequence_chunks": chunks},
                {"activations": "host", "sequence_chunks": 4 * chunks},
            ]
        for changes in options:
            found = self._step_memory(dataclasses.replace(now, **changes))
            if found is None or host + found.saved_on_host > self.host_memory:
                continue
            if self._whole_peak(found) <= self._device_limit():
                return " ".join(f"strategy.{name}={value}" for name, value in changes.items())
        return None

    def _least_recompute(self) -> str:
        """Whether the device has room for the graphs of all units."""
        if self.peak is None:
            return self.strategy["recompute"]
        kept = self._peak_of_all
        if kept is not None and kept <= self._device_limit() * SPENDABLE:
            return "never"
        return "auto" if self.kept_graphs[0] else "always"

    def _fastest(self, work: Work) -> Schedule:
        """Of the schedules that may run and whose gradients fit the host."""
        legal: list[Schedule] = ["next_forward", "blocking"]  # the first of equals counts
        if self._needs_all_gradients() is None:
            legal.insert(0, "in_backward")
        fitting = [s for s in legal if self._as_set(s).host_bytes + self.saved_on_host <= self.host_memory]
        return min(fitting or legal, key=lambda s: forecast(work, self.machine, s, self.measured).step)

    def result(self) -> dict[str, Any]:
        """Everything that is printed."""
        schedule, why = self.schedule()
        planned = self._as_set(schedule)
        asked_for = self._work(kept=self.kept_graphs[0])
        work = on_device(asked_for, self.device_update[0])
        predicted = forecast(work, self.machine, schedule, self.measured)
        host = {**planned.host, "activations": self.saved_on_host}
        host_bytes = sum(host.values())
        fits_host = host_bytes <= self.host_memory
        device = planned.device
        asked = self.strategy["microbatch"]
        if self.peak is not None:
            device = {
                **device,
                "activations and kernels": max(0, self.peak - planned.device_bytes),
                "kept graphs": self.kept_graphs[1],
                "updates on the device": self.device_update[1],
            }
        device_bytes = sum(device.values())
        device_memory = self._device_limit()
        fits_device = not device_memory or (device_bytes <= device_memory and asked in (self.microbatch, "auto"))
        return {
            "parameters": planned.parameters,
            "parameters_per_token": self.flops.parameters,
            "fits": fits_host and fits_device,
            "remedy": self._remedies(schedule, fits_host, fits_device),
            "update": schedule,
            "update_because": why,
            "host_bytes": host_bytes,
            "host_available_bytes": self.host_memory,
            "host_bytes_by_item": host,
            "host_bytes_per_parameter": planned.host_bytes_per_parameter,
            "device_bytes": device_bytes,
            "device_available_bytes": device_memory,
            "device_bytes_by_item": device,
            "activations_counted": self.peak is not None,
            "kept_graphs": self.kept_graphs[0],
            "updated_on_device": self.device_update[0],
            "best": {
                "microbatch": self.microbatch,
                "recompute": self._least_recompute(),
                "update": self._fastest(work),
            },
            "tokens_per_step": self.tokens,
            **{f"{k}_s" if k != "binds" else k: v for k, v in dataclasses.asdict(predicted).items()},
            "tokens_per_s": self.tokens / predicted.step,
            "model_tflops": work.model_flops / predicted.step / 1e12,
            "tokens_to_hide": tokens_to_hide(asked_for, self.machine, schedule),
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


_PRECISIONS: dict[StoreFormat, Callable[[], MegaTrainPrecision]] = {
    StoreFormat.FP32: FullPrecision,
    StoreFormat.SPLIT: lambda: SplitMasterPrecision("cuda"),
    StoreFormat.BF16: Bf16Precision,
}
