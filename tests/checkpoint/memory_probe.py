"""Saves or loads checkpoints of a model with one very large tensor and prints what that took in bytes, as JSON.

Run in a process of its own:

    python memory_probe.py once folder --format sharded --precision bf16-mixed
    python memory_probe.py often folder --format sharded
"""

import argparse
import gc
import json
import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rss_probe import Block, status
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_megatrain
from lightning_megatrain.memory.host import give_back_freed_memory

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

MiB = 2**20
SIZES = {
    "large": {"width": 1536, "layers": 3, "vocabulary": 24576},
    "huge": {"width": 2048, "layers": 6, "vocabulary": 32768},
}
"""1.1 and 3.2 GB of fp32 weights and moments; the embedding is twice as large as a block."""
MIDDLE = {"width": 512, "layers": 2, "vocabulary": 2048}
TINY = {"width": 16, "layers": 2, "vocabulary": 16}


class Model(L.LightningModule):
    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        with torch.device("meta"):
            self.embed = nn.Embedding(vocabulary, width)
            self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
            self.outlet = nn.Linear(width, 1)
        self.to_empty(device="cpu")
        noise = 0.02 * torch.randn(MiB)
        for p in self.parameters():
            for part in p.data.view(-1).split(len(noise)):
                part.copy_(noise[: len(part)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def rise(action: Callable[[], object]) -> int:
    """Bytes by which resident memory was higher at its peak than before."""
    gc.collect()
    before = status("VmRSS")
    reset_peak()
    action()
    return status("VmHWM") - before


class Strategy(lightning_megatrain.MegaTrainStrategy):
    """Measures each part of loading, and the peak of all that happens up to its end."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(update="in_backward", **arguments)
        self.rises: dict[str, int] = {}
        self.peak = 0

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.measured(super().load_checkpoint, *args, **kwargs)

    def load_model_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.measured(super().load_model_state_dict, *args, **kwargs)

    def load_optimizer_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.measured(super().load_optimizer_state_dict, *args, **kwargs)

    def measured(self, part: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.peak = max(self.peak, status("VmHWM"))
        results: list[Any] = []
        self.rises[part.__name__] = rise(lambda: results.append(part(*args, **kwargs)))
        self.peak = max(self.peak, status("VmHWM"))
        return results[0]


class AtEnd(L.Callback):
    """Does something while the strategy still holds everything that training needs."""

    def __init__(self, action: Callable[[L.Trainer], object]) -> None:
        self.action = action

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.action(trainer)


def fit(
    module: Model,
    strategy: Strategy,
    precision: str,
    action: Callable[[L.Trainer], object] = lambda trainer: None,
    resume: Path | None = None,
) -> None:
    """One step, or none after a step that was saved."""
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        precision=precision,
        max_epochs=1,
        callbacks=[AtEnd(action)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(torch.arange(2).view(1, 2), batch_size=1), ckpt_path=resume)


def write(trainer: L.Trainer, path: Path) -> None:
    """Save, and wait where the save goes on beside training."""
    trainer.save_checkpoint(path)
    trainer.strategy.on_train_end()


def sizes(module: nn.Module, strategy: Strategy) -> dict[str, int]:
    assert strategy.plan is not None
    return {
        "parameters": strategy.plan.parameters,
        "largest_tensor": max(4 * p.numel() for p in module.parameters()),
        "unit": sum(4 * p.numel() for p in module.blocks[0].parameters()),
        "planned": strategy.plan.host_bytes + strategy.plan.device_bytes,
    }


def save(size: str, path: Path, checkpoint_format: str, precision: str, *, save_async: bool) -> dict[str, Any]:
    rises: list[int] = []
    module = Model(**SIZES[size])
    strategy = Strategy(checkpoint_format=checkpoint_format, save_async=save_async)
    fit(module, strategy, precision, lambda trainer: rises.append(rise(lambda: write(trainer, path))))
    return {**sizes(module, strategy), "rise": rises[0]}


def load(size: str, path: Path, precision: str) -> dict[str, Any]:
    gc.collect()
    give_back_freed_memory()
    before = status("VmRSS")
    reset_peak()
    module = Model(**SIZES[size])
    strategy = Strategy()
    fit(module, strategy, precision, resume=path)
    return {**sizes(module, strategy), "rises": strategy.rises, "peak": strategy.peak - before}


def save_often(folder: Path, checkpoint_format: str, *, save_async: bool) -> list[int]:
    """Resident bytes after each of 20 saves."""
    resident: list[int] = []

    def save_all(trainer: L.Trainer) -> None:
        for number in range(20):
            write(trainer, folder / f"{number % 2}.ckpt")
            resident.append(status("VmRSS"))

    gc.collect()  # of the fit before
    strategy = Strategy(checkpoint_format=checkpoint_format, save_async=save_async)
    fit(Model(**MIDDLE), strategy, "bf16-mixed", save_all)
    return resident


def warm_up(checkpoint_format: str, precision: str) -> None:
    """Imports and whatever else happens once."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.ckpt"
        strategy = Strategy(checkpoint_format=checkpoint_format)
        fit(Model(**TINY), strategy, precision, lambda trainer: write(trainer, path))
        fit(Model(**TINY), Strategy(), precision, resume=path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["once", "often"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--format", default="ckpt")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--save-async", action="store_true")
    given = parser.parse_args()
    warm_up(given.format, given.precision)
    result: dict[str, Any]
    if given.action == "once":
        path = given.folder / "big.ckpt"
        saved = save(given.size, path, given.format, given.precision, save_async=given.save_async)
        result = {"saved": saved, "loaded": load(given.size, path, given.precision)}
    else:
        result = {
            mode: save_often(given.folder, given.format, save_async=mode == "async") for mode in ("sync", "async")
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
