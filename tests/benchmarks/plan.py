"""Holds `megatrain plan host=auto gpu=auto` against the steps it predicts, on this machine's GPU.

    python tests/benchmarks/plan.py model=qwen2_5_7b,rows=16,microbatch=8 model=qwen2_5_0_5b,rows=16

Each argument is one process: the plan first, then a real fit of the same configuration with random weights and tokens.
Prints one JSON line for each, with what it was measured on, and a table of all; of the fit's steps the median counts.
Options of an argument: model, rows, seq (2048), microbatch, clip, precision (bf16_mixed).
"""

import json
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from typing import Any

import lightning as L
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from torch.utils.data import DataLoader

from lightning_megatrain import MegaTrainStrategy
from lightning_megatrain.cli.app import config_dir
from lightning_megatrain.cli.bench_result import circumstances
from lightning_megatrain.cli.planner import Planner
from lightning_megatrain.memory.host import give_back_freed_memory
from lightning_megatrain.recipes.random_weights import fill_weights, without_weights
from lightning_megatrain.update.optimizers import AdamUpdate

STEPS, WARMUP = 12, 3


def options(text: str) -> dict[str, str]:
    return {"seq": "2048", "precision": "bf16_mixed", **dict(part.split("=") for part in text.split(","))}


def rss(field: str = "VmRSS") -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) * 1024


class Measured(L.Callback):
    """When steps end, and what is held."""

    reads_weights = False

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.times.append(time.perf_counter())  # all gradients have landed, so the device is done, too
        if trainer.global_step == STEPS:
            strategy: Any = trainer.strategy
            updater = strategy._session.updater
            gradients = updater.gradients.nbytes + updater.gradients.slab_nbytes
            self.host = strategy._session.store.nbytes + updater.moments.nbytes + gradients
            self.rss = rss()


def measure(wanted: dict[str, str]) -> dict[str, Any]:
    overrides = [
        f"model={wanted['model']}",
        f"precision={wanted['precision']}",
        f"data.seq_len={wanted['seq']}",
        f"data.batch_size={wanted['rows']}",
        f"strategy.microbatch={wanted.get('microbatch', 'null')}",
        "strategy.recompute=always",
        "strategy.device_update=never",
        f"trainer.gradient_clip_val={wanted.get('clip', 'null')}",
        "optim.warmup_steps=0",
    ]
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        cfg = compose("plan", overrides=overrides)
    began = time.perf_counter()
    planner = Planner(cfg)
    plan = planner.result()
    planning = time.perf_counter() - began
    torch.cuda.empty_cache()
    give_back_freed_memory()
    before = rss()
    module = without_weights(lambda: instantiate(cfg.model))
    fill_weights(module, torch.device("cpu"), torch.float32)
    rows, seq, vocabulary = int(wanted["rows"]), int(wanted["seq"]), cfg.model.config.vocab_size
    batch = {"input_ids": torch.randint(0, vocabulary, (rows, seq))}
    clock = Measured()
    updating = []
    update = AdamUpdate.update

    def timed(self: Any, *args: Any) -> None:
        began = time.perf_counter()
        update(self, *args)
        updating.append(time.perf_counter() - began)

    AdamUpdate.update = timed  # type: ignore[method-assign]
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        max_steps=STEPS,
        precision=cfg.precision.lightning,
        gradient_clip_val=cfg.trainer.gradient_clip_val,
        strategy=MegaTrainStrategy(microbatch=cfg.strategy.microbatch, recompute="always", device_update="never"),
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.cuda.reset_peak_memory_stats()
    trainer.fit(module, DataLoader([batch] * STEPS, batch_size=None))
    steps = [after - before for before, after in pairwise(clock.times[WARMUP - 1 :])]
    peak = torch.cuda.max_memory_allocated()
    return {
        **wanted,
        "host": [plan["host_bytes"] / 2**30, clock.host / 2**30],
        "rss_growth_gib": (clock.rss - before) / 2**30,
        "device": [plan["device_bytes"] / 2**30, peak / 2**30],
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "step": [plan["step_s"], statistics.median(steps)],
        "steps_s": steps,
        "parts": {k: plan[f"{k}_s"] for k in ("fetch", "compute", "push", "update")},
        "measured_update_s": sum(updating) / STEPS,
        "measured_passes_s": planner.measured,
        "binds": plan["binds"],
        "planning_s": planning,
        "dram_gb_s": planner.machine.dram_bytes_per_s / 1e9,
        "link_gb_s": (planner.machine.link_bytes_per_s or 0) / 1e9,
    }


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--one":
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        where = circumstances("python tests/benchmarks/plan.py", device, arguments=[sys.argv[2]])
        print(json.dumps({**measure(options(sys.argv[2])), **where}))
        return
    rows = []
    for argument in sys.argv[1:]:
        done = subprocess.run([sys.executable, __file__, "--one", argument], capture_output=True, text=True)
        if done.returncode:
            print(argument, done.stderr[-3000:], flush=True)
            continue
        print(done.stdout.splitlines()[-1], flush=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    print("model rows microbatch clip | planned/measured: host device step | step s  device GiB  reserved GiB")
    for row in rows:
        ratios = "  ".join(f"{row[k][0] / row[k][1]:.3f}" for k in ("host", "device", "step"))
        settings = f"{row['model']:14} {row['rows']:>3} {row.get('microbatch', '-'):>3} {row.get('clip', '-'):>4}"
        print(f"{settings} | {ratios} | {row['step'][1]:.3f}  {row['device'][1]:.2f}  {row['reserved_gib']:.2f}")


if __name__ == "__main__":
    main()
