"""Models that write: text while they are evaluated or trained, and to their weights."""

from collections.abc import Callable
from typing import Any

import torch
import zoo
from fitting import loader
from torch import Tensor, nn

UNITS = 6
TOKENS = 5


class Writer(zoo.Zoo):
    """Writes text in its validation, token by token, and may do something in between."""

    def __init__(self, between: Callable[["Writer", int], None] | None = None, **kw: Any) -> None:
        super().__init__(**{"log_norm": False, **kw})
        self.embed, self.head = nn.Embedding(zoo.VOCAB, 32), nn.Linear(32, zoo.VOCAB)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)) for _ in range(UNITS))
        self.between = between or (lambda module, index: None)
        self.written: list[Tensor] = []
        """Of each batch: the text, and the logits of another forward."""

    def loss(self, batch: Tensor) -> Tensor:
        return zoo.token_loss(self(batch), batch)

    def forward(self, batch: Tensor) -> Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = x + block(x).relu()
        return self.head(x)

    def write(self, text: Tensor) -> Tensor:
        for _ in range(TOKENS):
            text = torch.cat([text, self(text)[:, -1:].argmax(-1)], dim=1)
        return text

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.between(self, batch_idx)
        self.written.append(torch.cat([self.write(batch).flatten().float(), self(batch).flatten()]).cpu())

    def on_validation_batch_end(self, *args: Any) -> None:
        self.between(self, -1 - args[2])

    predict_step = validation_step  # type: ignore[assignment]


class Validated(Writer):
    def val_dataloader(self) -> Any:
        return loader(8)


class Rewards(Writer):
    """Writes text within the training step, and learns from it."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            text = self.write(batch)
        return super().training_step(text, batch_idx)


class WritesWithin(zoo.Encoder):
    """Writes to weights in its `training_step`, before any forward or when other units have run."""

    def __init__(self, how: str, where: str, *, late: bool) -> None:
        super().__init__(layers=3, log_norm=False, dropout=0.0)
        self.how, self.where, self.late = how, where, late

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.late:
            with torch.no_grad():
                self.net.layers[0](self.embed(batch))
        with torch.no_grad():
            for parameter in self.get_submodule(self.where).parameters():
                if self.how == "assigned":
                    parameter.data = parameter.data * 0.9
                else:
                    parameter.mul_(0.9)
        return super().training_step(batch, batch_idx)


def assert_same_text(a: Writer, b: Writer) -> None:
    assert a.written
    assert len(a.written) == len(b.written)
    assert all(torch.equal(x, y) for x, y in zip(a.written, b.written, strict=True))
