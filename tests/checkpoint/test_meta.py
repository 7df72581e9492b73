"""Modules on the meta device get memory and values, or are refused before anything is changed."""

from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
import zoo
from fitting import FORMATS, QUIET, MegaTrainStrategy, fit, loader
from torch import Tensor, nn

from lightning_megatrain.checkpoint.loading import materialize_meta


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 48), nn.Linear(48, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Deferred(zoo.Zoo):
    """Builds itself on the meta device in `configure_model`; the head is the embedding."""

    def __init__(self, table: bool = False) -> None:
        super().__init__(log_norm=False)
        self.table = table
        self.built = 0

    def configure_model(self) -> None:
        if self.built:
            return
        self.built += 1
        with torch.device("meta"):
            self.embed = nn.Embedding(zoo.VOCAB, 32)
            self.blocks = nn.ModuleList(Block(32) for _ in range(3))
            self.head = nn.Linear(32, zoo.VOCAB)
            self.head.weight = self.embed.weight
            if self.table:
                self.blocks[1].register_buffer("angles", torch.ones(3), persistent=False)

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return zoo.token_loss(self.head(x), batch)


@pytest.mark.parametrize("checkpoint_format", FORMATS)
def test_values_come_from_reset_parameters_or_a_checkpoint(checkpoint_format: str, tmp_path: Path) -> None:
    module, trainer = fit(Deferred, MegaTrainStrategy(checkpoint_format=checkpoint_format), max_steps=3)
    assert all(torch.isfinite(p).all() and p.device.type == "cpu" for p in module.parameters())
    assert module.head.weight is module.embed.weight
    assert 0.5 < module.blocks[0].norm.weight.mean() < 1.5
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    again = Deferred()
    evaluation = L.Trainer(strategy=MegaTrainStrategy(), accelerator="cpu", devices=1, **QUIET)
    evaluation.validate(again, loader(8), ckpt_path=tmp_path / "x.ckpt", verbose=False, weights_only=True)
    assert again.head.weight is again.embed.weight
    for name, value in module.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_what_neither_of_them_fills_is_refused(tmp_path: Path) -> None:
    """A buffer that no checkpoint holds would be left with whatever the memory held before."""
    _, trainer = fit(Deferred, MegaTrainStrategy(), max_steps=1)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    module = Deferred(table=True)
    again = L.Trainer(strategy=MegaTrainStrategy(), accelerator="cpu", devices=1, max_steps=2, **QUIET)
    for path in (None, tmp_path / "x.ckpt"):
        with pytest.raises(ValueError, match=r"'blocks.1' \(Block\) is on the meta device.*reset_parameters"):
            again.fit(module, loader(), ckpt_path=path)
        assert all(p.is_meta for p in module.parameters())


def test_empty_init_then_a_checkpoint(tmp_path: Path) -> None:
    make = partial(zoo.Encoder, layers=2, log_norm=False)
    module, trainer = fit(make, MegaTrainStrategy(), max_steps=2)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    again = L.Trainer(strategy=MegaTrainStrategy(), accelerator="cpu", devices=1, max_steps=2, **QUIET)
    with again.init_module(empty_init=True):
        empty = make()
    again.fit(empty, loader(), ckpt_path=tmp_path / "x.ckpt", weights_only=True)
    for name, value in module.state_dict().items():
        assert torch.equal(value, empty.state_dict()[name]), name


def test_what_is_real_in_a_module_that_is_partly_on_the_meta_device_stays() -> None:
    class Half(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            with torch.no_grad():
                self.weight.fill_(3.0)
            self.register_buffer("table", torch.ones(2, device="meta"))

        def reset_parameters(self) -> None:
            super().reset_parameters()
            if hasattr(self, "table"):
                self.table.fill_(7.0)

    module = nn.Sequential(Half())
    materialize_meta(module)
    assert (module[0].weight == 3).all()
    assert (module[0].table == 7).all()
