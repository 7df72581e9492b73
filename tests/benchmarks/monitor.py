"""What `Monitor` costs: steps with it beside steps without it, in turn, in one fit.

    python tests/benchmarks/monitor.py model=qwen2_5_0_5b rows=16 [each=5] [turns=6]

Every `each` steps the monitor begins or ceases to listen; the first of them is left out. Random weights and tokens,
sequences of 2,048 (`seq`), bf16-mixed. A small model is the harder case: as many spans for less work. Prints a line for
people, and one of JSON with what it was measured on.
"""

import json
import statistics
import sys
import tempfile
import time
from typing import Any

import lightning as L
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_megatrain import MegaTrainStrategy
from lightning_megatrain.callbacks.monitor import Monitor
from lightning_megatrain.cli.app import config_dir
from lightning_megatrain.cli.bench_result import circumstances
from lightning_megatrain.recipes.random_weights import fill_weights, without_weights


class InTurn(L.Callback):
    """Runs a monitor in every second stretch of steps, and takes the time of all.

    Args:
        each: steps of a stretch.
    """

    reads_weights = False

    def __init__(self, each: int) -> None:
        self.monitor = Monitor(warmup_steps=1, every_n_steps=each)
        self.each = each
        self.seconds: dict[bool, list[float]] = {True: [], False: []}

    def on_train_start(self, *args: Any) -> None:
        self.monitor.on_train_start(*args)

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, index: int) -> None:
        self.on = index // self.each % 2 == 0
        if index % self.each == 0:
            (self.monitor._listen if self.on else self.monitor._look_away)()
            self.last = time.perf_counter()

    def on_before_backward(self, *args: Any) -> None:
        if self.on:
            self.monitor.on_before_backward(*args)

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        if self.on:
            self.monitor.on_train_batch_end(trainer, module, outputs, batch, index)
        now = time.perf_counter()
        if index % self.each and index >= 2 * self.each:  # the first two stretches warm up
            self.seconds[self.on].append(now - self.last)
        self.last = now

    def on_train_end(self, *args: Any) -> None:
        self.monitor.on_train_end(*args)


def main() -> None:
    given = {"rows": "16", "each": "5", "turns": "6", **dict(argument.split("=") for argument in sys.argv[1:])}
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        cfg = compose("train", overrides=[f"model={given['model']}", "precision=bf16_mixed"])
    module = without_weights(lambda: instantiate(cfg.model))
    fill_weights(module, torch.device("cpu"), torch.float32)
    rows, each = int(given["rows"]), int(given["each"])
    steps = each * 2 * (int(given["turns"]) + 1)
    batch = {"input_ids": torch.randint(0, cfg.model.config.vocab_size, (rows, int(given.get("seq", "2048"))))}
    clock = InTurn(each)
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="auto",
            devices=1,
            max_steps=steps,
            precision=cfg.precision.lightning,
            strategy=MegaTrainStrategy(),
            callbacks=[clock],
            logger=CSVLogger(folder),
            log_every_n_steps=1,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader([batch] * steps, batch_size=None))
    on, off = (statistics.median(clock.seconds[key]) for key in (True, False))
    spread = max(clock.seconds[False]) - min(clock.seconds[False])
    print(
        f"{given['model']}, {rows} rows: {on:.4f} s with the monitor, {off:.4f} s without "
        f"({100 * (on / off - 1):+.2f}%); "
        f"{len(clock.seconds[True])} and {len(clock.seconds[False])} steps, those without within {spread:.4f} s"
    )
    device = trainer.strategy.root_device
    where = circumstances("python tests/benchmarks/monitor.py", device, arguments=sys.argv[1:])
    print(json.dumps({"with_s": clock.seconds[True], "without_s": clock.seconds[False], **where}))


if __name__ == "__main__":
    main()
