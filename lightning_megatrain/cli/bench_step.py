"""`megatrain bench step`: training steps of a model with random weights, beside the same model in device memory."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from torch.utils.data import DataLoader

from lightning_megatrain.cli.app import UserError, run_app
from lightning_megatrain.cli.bench_measure import (
    Measured,
    RandomTokens,
    Shortage,
    StepClock,
    forget_host_peak,
    give_back,
    measure_ceiling,
)
from lightning_megatrain.cli.bench_result import check_output, circumstances, finish
from lightning_megatrain.cli.bench_table import step_tables, sweep_table
from lightning_megatrain.cli.need import require_host_memory
from lightning_megatrain.cli.values import check_optim, check_values
from lightning_megatrain.recipes.causal_lm import CausalLM
from lightning_megatrain.recipes.flops import token_flops
from lightning_megatrain.recipes.random_weights import fill_weights, without_weights
from lightning_megatrain.strategy import MegaTrainStrategy

USAGE = """\
usage: megatrain bench step [model=NAME] [rows=N] [seq_len=N] [ceiling=true] [output=json] [to=FILE] [key=value ...]

Trains a model with random weights on random tokens, through Trainer(strategy="megatrain"), and reports the median step.
Takes the groups model, precision, strategy and optim that `megatrain train` takes.

  rows=N            of a batch; a list such as [4,16] measures one after the other, with one set-up of the host's memory
  seq_len=N         tokens of a row
  clip=NORM         clip gradients to this norm
  steps=N warmup=N  steps that are measured, and steps before them, with each number of rows
  ceiling=true      also the same model wholly on the device: every block recomputed, compiled if strategy.compile is
                    set, no optimizer
  timeline=FOLDER   a picture and a trace of one more step of each size

