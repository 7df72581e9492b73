"""A model of four units and its data, small enough for a step to take milliseconds."""

import lightning as L
import torch
from fitting import QUIET
from torch import nn
from torch.utils.data import DataLoader

from lightning_megatrain import MegaTrainStrategy

WIDTH, VOCAB = 128, 8  # multiples of the padding between parameters
UNITS = [f"blocks.{i}" for i in range(4)]
TOKENS = 4 * 8
"""Of a batch."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.linear(x).tanh()


class Small(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in UNITS)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        ids = batch["input_ids"]
        return nn.functional.cross_entropy(self(ids).flatten(0, 1), ids.flatten())

    def validation_step(self, batch, batch_idx):
        self(batch["input_ids"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def batches(count):
    return DataLoader([{"input_ids": torch.full((4, 8), i % VOCAB)} for i in range(count)], batch_size=None)


def train(callbacks, steps=8, *, module=None, strategy=None, validation=None, **trainer):
    """Train on one batch a step; returns the module and the trainer."""
    torch.manual_seed(1)
    module = module or Small()
    trainer = L.Trainer(
        strategy=strategy or MegaTrainStrategy(units=["Block"]),
        accelerator="cpu",
        max_steps=steps,
        callbacks=callbacks,
        num_sanity_val_steps=0,
        **{**QUIET, **trainer},
    )
    trainer.fit(module, batches(64), validation)
    return module, trainer
