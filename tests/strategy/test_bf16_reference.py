"""`bf16-mixed` and `bf16-true` equal a written-out reference within one fp32 ulp per step."""

from functools import partial
from typing import Any

import pytest
import torch
import zoo
from bf16_reference import StepReference
from fitting import SCHEDULES, MegaTrainStrategy, fit

from lightning_megatrain.update.updater import Updater

NAMES = [n for n in zoo.ALL if n != "odd"]


@pytest.mark.parametrize("update", SCHEDULES)
@pytest.mark.parametrize("name", NAMES)
def test_bf16_mixed(name: str, update: str) -> None:
    reference = StepReference()
    make = partial(zoo.ALL[name], scheduler=True, log_norm=False)
    module, _ = fit(make, MegaTrainStrategy(update=update), precision="bf16-mixed", callbacks=[reference], max_steps=6)
    assert reference.steps == 6
    assert reference.worst <= 1
    assert all(p.dtype == torch.float32 for p in module.parameters())


@pytest.mark.parametrize("log_norm", [True, False])  # hooks that read gradients, and norms taken before the push
@pytest.mark.parametrize("update", ["blocking", "next_forward"])
def test_bf16_mixed_with_clipping(update: str, log_norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[float] = []
    clip = Updater.clip_by_norm

    def noted(self: Updater, *args: Any, **kwargs: Any) -> None:
        clip(self, *args, **kwargs)
        applied.append(next(iter(self._scales.values())))

    monkeypatch.setattr(Updater, "clip_by_norm", noted)
    reference = StepReference(clip=0.1, applied=applied)
    make = partial(zoo.Llama, scheduler=True, log_norm=log_norm)
    fit(
        make,
        MegaTrainStrategy(update=update),
        precision="bf16-mixed",
        callbacks=[reference],
        max_steps=6,
        gradient_clip_val=0.1,
    )
    assert reference.worst <= 1


def test_bf16_true() -> None:
    reference = StepReference()
    fit(zoo.Llama, MegaTrainStrategy(), precision="bf16-true", callbacks=[reference], max_steps=6)
    assert reference.steps == 6
    assert reference.worst <= 1


@pytest.mark.parametrize("optimizer", ["sgd", "adafactor", "radam"])
def test_other_optimizers_step_the_exact_master(optimizer: str) -> None:
    make = partial(zoo.Llama, optimizer=optimizer, log_norm=False)
    a, _ = fit(make, MegaTrainStrategy(update="blocking"), precision="bf16-mixed")
    b, _ = fit(make, MegaTrainStrategy(update="in_backward"), precision="bf16-mixed")
    start = make()
    for (name, p), q, first in zip(a.named_parameters(), b.parameters(), start.parameters(), strict=True):
        assert torch.equal(p, q), name
        assert not torch.equal(p.bfloat16().float(), p) or p.numel() < 64, "the lower half of the master was lost"
        assert p.shape == first.shape


def test_tiny_updates_are_not_lost() -> None:
    """At lr 1e-5 nearly all updates of a bf16 weight round to nothing; the master must keep every one."""
    make = partial(zoo.Llama, lr=1e-6, log_norm=False)
    before = fit(make, MegaTrainStrategy(), precision="bf16-mixed", max_steps=0)[0]
    after = fit(make, MegaTrainStrategy(), precision="bf16-mixed", max_steps=3)[0]
    for (name, p), q in zip(before.named_parameters(), after.parameters(), strict=True):
        assert (p != q).float().mean() > 0.9 or p.dim() == 1 or "embed" in name, name