examples:
  megatrain bench step
  megatrain bench step model=qwen2_5_7b rows=16 seq_len=2048 clip=1.0 strategy.microbatch=8 ceiling=true
  megatrain bench step model=qwen2_5_7b rows=[8,16,32] seq_len=2048 strategy.compile=true to=step.json
  megatrain bench step -m model=qwen2_5_0_5b rows=16 strategy.prefetch=1,2,4"""

_results: list[tuple[str, dict[str, Any]]] = []
"""Of this command's sweep so far: overrides, and what was measured."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What `bench_step.yaml` asks for, besides its groups.

    Raises:
        ValueError: if a number is out of range.
    """

    rows: int | list[int]
    seq_len: int
    clip: float | None
    steps: int
    warmup: int
    ceiling: bool
    timeline: str | None
    accelerator: Literal["auto", "cpu", "gpu"]
    seed: int

    def __post_init__(self) -> None:
        for name in ("seq_len", "steps", "warmup"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.clip is not None and self.clip < 0:
            raise ValueError(f"clip={self.clip:g} is no norm; set a positive number, or null not to clip.")
        if not self.sizes or not all(isinstance(size, int) and size >= 1 for size in self.sizes):
            raise ValueError(f"rows={self.rows} must be a number of rows, 1 or more, or a list of such numbers.")

    @classmethod
    def of(cls, cfg: DictConfig) -> Request:
        """What the composed config asks for."""
        values = _plain(cfg)
        return cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)})

    @property
    def sizes(self) -> list[int]:
        """Rows of the batches."""
        return [self.rows] if isinstance(self.rows, int) else self.rows

    @property
    def ceiling_warmup(self) -> int:
        """Steps of the ceiling that are not measured: it has nothing to adapt but what torch compiles."""
        return min(self.warmup, 3)

    @property
    def each(self) -> int:
        """Steps of each size; with a timeline, one of them is not measured."""
        return self.warmup + self.steps + (self.timeline is not None)


def main(argv: Sequence[str]) -> int:
    """Run the measurement with Hydra overrides and flags; returns the exit status."""
    _results.clear()
    try:
        run_app(bench_step, command="bench step", config_name="bench_step", argv=argv)
    finally:  # a sweep that fails says what it has measured
        if _results:
            Console(width=200).print(sweep_table(_results))
    return 0


def bench_step(cfg: DictConfig) -> dict[str, Any]:
    """Measure what `cfg`, the composed `bench_step.yaml`, describes, and report it.

    Returns:
        The result: bytes, seconds and counts as numbers, by name.

    Raises:
        UserError: if a value is not valid.
        RuntimeError: if the training does not fit.
    """
    check_values(cfg, targets={"": f"{__name__}.{Request.__name__}", "optim": cfg.model["_target_"]})
    check_optim(cfg)
    check_output(cfg)
    result = StepBench(cfg).result()
    finish(cfg, result, step_tables(result))
    if HydraConfig.get().mode is RunMode.MULTIRUN:
        _results.append((" ".join(HydraConfig.get().overrides.task), result))
    return result


class StepBench:
    """One configuration, measured when it is asked for its result."""

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self.request = request = Request.of(cfg)
        if cfg.model.get("pretrained") is not None:
            raise UserError("bench step trains random weights; leave model.pretrained at null, and choose a model=...")
        strategy = instantiate(cfg.strategy)
        if not isinstance(strategy, MegaTrainStrategy):
            raise UserError("bench step is for the megatrain strategy; leave strategy=... at megatrain.")
        self.strategy = strategy
        self.dtype = torch.float32 if cfg.precision.lightning == "32-true" else torch.bfloat16
        model = self._model()
        vocabulary = model.model.get_input_embeddings().num_embeddings
        self.data = RandomTokens(request.sizes, request.each, seq_len=request.seq_len, vocabulary=vocabulary)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.flops_per_token = token_flops(model.model, request.seq_len).model
        self.clock = StepClock(self.data, cfg.strategy.microbatch, request.warmup)
        self.trainer = L.Trainer(
            strategy=strategy,
            accelerator=request.accelerator,
            devices=1,
            precision=cfg.precision.lightning,
            max_steps=len(self.data),
            gradient_clip_val=request.clip,
            callbacks=[self.clock, *self._timeline()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        self.device = strategy.root_device

    def result(self) -> dict[str, Any]:
        """Measure the ceiling, if it is wanted, and then the strategy; one does not share memory with the other."""
        give_back(self.device)  # what an earlier run of a sweep has left
        require_host_memory(self._model(), self.cfg, clips=bool(self.request.clip), accumulates=False)
        ceilings: Sequence[Measured | Shortage | None] = [None for _ in self.request.sizes]
        if self.request.ceiling:
            microbatch = self.cfg.strategy.microbatch
            ceilings = measure_ceiling(
                self._model(),
                self.data,
                units=_plain(self.cfg.strategy)["units"],
                microbatch=microbatch if isinstance(microbatch, int) else None,
                compile=self.cfg.strategy.compile,
                device=self.device,
                dtype=self.dtype,
                steps=self.request.ceiling_warmup + self.request.steps,
            )
            give_back(self.device)
        self._train()
        plan = self.strategy.plan
        assert plan is not None
        return {
            "model": HydraConfig.get().runtime.choices["model"],
            "parameters": self.parameters,
            "precision": self.cfg.precision.lightning,
            "seq_len": self.request.seq_len,
            "clip": self.request.clip,
            "steps": self.request.steps,
            "warmup": self.request.warmup,
            "strategy": {k: v for k, v in _plain(self.cfg.strategy).items() if not k.startswith("_")},
            "schedule": self.clock.schedule,
            "host_bytes_per_parameter": plan.host_bytes_per_parameter,
            "host_bytes_by_item": plan.host,
            "device_bytes_by_item": plan.device,
            "sizes": [
                self._size(rows, ours, ceiling)
                for rows, ours, ceiling in zip(self.request.sizes, self.clock.measured, ceilings, strict=True)
            ],
            **circumstances("megatrain bench step", self.device),
        }

    def _model(self) -> CausalLM:
        """The model, its parameters without memory."""
        return without_weights(lambda: instantiate(self.cfg.model, **_plain(self.cfg.optim)))

    def _train(self) -> None:
        module = self._model()
        forget_host_peak()
        # A bf16 start halves what the host holds before the store takes over; a split master is fp32 all the same.
        fill_weights(module, torch.device("cpu"), self.dtype)
        with warnings.catch_warnings():
            for message in (
                ".*does not have many workers.*",  # tokens are drawn in no time
                ".*have no `val_dataloader`.*",
                ".*`isinstance.treespec, LeafSpec.` is deprecated.*",
            ):
                warnings.filterwarnings("ignore", message=message)
            self.trainer.fit(module, DataLoader(self.data, batch_size=None))

    def _timeline(self) -> list[L.Callback]:
        folder, each = self.request.timeline, self.request.each
        if folder is None:
            return []
        # Its drawing takes long to import.
        from lightning_megatrain.callbacks.gantt import require_matplotlib
        from lightning_megatrain.callbacks.timeline import Timeline

        try:
            require_matplotlib()
        except ImportError as error:
            raise UserError(
                f"timeline={folder} draws charts, which needs matplotlib; run pip install "
                "'lightning-megatrain[notebooks]', or leave timeline out."
            ) from error
        return [Timeline(steps=[(size + 1) * each - 1 for size in range(len(self.request.sizes))], folder=folder)]

    def _size(self, rows: int, ours: Measured, ceiling: Measured | Shortage | None) -> dict[str, Any]:
        """What is reported of one number of rows."""
        tokens = rows * self.request.seq_len
        figures = {
            "rows": rows,
            "tokens": tokens,
            **self._figures(ours, tokens, self.request.warmup),
            "peak_host_rss_bytes": ours.host_rss,
            "kept_graphs": ours.kept_graphs,
            "device_groups": ours.device_groups,
            "busy_s": dict(ours.spans.busy),
            "waits_s": dict(ours.spans.waits),
        }
        if isinstance(ceiling, Shortage):
            return {**figures, "ceiling": dataclasses.asdict(ceiling)}
        if ceiling is None:
            return figures
        yardstick = self._figures(ceiling, tokens, self.request.ceiling_warmup)
        return {**figures, "ceiling": yardstick, "of_ceiling": figures["tokens_per_s"] / yardstick["tokens_per_s"]}

    def _figures(self, measured: Measured, tokens: int, warmup: int) -> dict[str, Any]:
        step = measured.step_s(warmup, self.request.steps)
        return {
            "step_s": step,
            "tokens_per_s": tokens / step,
            "model_tflops": self.flops_per_token * tokens / step / 1e12,
            "peak_device_allocated_bytes": measured.allocated,
            "peak_device_reserved_bytes": measured.reserved,
            "steps_s": measured.seconds,
            "losses": measured.losses,
        }


def _plain(node: DictConfig) -> dict[str, Any]:
    """A config node as ordinary containers, its interpolations resolved."""
    container = OmegaConf.to_container(node, resolve=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}
