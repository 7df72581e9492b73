"""Running small fits and comparing what they leave."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader
from zoo import VOCAB, Zoo

import lightning_megatrain

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

SCHEDULES = ["blocking", "next_forward", "in_backward"]
FORMATS = ["ckpt", "sharded"]


class MegaTrainStrategy(lightning_megatrain.MegaTrainStrategy):
    """As on a GPU, host work is done by the worker thread."""

    update_thread_on_cpu = True


QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def tokens(count: int = 120, length: int = 7) -> torch.Tensor:
    return torch.randint(0, VOCAB, (count, length), generator=torch.Generator().manual_seed(5))


def loader(count: int = 120, batch_size: int = 4) -> DataLoader[torch.Tensor]:
    return DataLoader(tokens(count), batch_size=batch_size)


def stock(device: str = "cpu") -> SingleDeviceStrategy:
    return SingleDeviceStrategy(device)


def fit(
    make: Callable[[], Zoo],
    strategy: Any,
    *,
    precision: str = "32-true",
    accelerator: str = "cpu",
    max_steps: int = 10,
    batch_size: int = 4,
    samples: int = 120,
    **trainer_arguments: Any,
) -> tuple[Zoo, L.Trainer]:
    """Seed, build, fit. Equal arguments give equal data, initial weights and random numbers."""
    L.seed_everything(1, verbose=False)
    module = make()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator=accelerator,
        devices=1,
        precision=precision,
        max_steps=max_steps,
        **{**QUIET, **trainer_arguments},
    )
    L.seed_everything(2, verbose=False)
    trainer.fit(module, loader(samples, batch_size))
    return module, trainer


@contextmanager
def under(what: object) -> Iterator[None]:
    """Tells under which of several settings something failed."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"under {what}: {type(error).__name__}: {error}") from error


def assert_same_bits(a: Zoo, b: Zoo) -> None:
    """Weights, buffers, optimizer state, logged losses and logged gradient norms are equal bit for bit."""
    state_a, state_b = a.state_dict(), b.state_dict()
    assert state_a.keys() == state_b.keys()
    for name, value in state_a.items():
        other = state_b[name]
        assert value.dtype == other.dtype, name
        assert torch.equal(value, other), f"{name} differs by {(value.float() - other.float()).abs().max()}"
    for kind in ("losses", "norms"):
        x, y = getattr(a, kind), getattr(b, kind)
        assert len(x) == len(y)
        assert all(torch.equal(p, q) for p, q in zip(x, y, strict=True)), (kind, x, y)


def assert_same_optimizer_bits(a: L.Trainer, b: L.Trainer) -> None:
    """State and hyperparameters of all optimizers are equal bit for bit."""
    assert len(a.optimizers) == len(b.optimizers)
    for first, second in zip(a.optimizers, b.optimizers, strict=True):
        x, y = first.state_dict(), second.state_dict()
        assert x["param_groups"] == y["param_groups"]
        assert x["state"].keys() == y["state"].keys()
        for key, state in x["state"].items():
            assert state.keys() == y["state"][key].keys()
            for name, value in state.items():
                other = y["state"][key][name]
                same = torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
                assert same, (key, name)
