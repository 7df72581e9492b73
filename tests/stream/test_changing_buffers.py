"""Buffers that a unit's forward changes: once for each use, whenever they change, and back if memory runs out in it."""

from functools import partial
from typing import Any

import pytest
import torch
import zoo
from fitting import MegaTrainStrategy, assert_same_bits, fit, loader, stock
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatrain.stream import unit
from lightning_megatrain.stream.budget import Budget


class Averages(nn.Module):
    """Centres by an average of what it saw, which it follows while it observes."""

    def __init__(self, extra: int = 0) -> None:
        super().__init__()
        self.linear, self.observes = nn.Linear(32, 32), False
        self.register_buffer("average", torch.zeros(32 + extra))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.training and self.observes:
            self.average[:32].mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return torch.tanh(x - self.average[:32])


class Normed(nn.Module):
    """Batch norm without a counter, whose statistics change without a version."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.register_buffer("mean", torch.zeros(32))
        self.register_buffer("variance", torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(self.linear(x).transpose(1, 2), self.mean, self.variance, training=self.training)
        return torch.tanh(x.transpose(1, 2))


class Blocks(zoo.Zoo):
    """Its blocks observe from the fourth batch on; some batches are looked at once more without gradients."""

    def __init__(self, make: Any) -> None:
        super().__init__(log_norm=False)
        self.embed, self.head = nn.Embedding(zoo.VOCAB, 32), nn.Linear(32, zoo.VOCAB)
        self.blocks = nn.ModuleList(make() for _ in range(3))

    def run(self, batch: Tensor) -> Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def loss(self, batch: Tensor) -> Tensor:
        if self.global_step == 5:
            with torch.no_grad():
                self.run(batch)
        return zoo.token_loss(self.run(batch), batch)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        for block in self.blocks:
            block.observes = batch_idx > 3


MAKES = {
    "later": Averages,
    "no version": Normed,
    "counted": lambda: nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(7)),
}


@pytest.mark.parametrize("recompute", ["always", "never"])
@pytest.mark.parametrize("name", MAKES)
def test_a_buffer_changes_once(name: str, recompute: str) -> None:
    make = partial(Blocks, MAKES[name])
    a, _ = fit(make, stock(), max_steps=8)
    b, _ = fit(make, MegaTrainStrategy(recompute=recompute), max_steps=8)
    assert_same_bits(a, b)


def test_a_large_buffer_that_changes_later_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit, "_SMALL", 128)
    fit(partial(Blocks, Averages), MegaTrainStrategy(), max_steps=8)
    with pytest.raises(
        RuntimeError, match=r"'blocks\.0' changes its buffer 'average' in some steps and not in its first"
    ):
        fit(partial(Blocks, partial(Averages, 1)), MegaTrainStrategy(), max_steps=8)


class Spread(nn.Module):
    """Has buffers of other kinds than dense numbers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        near = torch.eye(7) + 0.1
        if kind == "float8":
            self.register_buffer("near", near.to(torch.float8_e4m3fn))
        elif kind == "csr":
            self.register_buffer("near", near.to_sparse_csr())
        elif kind == "nan":
            self.register_buffer("near", torch.full((7, 7), float("nan")))
        else:
            self.register_buffer("near", near.to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.near.dtype == torch.float8_e4m3fn:
            return self.near.float() @ x
        if self.near.layout is torch.strided:
            return torch.where(self.near[0, 0].isnan(), x, x + 1)
        return torch.stack([torch.sparse.mm(self.near, one) for one in x])


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("kind", ["coo", "csr", "float8", "nan"])
def test_buffers_of_other_kinds(kind: str) -> None:
    make = partial(Blocks, partial(Spread, kind))
    a, _ = fit(make, stock(), max_steps=4)
    b, _ = fit(make, MegaTrainStrategy(), max_steps=4)
    losses = [torch.stack(m.losses) for m in (a, b)]
    assert torch.equal(*losses)


class Crowded(nn.Sequential):
    """Memory runs out in uses without gradients, when statistics have changed and numbers are drawn."""

    left = 0

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if Crowded.left and not torch.is_grad_enabled():
            Crowded.left -= 1
            raise torch.OutOfMemoryError("planted")
        return x


def test_a_use_that_ran_out_of_memory_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    make = partial(Blocks, lambda: Crowded(nn.Linear(32, 32), nn.BatchNorm1d(7), nn.Dropout(0.3)))
    monkeypatch.setattr(Budget, "relieve", lambda self: True)
    plain, _ = fit(make, MegaTrainStrategy(), max_steps=8)
    monkeypatch.setattr(Crowded, "left", 2)
    other, _ = fit(make, MegaTrainStrategy(), max_steps=8)
    assert Crowded.left == 0
    assert_same_bits(plain, other)


class Grows(nn.Module):
    """Makes a larger buffer in a later step, and uses what the earlier one had."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.observes = nn.Linear(32, 32), False
        self.register_buffer("table", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        scale = float(len(self.table))
        if self.observes and len(self.table) < 512:
            self.table = torch.ones(2 * len(self.table))
        return torch.tanh(self.linear(x) / scale)


@pytest.mark.parametrize("small", [2**20, 16])
def test_a_buffer_that_another_takes_the_place_of(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit, "_SMALL", small)
    a, _ = fit(partial(Blocks, Grows), stock(), max_steps=8)
    b, _ = fit(partial(Blocks, Grows), MegaTrainStrategy(), max_steps=8)
    assert_same_bits(a, b)


class Replaces(nn.Module):
    """Makes a buffer anew in each forward, as rotary embeddings do that grow: in a validation, an inference tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.scale = torch.ones((), device=x.device) * 2
        return torch.tanh(self.linear(x) * self.scale)


class Validated(Blocks):
    def val_dataloader(self) -> Any:
        return loader(8)


def test_a_buffer_that_a_validation_made() -> None:
    make = partial(Validated, Replaces)
    a, _ = fit(make, stock(), max_steps=4)
    b, _ = fit(make, MegaTrainStrategy(), max_steps=4)
    assert_same_bits(a, b)
