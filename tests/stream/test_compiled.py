"""Units through `torch.compile`: how many graphs, which numbers, and what happens where it cannot be."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import zoo
from fitting import MegaTrainStrategy, assert_same_bits, fit
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from lightning_megatrain.stream import compiled

PLAIN: dict[str, Any] = {"log_norm": False}


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Counts graphs; without a C++ compiler's time."""
    torch._dynamo.reset()
    made = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(compiled, "OPTIONS", {"backend": made})
    return made


class Sequence(zoo.Zoo):
    """Blocks of one class, of the widths that are given inside."""

    def __init__(self, inner: tuple[int, ...] = (48, 48, 48, 48), dropout: float = 0.0, **kw: Any) -> None:
        super().__init__(**{**PLAIN, "optimizer": "adamw", **kw})
        self.embed, self.head = nn.Embedding(zoo.VOCAB, 32), nn.Linear(32, zoo.VOCAB)
        self.blocks = nn.ModuleList(Block(width, dropout) for width in inner)

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return zoo.token_loss(self.head(x), batch)


class Block(nn.Module):
    def __init__(self, inner: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, inner), nn.Linear(inner, 32)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


@pytest.mark.parametrize("recompute", ["always", "never"])
@pytest.mark.parametrize(("inner", "graphs"), [((48,) * 6, 1), ((48, 64, 48, 64), 2)])
def test_as_many_graphs_as_structures(
    counter: CompileCounterWithBackend, inner: tuple[int, ...], graphs: int, recompute: str
) -> None:
    fit(partial(Sequence, inner), MegaTrainStrategy(compile=True, recompute=recompute), max_steps=3)
    assert counter.frame_count == graphs


@pytest.mark.parametrize(
    ("precision", "arguments"),
    [
        ("32-true", {"microbatch": 2}),
        ("32-true", {"recompute": "never"}),
        ("bf16-true", {"update": "in_backward"}),
        ("bf16-mixed", {}),
        ("bf16-mixed", {"microbatch": 2, "recompute": "never"}),
    ],
)
@pytest.mark.parametrize(
    "make", [Sequence, partial(zoo.ALL["llama"], **PLAIN), partial(zoo.ALL["frozen"], dropout=0.0, **PLAIN)]
)
def test_the_numbers_are_those_of_the_blocks_as_they_are(
    counter: CompileCounterWithBackend, make: Any, precision: str, arguments: dict[str, Any]
) -> None:
    runs = [
        fit(make, MegaTrainStrategy(compile=compile, **arguments), precision=precision, max_steps=4)
        for compile in (False, True)
    ]
    tolerance = 1e-5 if precision == "32-true" else 3e-2
    for (name, a), (_, b) in zip(runs[0][0].named_parameters(), runs[1][0].named_parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
    assert counter.frame_count > 0


def test_dropout_is_the_same_in_the_recompute(counter: CompileCounterWithBackend) -> None:
    make = partial(Sequence, dropout=0.3)
    runs = [
        fit(make, MegaTrainStrategy(compile=True, recompute=recompute), max_steps=4)[0]
        for recompute in ("always", "never")
    ]
    assert_same_bits(*runs)


def test_what_cannot_be_compiled_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        raise NotImplementedError("no such device")

    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "OPTIONS", {"backend": backend})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        a, _ = fit(Sequence, MegaTrainStrategy(compile=True), max_steps=3)
    messages = [str(w.message) for w in caught if "could not be compiled" in str(w.message)]
    assert len(messages) == 4  # one for each of the units
    assert "no such device" in messages[0]
    b, _ = fit(Sequence, MegaTrainStrategy(), max_steps=3)
    assert_same_bits(a, b)


def test_inductor_itself() -> None:
    torch._dynamo.reset()
    a, _ = fit(Sequence, MegaTrainStrategy(), max_steps=2)
    b, _ = fit(Sequence, MegaTrainStrategy(compile=True), max_steps=2)
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
