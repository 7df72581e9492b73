"""Times checkpoints of a model with random weights, before and beside training, and loading them.

    python tests/benchmarks/saving.py --model qwen2_5_3b --folder /tmp/checkpoints

Prints one JSON line for each way of saving: bytes, seconds until training goes on, seconds until the checkpoint is in
place and durable, the steps around it, and how much resident memory the save took at its peak. Each is removed
before the next is written.
"""

import argparse
import json
import shutil
import statistics
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from torch.utils.data import DataLoader

import lightning_megatrain
from lightning_megatrain import checkpoints
from lightning_megatrain.cli.app import config_dir
from lightning_megatrain.cli.bench_measure import RandomTokens
from lightning_megatrain.recipes.random_weights import fill_weights, without_weights


def resident() -> int:
    return psutil.Process().memory_info().rss


class Peak:
    """Resident memory, sampled while something runs."""

    def __enter__(self) -> "Peak":
        self.start = self.most = resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            self.most = max(self.most, resident())

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()


class Save(L.Callback):
    """Saves after step 4 and times the steps, to the end of their device work."""

    reads_weights = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: list[float] = []
        self.result: dict[str, Any] = {}

    def on_train_batch_start(self, *args: Any) -> None:
        torch.cuda.synchronize()
        self._began = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        torch.cuda.synchronize()
        self.steps.append(time.perf_counter() - self._began)
        if trainer.global_step == 4:
            with Peak() as peak:
                began = time.perf_counter()
                trainer.save_checkpoint(self.path)
                self.result["held_s"] = time.perf_counter() - began
            self.result["peak_mib"] = (peak.most - peak.start) / 2**20


def size(path: Path) -> int:
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) if path.is_dir() else path.stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen2_5_3b", help="a name in conf/model")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--host-memory", default="auto")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    given.folder.mkdir(parents=True, exist_ok=True)
    path = given.folder / "x.ckpt"
    write, done = checkpoints._write, []

    def timed(*args: Any, **kwargs: Any) -> None:
        began = time.perf_counter()
        write(*args, **kwargs)
        done.append(time.perf_counter() - began)

    checkpoints._write = timed
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        cfg = compose("bench_step", overrides=[f"model={given.model}"])
    module = without_weights(lambda: instantiate(cfg.model))
    fill_weights(module, torch.device("cpu"), torch.bfloat16)
    tokens = RandomTokens([given.rows], 8, seq_len=2048, vocabulary=cfg.model.config.vocab_size)
    for checkpoint_format, beside in (("ckpt", False), ("sharded", False), ("sharded", True)):
        save = Save(path)
        trainer = L.Trainer(
            strategy=lightning_megatrain.MegaTrainStrategy(
                checkpoint_format=checkpoint_format,
                save_async=beside,
                update="next_forward",
                microbatch=8,
                host_memory=given.host_memory,
            ),
            accelerator="gpu",
            devices=1,
            precision="bf16-mixed",
            max_steps=8,
            callbacks=[save],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(tokens, batch_size=None))
        written = size(path)
        result = {
            "format": checkpoint_format,
            "beside_training": beside,
            "gib": round(written / 2**30, 1),
            "held_s": round(save.result["held_s"], 2),
            "written_s": round(done[-1], 2),
            "gb_per_s": round(written / 1e9 / done[-1], 2),
            "peak_mib": round(save.result["peak_mib"]),
            "step_before_s": round(statistics.median(save.steps[1:4]), 2),
            "steps_after_s": [round(s, 2) for s in save.steps[4:]],
        }
        if beside:
            strategy = lightning_megatrain.MegaTrainStrategy()
            again = L.Trainer(strategy=strategy, logger=False, accelerator="cpu", enable_checkpointing=False)
            again.strategy.connect(module)
            with Peak() as peak:
                began = time.perf_counter()
                loaded = strategy.load_checkpoint(path, weights_only=True)
                strategy.load_model_state_dict(loaded)
                result["load_weights_s"] = round(time.perf_counter() - began, 2)
            result["load_peak_mib"] = round((peak.most - peak.start) / 2**20)
        print(json.dumps(result), flush=True)
        shutil.rmtree(path) if path.is_dir() else path.unlink()


if __name__ == "__main__":
    main()
