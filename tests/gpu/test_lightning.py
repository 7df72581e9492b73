"""The core of the Lightning matrix on a CUDA device: checkpoints, resume, modes and callbacks. Run with -m gpu."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import zoo
from fitting import (
    FORMATS,
    QUIET,
    SCHEDULES,
    MegaTrainStrategy,
    assert_same_bits,
    assert_same_optimizer_bits,
    fit,
    loader,
)
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from resuming import Plain, Steps, assert_same_end, resumed_run, write_slowly
from resuming import run as run_with_checkpoints
from torch import Tensor, nn

from lightning_megatrain.checkpoint.sharded import read_sharded

pytestmark = pytest.mark.gpu

GPU: dict[str, Any] = {"accelerator": "gpu", "deterministic": "warn"}


def strategy(**arguments: Any) -> MegaTrainStrategy:
    return MegaTrainStrategy(host_memory="32GiB", **arguments)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("update", SCHEDULES)
@pytest.mark.parametrize("checkpoint_format", FORMATS)
def test_resume(checkpoint_format: str, update: str, precision: str, tmp_path: Path) -> None:
    """Dropout draws from the device's generator, whose state is in the checkpoint."""
    make = partial(strategy, update=update, checkpoint_format=checkpoint_format, save_async=True)
    arguments = {**GPU, "precision": precision}
    straight = run_with_checkpoints(make(), tmp_path / "straight", **arguments)
    assert_same_end(straight, resumed_run(make(), make(), tmp_path, **arguments))


def test_resume_across_schedules(tmp_path: Path) -> None:
    straight = run_with_checkpoints(strategy(update="blocking"), tmp_path / "straight", **GPU)
    for first, second in (("in_backward", "next_forward"), ("next_forward", "blocking")):
        legs = strategy(update=first, checkpoint_format="sharded"), strategy(update=second)
        resumed = resumed_run(*legs, tmp_path / first, **GPU)
        assert_same_bits_from(straight, resumed)


def test_the_stock_strategy_goes_on_with_ours(tmp_path: Path) -> None:
    """Its optimizer runs on the GPU, in another order of operations, so the end is close and not equal."""
    arguments = {**GPU, "make": partial(zoo.Cosine, dropout=0.0, log_norm=False), "data": Plain}
    straight, _ = run_with_checkpoints(strategy(), tmp_path / "straight", **arguments)
    resumed, trainer = resumed_run(strategy(), SingleDeviceStrategy("cuda:0"), tmp_path, **arguments)
    assert trainer.global_step == 20
    torch.testing.assert_close(resumed.losses, straight.losses[10:], rtol=1e-3, atol=1e-4)


def assert_same_bits_from(straight: tuple[zoo.Zoo, L.Trainer], resumed: tuple[zoo.Zoo, L.Trainer]) -> None:
    losses = list(straight[0].losses)
    assert_same_end(straight, resumed)
    straight[0].losses = losses


@pytest.mark.parametrize("update", SCHEDULES)
@pytest.mark.parametrize("checkpoint_format", FORMATS)
def test_what_is_saved_beside_training_is_the_step_named(
    checkpoint_format: str, update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = write_slowly(monkeypatch)
    saver, steps = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1), Steps()
    fit(
        partial(zoo.Llama, log_norm=False),
        strategy(update=update, checkpoint_format=checkpoint_format, save_async=True),
        precision="bf16-mixed",
        max_steps=8,
        callbacks=[steps, saver],
        enable_checkpointing=True,
        **GPU,
    )
    assert beside == [True] * 4
    for step in (2, 4, 6, 8):
        path = tmp_path / f"step={step}.ckpt"
        saved = read_sharded(path, weights_only=True) if path.is_dir() else torch.load(path, weights_only=True)
        for name, value in saved["state_dict"].items():
            assert torch.equal(value, steps.states[step][name]), (step, name)


class Backbone(zoo.Llama):
    """A Llama whose decoder is a backbone."""

    def __init__(self) -> None:
        super().__init__(log_norm=False)

    @property
    def backbone(self) -> nn.Module:
        return self.model.model

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_unfreezing_gives_the_same_bits_in_every_schedule(precision: str) -> None:
    def run(update: str) -> tuple[zoo.Zoo, L.Trainer]:
        return fit(
            Backbone,
            strategy(update=update),
            precision=precision,
            max_steps=-1,
            max_epochs=3,
            samples=16,
            callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=1e-3)],
            **GPU,
        )

    a, trainer_a = run("blocking")
    before = Backbone().model.model.layers[0].mlp.up_proj.weight.std()
    assert torch.isfinite(before)
    for update in ("next_forward", "in_backward"):
        b, trainer_b = run(update)
        assert_same_bits(a, b)
        assert_same_optimizer_bits(trainer_a, trainer_b)
    assert len(trainer_a.optimizers[0].param_groups) == 2
    assert len(trainer_a.optimizers[0].state) == len(list(a.parameters()))


class Manual(zoo.Llama):
    """Two optimizers, toggled by hand, with clipping."""

    def __init__(self) -> None:
        super().__init__(log_norm=False)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch)
            self.losses.append(loss.detach().cpu())
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        blocks = set(self.model.model.layers.parameters())
        rest = [p for p in self.parameters() if p not in blocks]
        return [torch.optim.AdamW(list(blocks), lr=1e-3), torch.optim.AdamW(rest, lr=1e-3)], []


def test_manual_optimization_is_close_to_the_stock_strategy() -> None:
    a, _ = fit(Manual, SingleDeviceStrategy("cuda:0"), max_steps=12, **GPU)
    b, _ = fit(Manual, strategy(), max_steps=12, **GPU)
    for x, y in zip(a.losses, b.losses, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_every_mode_and_no_optimizer_bytes_outside_fit(precision: str) -> None:
    mine = strategy(update="next_forward")
    L.seed_everything(1, verbose=False)
    module = zoo.Tied(log_norm=False)
    trainer = L.Trainer(
        strategy=mine, devices=1, max_steps=4, val_check_interval=2, limit_val_batches=2, precision=precision,
        **{**QUIET, **GPU},
    )  # fmt: skip
    first = trainer.validate(module, loader(8), verbose=False)[0]["val_loss"]
    assert mine.plan is not None
    assert mine.plan.host["moments"] == mine.plan.host["gradients"] == mine.plan.host["slabs"] == 0
    trainer.fit(module, loader(), loader(8))
    second = trainer.validate(module, loader(8), verbose=False)[0]["val_loss"]
    assert second != first
    assert trainer.test(module, loader(8), verbose=False)[0]["test_loss"] == second
    assert torch.stack(trainer.predict(module, loader(8))).mean().item() == pytest.approx(second, rel=1e-2)
    assert all(p.device.type == "cpu" and p.dtype == torch.float32 for p in module.parameters())
