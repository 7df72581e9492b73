"""All schedules give the same bits; clipping, skipping and failing behave the same in each."""

import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import zoo
from fitting import (
    QUIET,
    SCHEDULES,
    MegaTrainStrategy,
    assert_same_bits,
    assert_same_optimizer_bits,
    fit,
    loader,
    stock,
    under,
)
from torch import Tensor

from lightning_megatrain.fence import Fence
from lightning_megatrain.update import kernel
from lightning_megatrain.update.optimizers import AdamUpdate, GroupUpdate
from lightning_megatrain.update.updater import NonFiniteGradientError, Updater
from lightning_megatrain.update.worker import Worker


def slow_down(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[], float]) -> None:
    """The worker takes this much longer for each task."""
    do = Worker._do

    def slow(self: Worker, task: Callable[[], None]) -> None:
        time.sleep(seconds())
        do(self, task)

    monkeypatch.setattr(Worker, "_do", slow)


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_fifty_steps_are_equal_to_the_bit(precision: str, clip: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(3)
    slow_down(monkeypatch, lambda: dice.random() * 1e-3)
    make = partial(zoo.Cosine, log_norm=False)
    runs = [
        fit(
            make,
            MegaTrainStrategy(update=update),
            precision=precision,
            max_steps=50,
            gradient_clip_val=clip,
            samples=240,
        )
        for update in SCHEDULES
        if not (clip and update == "in_backward")
    ]
    if precision == "32-true":
        runs.append(fit(make, stock(), max_steps=50, gradient_clip_val=clip, samples=240))
    for module, trainer in runs[1:]:
        assert_same_bits(runs[0][0], module)
        assert_same_optimizer_bits(runs[0][1], trainer)


@pytest.mark.parametrize("first", SCHEDULES)
def test_schedules_may_change_through_a_checkpoint(first: str, tmp_path: Any) -> None:
    make = partial(zoo.Cosine, dropout=0.0, log_norm=False)
    arguments: dict[str, Any] = {"precision": "bf16-mixed", "max_steps": -1, "samples": 16}
    straight, _ = fit(make, MegaTrainStrategy(update="blocking"), max_epochs=2, **arguments)
    _, trainer = fit(make, MegaTrainStrategy(update=first), max_epochs=1, **arguments)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    for second in SCHEDULES:
        module = make()
        again = L.Trainer(
            strategy=MegaTrainStrategy(update=second),
            accelerator="cpu",
            devices=1,
            precision="bf16-mixed",
            max_epochs=2,
            **QUIET,
        )
        again.fit(module, loader(16), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
        for (name, value), other in zip(straight.state_dict().items(), module.state_dict().values(), strict=True):
            assert torch.equal(value, other), (second, name)


class SavesEveryStep(L.Callback):
    """Saves while the last update may still run, and checks what it saved."""

    def __init__(self, path: Any) -> None:
        self.path = path
        self.states: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        trainer.save_checkpoint(self.path)
        saved = torch.load(self.path, weights_only=True)
        steps = {int(s["step"]) for s in saved["optimizer_states"][0]["state"].values()}
        assert steps == {trainer.global_step}
        self.states.append({k: v.clone() for k, v in saved["state_dict"].items()})


def test_a_checkpoint_waits_for_the_update(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make = partial(zoo.Llama, log_norm=False)
    blocking, behind = SavesEveryStep(tmp_path / "a.ckpt"), SavesEveryStep(tmp_path / "b.ckpt")
    monkeypatch.setattr(Fence, "on_train_batch_end", lambda *args: None)  # saving must wait by itself
    slow_down(monkeypatch, lambda: 0.005)
    arguments: dict[str, Any] = {"precision": "bf16-mixed", "max_steps": 4}
    fit(make, MegaTrainStrategy(update="blocking"), callbacks=[blocking], **arguments)
    fit(make, MegaTrainStrategy(update="next_forward"), callbacks=[behind], **arguments)
    for a, b in zip(blocking.states, behind.states, strict=True):
        assert all(torch.equal(a[k], b[k]) for k in a)


def overlap(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> list[str]:
    """Whether any update ran after its step had returned."""
    late: list[str] = []
    inside = threading.Event()
    step, update = Updater.step, AdamUpdate.update

    def noted_step(self: Updater, optimizer: Any) -> None:
        inside.set()
        step(self, optimizer)
        inside.clear()

    def noted_update(self: GroupUpdate, group: Any, *args: Any) -> None:
        threading.Event().wait(0.005)
        if not inside.is_set():
            late.append(group.name)
        update(self, group, *args)

    monkeypatch.setattr(Updater, "step", noted_step)
    monkeypatch.setattr(AdamUpdate, "update", noted_update)
    make = partial(zoo.Llama, log_norm=False)
    fit(make, MegaTrainStrategy(update="next_forward"), precision="bf16-mixed", max_steps=3, **arguments)
    return late


class Watcher(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        assert not trainer.strategy._updater.worker._open.total()


def test_updates_run_behind_the_next_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    assert overlap(monkeypatch)


def test_the_fence_waits_when_somebody_may_look(monkeypatch: pytest.MonkeyPatch) -> None:
    overlap(monkeypatch, callbacks=[Watcher()])  # Watcher asserts


class Blind(Watcher):
    """Waits for nobody, and says that it reads no weights."""

    reads_weights = False

    def on_train_batch_end(self, *args: Any) -> None:
        pass


def test_the_fence_lets_pass_who_says_it_does_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    assert overlap(monkeypatch, callbacks=[Blind()])


def test_the_fence_is_taken_down_again() -> None:
    _, trainer = fit(zoo.Llama, MegaTrainStrategy(update="next_forward"))
    assert not any(isinstance(c, Fence) for c in trainer.callbacks)


def test_auto_hides_clipping_on_a_device_and_not_on_the_cpu() -> None:
    from lightning_megatrain.legality import choose_schedule

    _, trainer = fit(partial(zoo.Llama, log_norm=False), MegaTrainStrategy(), max_steps=1, gradient_clip_val=1.0)
    assert choose_schedule("auto", trainer, trainer.optimizers, on_cpu=False) == (
        "next_forward",
        "gradients are clipped",
    )
    schedule, why = choose_schedule("auto", trainer, trainer.optimizers, on_cpu=True)
    assert schedule == "blocking"
    assert "nothing to hide" in why


class Poisoned(zoo.Encoder):
    """Gradients of the third step are not finite from block 1 on down."""

    def __init__(self, bad: float = float("nan")) -> None:
        super().__init__(dropout=0.0, log_norm=False)
        self.bad = bad

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(batch)
        for i, block in enumerate(self.net.layers):
            x = block(x)
            if batch_idx == 2 and i == 1:
                x.register_hook(lambda g: g * self.bad)
        return zoo.token_loss(self.head(x), batch)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("update", ["blocking", "next_forward"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite_never_reaches_the_weights(bad: float, update: str, precision: str) -> None:
    L.seed_everything(1, verbose=False)
    module = Poisoned(bad)
    trainer = L.Trainer(
        strategy=MegaTrainStrategy(update=update),
        accelerator="cpu",
        devices=1,
        precision=precision,
        max_steps=9,
        gradient_clip_val=1.0,
        **QUIET,
    )
    with pytest.raises(
        NonFiniteGradientError, match=r"first in 'net.layers.1'.*set MegaTrainStrategy\(nonfinite='skip'\)"
    ):
        trainer.fit(module, loader())
    assert all(torch.isfinite(p).all() for p in module.parameters())
    twin, _ = fit(Poisoned, MegaTrainStrategy(update=update), precision=precision, max_steps=2, gradient_clip_val=1.0)
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), twin.parameters(), strict=True))


class StateAt(L.Callback):
    def __init__(self) -> None:
        self.weights: list[Tensor] = []
        self.moments: list[Tensor] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self.weights.append(torch.cat([v.flatten() for v in trainer.strategy.lightning_module_state_dict().values()]))
        state = trainer.optimizers[0].state_dict()["state"].values()
        self.moments.append(torch.cat([v.flatten().float() for s in state for v in s.values()]))


@pytest.mark.parametrize("update", ["blocking", "next_forward"])
def test_a_bad_step_is_skipped_whole(update: str) -> None:
    state, strategy = StateAt(), MegaTrainStrategy(update=update, nonfinite="skip")
    module, _ = fit(Poisoned, strategy, precision="bf16-mixed", gradient_clip_val=1.0, callbacks=[state], max_steps=6)
    assert strategy.skipped_steps == 1
    assert torch.equal(state.weights[1], state.weights[2])
    assert torch.equal(state.moments[1], state.moments[2])
    assert not torch.equal(state.weights[2], state.weights[3])
    assert all(torch.isfinite(p).all() for p in module.parameters())


class NormLog(L.Callback):
    """Keeps the norm of each step's gradients, as torch computes it, and the factor that was applied."""

    def __init__(self) -> None:
        self.expected: list[float] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        grads = [p.grad.float() for p in module.parameters() if p.grad is not None]
        self.expected.append(float(torch.nn.utils.get_total_norm(grads)))


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", ["llama", "frozen", "moe", "tied"])
def test_the_norm_is_torchs(name: str, accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With norms taken on the device before the push, or on the host where gradients were added."""
    log, seen = NormLog(), []
    is_finite = Updater._is_finite
    monkeypatch.setattr(
        Updater, "_is_finite", lambda self, total, *args: (seen.append(total), is_finite(self, total, *args))[1]
    )
    monkeypatch.setattr("lightning_megatrain.strategy.gradients_stay_untouched", lambda trainer: True)
    fit(
        partial(zoo.ALL[name], log_norm=False),
        MegaTrainStrategy(update="next_forward"),
        precision="bf16-mixed",
        gradient_clip_val=0.5,
        accumulate_grad_batches=accumulate,
        callbacks=[log],
        max_steps=5,
    )
    assert seen == pytest.approx(log.expected, rel=1e-6)


class ScalesGradients(zoo.Llama):
    """Changes `p.grad` in both hooks, in place and by assignment."""

    def on_after_backward(self) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for i, p in enumerate(self.parameters()):
            if p.grad is not None:
                assert p.grad.shape == p.shape
                assert p.grad.dtype == p.dtype
                assert p.grad.device.type == "cpu"
                p.grad = None if i == 3 else p.grad * 2.0


def test_what_hooks_write_into_gradients_is_applied() -> None:
    arguments: dict[str, Any] = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    a, trainer_a = fit(ScalesGradients, stock(), **arguments)
    for update in ("blocking", "next_forward"):
        with under(update):
            b, trainer_b = fit(ScalesGradients, MegaTrainStrategy(update=update), **arguments)
            assert_same_bits(a, b)
            assert_same_optimizer_bits(trainer_a, trainer_b)


@pytest.mark.parametrize("update", SCHEDULES)
def test_a_failing_kernel_surfaces_once_poisons_and_leaves_nothing(
    update: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    original = AdamUpdate.update

    def failing(self: AdamUpdate, group: Any, *args: Any) -> None:
        if group.index == 2:
            raise ZeroDivisionError("planted at unit 3")
        original(self, group, *args)

    class Saver(L.Callback):
        def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
            with pytest.raises(RuntimeError, match="half-way"):
                trainer.save_checkpoint(tmp_path / "torn.ckpt")

    make = partial(zoo.Encoder, log_norm=False)
    with monkeypatch.context() as patch:
        patch.setattr(AdamUpdate, "update", failing)
        with pytest.raises(ZeroDivisionError, match="planted at unit 3"):
            fit(make, MegaTrainStrategy(update=update), precision="bf16-mixed", callbacks=[Saver()])
    assert not (tmp_path / "torn.ckpt").exists()
    assert not [t for t in threading.enumerate() if t.name.startswith("megatrain")]
    fit(make, MegaTrainStrategy(update=update), precision="bf16-mixed", max_steps=2)


def test_bf16_moments_take_eight_bytes_and_train() -> None:
    make = partial(zoo.Encoder, width=128, log_norm=False)
    strategy = MegaTrainStrategy(moments_dtype="bfloat16")
    module, trainer = fit(make, strategy, precision="bf16-mixed")
    assert strategy.host_bytes_per_parameter == pytest.approx(8, rel=0.03)
    state = next(iter(trainer.optimizers[0].state.values()))
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    assert module.losses[-1] < module.losses[0]


def test_stochastic_rounding_is_reproducible_and_keeps_small_updates() -> None:
    make = partial(zoo.Llama, log_norm=False, lr=1e-5)
    runs = [
        fit(make, MegaTrainStrategy(update=update, stochastic_rounding=on), precision="bf16-true", max_steps=5)[0]
        for update, on in (("in_backward", True), ("blocking", True), ("blocking", False))
    ]
    assert_same_bits(runs[0], runs[1])
    start = fit(make, MegaTrainStrategy(), precision="bf16-true", max_steps=0)[0]
    moved = [
        sum(int((p != q).sum()) for p, q in zip(m.parameters(), start.parameters(), strict=True)) for m in runs[1:]
    ]
    assert moved[0] > 2 * moved[1]


def test_without_a_kernel_the_reference_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    make = partial(zoo.Llama, log_norm=False)
    a, _ = fit(make, MegaTrainStrategy(), precision="bf16-mixed")
    monkeypatch.setattr(kernel, "get_kernel", lambda: None)
    monkeypatch.setattr("lightning_megatrain.update.adam.get_kernel", lambda: None)
    b, _ = fit(make, MegaTrainStrategy(), precision="bf16-mixed")
    assert_same_bits(a, b)


class GradientsOfBatches(L.Callback):
    """Gradients after each backward."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_after_backward(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert all(p.grad.shape == p.shape for p in module.parameters() if p.grad is not None)
        self.seen.append({n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None})


def gradients_of(batches: int, dtype: str, update: str) -> list[dict[str, Tensor]]:
    """The first step sums four batches, or is four steps at a learning rate of zero."""
    log = GradientsOfBatches()
    module, _ = fit(
        partial(zoo.Odd, log_norm=False, lr=0.0, weight_decay=0.0),
        MegaTrainStrategy(update=update, accumulate_dtype=dtype),
        precision="bf16-mixed",
        accumulate_grad_batches=batches,
        max_steps=4 // batches,
        callbacks=[log],
    )
    assert all(p.dtype == p.grad_dtype == torch.float32 for p in module.parameters())
    return log.seen


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch has no Tensor.grad_dtype")
@pytest.mark.parametrize("update", ["blocking", "next_forward"])
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_sums_over_batches(dtype: str, update: str) -> None:
    apart = gradients_of(1, dtype, update)
    together = gradients_of(4, dtype, update)[-1]
    wide = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    assert {g.dtype for g in apart[0].values()} == {torch.bfloat16}
    assert {g.dtype for g in together.values()} == {wide}
    for name, total in together.items():
        expected: Tensor | None = None
        for batch in apart:
            if name in batch:
                one = batch[name].to(wide) / 4  # Lightning averages over the batches; a power of two is exact
                expected = one if expected is None else (expected.float() + one.float()).to(wide)
        assert expected is not None
        assert torch.equal(total, expected), name


def test_sums_fall_back_to_bf16_where_fp32_does_not_fit() -> None:
    def run(**arguments: Any) -> MegaTrainStrategy:
        strategy = MegaTrainStrategy(update="next_forward", **arguments)
        make = partial(zoo.Llama, log_norm=False)
        fit(make, strategy, precision="bf16-mixed", accumulate_grad_batches=2, max_steps=1)
        return strategy

    wide = run().plan
    assert wide is not None
    narrow = run(host_memory=wide.host_bytes - 1).plan
    assert narrow is not None
    assert wide.host["gradients"] == 2 * narrow.host["gradients"]
