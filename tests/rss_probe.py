"""Trains a deep stack for a few steps and prints the bytes it took, as JSON. Run in a process of its own.

python tests/rss_probe.py --device cpu --width 512 --layers 24
"""

import argparse
import json
import logging
import re
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_megatrain

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(L.LightningModule):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        noise = 0.02 * torch.randn(1 << 20)
        with torch.device("meta"):
            self.inlet = nn.Linear(16, width)
            self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
            self.outlet = nn.Linear(width, 1)
        self.to_empty(device="cpu")
        for p in self.parameters():
            flat = p.data.view(-1)
            for start in range(0, flat.numel(), noise.numel()):
                part = flat[start : start + noise.numel()]
                part.copy_(noise[: part.numel()])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.inlet(batch)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def status(field: str) -> int:
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) * 1024


def train(width: int, layers: int, device: str, precision: str, rows: int = 8, **strategy: Any) -> dict[str, Any]:
    chosen = lightning_megatrain.MegaTrainStrategy(**strategy)
    module = Stack(width, layers)
    trainer = L.Trainer(
        strategy=chosen,
        accelerator=device,
        devices=1,
        precision=precision,
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(torch.randn(64, 16), batch_size=rows))
    assert chosen.plan is not None
    return {"parameters": chosen.plan.parameters, "host": chosen.plan.host, "device": chosen.plan.device}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--host-memory", default="auto")
    given = parser.parse_args()
    train(16, 2, given.device, given.precision)  # imports, kernels, CUDA context
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    result = train(
        given.width,
        given.layers,
        given.device,
        given.precision,
        update="in_backward",
        host_memory=given.host_memory,
    )
    print(json.dumps({**result, "peak_bytes": status("VmHWM") - before}))


if __name__ == "__main__":
    main()
