"""What only a CUDA device can show. Run with `pytest -m gpu`."""

import gc
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import zoo
from bf16_reference import StepReference
from fitting import QUIET, SCHEDULES, MegaTrainStrategy, assert_same_bits, assert_same_optimizer_bits, fit, loader
from lightning.pytorch.strategies import SingleDeviceStrategy
from rss_probe import Stack
from writing import UNITS, Rewards, Validated, WritesWithin

from lightning_megatrain.memory.arena import Arena
from lightning_megatrain.memory.device import CudaMemory
from lightning_megatrain.memory.slots import Slot, SlotRing
from lightning_megatrain.memory.split import split_master
from lightning_megatrain.stream import saved
from lightning_megatrain.stream.budget import Budget
from lightning_megatrain.stream.saved import SavedInputs
from lightning_megatrain.stream.share import DeviceShare
from lightning_megatrain.stream.streams import CudaStreams, Streams
from lightning_megatrain.update.optimizers import GroupUpdate
from lightning_megatrain.update.updater import Updater
from lightning_megatrain.update.worker import Worker

pytestmark = pytest.mark.gpu


def run(
    make: Any, precision: str = "32-true", steps: int = 8, callbacks: Any = None, trainer: Any = None, **strategy: Any
):
    return fit(
        make,
        MegaTrainStrategy(host_memory="32GiB", **strategy),
        precision=precision,
        accelerator="gpu",
        deterministic="warn",
        max_steps=steps,
        callbacks=callbacks,
        **(trainer or {}),
    )


@pytest.mark.parametrize("update", SCHEDULES)
@pytest.mark.parametrize("name", [n for n in zoo.ALL if n != "odd"])
def test_bf16_mixed_equals_the_reference(name: str, update: str) -> None:
    reference = StepReference()
    run(partial(zoo.ALL[name], scheduler=True, log_norm=False), "bf16-mixed", callbacks=[reference], update=update)
    assert reference.steps == 8
    assert reference.worst <= 1


def test_bf16_mixed_with_clipping_equals_the_reference() -> None:
    reference = StepReference(clip=0.1)
    run(zoo.Llama, "bf16-mixed", callbacks=[reference], trainer={"gradient_clip_val": 0.1})
    assert reference.worst <= 1


def random_delays(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Slow every lane and the worker down at random, up to about a millisecond an operation."""
    dice = random.Random(seed)

    def delay(lane: str) -> None:
        if dice.random() < 0.4:
            torch.cuda._sleep(dice.randrange(1, 2_000_000))

    monkeypatch.setattr(Streams, "on", staticmethod(lambda device: CudaStreams(device, delay)))
    do = Worker._do

    def slow(self: Worker, task: Callable[[], None]) -> None:
        time.sleep(dice.random() * 1e-3)
        do(self, task)

    monkeypatch.setattr(Worker, "_do", slow)


@pytest.mark.parametrize("update", SCHEDULES)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", ["llama", "frozen", "odd", "moe"])
def test_random_delays_change_no_bit(name: str, precision: str, update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = partial(zoo.ALL[name], log_norm=update == "blocking")
    accumulate = {} if update == "in_backward" else {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    a, trainer_a = run(make, precision, update=update, prefetch=0, trainer=accumulate)
    for seed in range(3):
        with monkeypatch.context() as patch:
            random_delays(patch, seed)
            b, trainer_b = run(make, precision, update=update, prefetch=seed, trainer=accumulate)
        assert_same_bits(a, b)
        assert_same_optimizer_bits(trainer_a, trainer_b)


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_fifty_delayed_steps_agree_to_the_bit(
    precision: str, clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = partial(zoo.Cosine, log_norm=False)
    trainer = {"gradient_clip_val": clip, "samples": 240}
    a, trainer_a = run(make, precision, steps=50, update="blocking", trainer=trainer)
    for update in SCHEDULES[1 : 2 if clip else 3]:
        with monkeypatch.context() as patch:
            random_delays(patch, seed=1)
            b, trainer_b = run(make, precision, steps=50, update=update, trainer=trainer)
        assert_same_bits(a, b)
        assert_same_optimizer_bits(trainer_a, trainer_b)


@pytest.mark.parametrize("width", [32, 256])
def test_the_norm_taken_on_the_device_is_torchs(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, expected = [], []
    clip = Updater.clip_by_norm

    def noted(self: Updater, optimizer: Any, limit: float, *, untouched: bool) -> None:
        assert untouched
        assert len(self.gradients._norms) >= 4
        # In double: at this size torch's own fp32 norm is off by as much as the tolerance.
        grads = [p.grad.double() for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        expected.append(float(torch.nn.utils.get_total_norm(grads)))
        norms = self.gradients.norms(set(self._parameters_of(optimizer)), untouched=True)
        seen.append(sum(n * n for n in norms.values()) ** 0.5)
        clip(self, optimizer, limit, untouched=untouched)

    monkeypatch.setattr(Updater, "clip_by_norm", noted)
    make = partial(zoo.Encoder, log_norm=False, width=width)
    trainer = {"gradient_clip_val": 0.1}
    run(make, "bf16-mixed", update="next_forward", device_update="never", trainer=trainer)
    assert len(seen) == 8
    assert seen == pytest.approx(expected, rel=1e-6)


def test_gradients_equal_the_stock_strategys() -> None:
    """The optimizer runs on another processor here, so weights may differ in the last place; one step's losses and
    gradient norms may not."""
    a, _ = fit(zoo.Encoder, "auto", accelerator="gpu", deterministic="warn", max_steps=1)
    b, _ = run(zoo.Encoder, steps=1)
    assert torch.equal(a.losses[0], b.losses[0])
    torch.testing.assert_close(a.norms[0], b.norms[0], rtol=1e-6, atol=0)
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(x.cpu(), y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_validate_fit_validate(precision: str) -> None:
    L.seed_everything(1, verbose=False)
    module = zoo.Tied()
    strategy = MegaTrainStrategy(host_memory="32GiB")
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="gpu",
        devices=1,
        precision=precision,
        max_steps=6,
        val_check_interval=3,
        **QUIET,
    )
    first = trainer.validate(module, loader(16), verbose=False)[0]["val_loss"]
    trainer.fit(module, loader(), loader(16))
    last = trainer.validate(module, loader(16), verbose=False)[0]["val_loss"]
    assert last < first
    assert all(p.device.type == "cpu" and p.dtype == torch.float32 for p in module.parameters())
    del strategy, trainer
    gc.collect()


def test_arenas_are_pinned_exactly_and_unregistered() -> None:
    for _ in range(3):
        arena = Arena(3 * 2**20 + 4096, pin=True)
        assert arena.pinned
        view = arena.view(torch.float32, 1024)
        assert view.is_pinned()
        assert torch.equal(view.cuda(non_blocking=True).cpu(), view)
        arena.close()
        assert not view.is_pinned()


def peak(width: int, layers: int, rows: int, **strategy: Any) -> tuple[int, dict[str, int]]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    chosen = MegaTrainStrategy(host_memory="64GiB", recompute="always", **strategy)
    trainer = L.Trainer(strategy=chosen, accelerator="gpu", devices=1, precision="bf16-mixed", max_steps=3, **QUIET)
    trainer.fit(Stack(width, layers), torch.utils.data.DataLoader(torch.randn(4 * rows, 16), batch_size=rows))
    assert chosen.plan is not None
    return torch.cuda.max_memory_allocated() - base, chosen.plan.device


@pytest.mark.parametrize("prefetch", [1, 3])
def test_peak_device_memory_follows_the_formula_and_not_the_depth(prefetch: int) -> None:
    width, rows = 1024, 64
    deep, plan = peak(width, 40, rows, prefetch=prefetch)
    shallow, _ = peak(width, 20, rows, prefetch=prefetch)
    unit = plan["slots"] // (prefetch + 1)
    # One block at work, at most fp32 throughout, forward and backward: x, norm, up and relu, down, sum, twice; plus
    # saved inputs of every unit; plus cuBLAS's workspaces, 8 x 4 MiB (CUBLAS_WORKSPACE_CONFIG) for each of the two
    # threads that multiply (forward and autograd's), which Lightning frees at the end of every fit.
    block = 2 * rows * (4 * width + 2 * 4 * width) * 4
    saved = 40 * rows * width * 4
    workspaces = 2 * 8 * 4 * 2**20
    print(f"peak {deep / 2**20:.1f} MiB, unit {unit / 2**20:.1f}, plan {sum(plan.values()) / 2**20:.1f}")
    # Autograd's own gradients of one unit exist while they are packed.
    assert deep <= sum(plan.values()) + unit + block + saved + workspaces
    assert deep - shallow <= 20 * rows * width * 4 + 2**20


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", list(zoo.ALL))
def test_kept_graphs_change_no_bit(name: str, precision: str) -> None:
    make = partial(zoo.ALL[name], log_norm=False)
    runs = [
        run(make, precision, update="in_backward", device_update="never", recompute=recompute, prefetch=prefetch)
        for recompute, prefetch in (("always", 1), ("never", 1), ("auto", 0))
    ]
    for module, trainer in runs[1:]:
        assert_same_bits(runs[0][0], module)
        assert_same_optimizer_bits(runs[0][1], trainer)


@pytest.mark.parametrize("update", SCHEDULES)
@pytest.mark.parametrize("name", ["llama", "encoder", "gpt2"])
def test_inputs_that_wait_on_the_host_change_no_bit(name: str, update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed = []
    push = SavedInputs._push
    monkeypatch.setattr(saved, "_SMALLEST", 1)
    monkeypatch.setattr(SavedInputs, "_push", lambda self, *args: (pushed.append(1), push(self, *args))[1])
    make = partial(zoo.ALL[name], log_norm=False)
    arguments = {"update": update, "recompute": "always", "microbatch": 3}
    a, trainer_a = run(make, "bf16-mixed", activations="device", **arguments)
    assert not pushed
    for seed in range(3):
        with monkeypatch.context() as patch:
            random_delays(patch, seed)
            b, trainer_b = run(make, "bf16-mixed", activations="host", prefetch=seed, **arguments)
        assert len(pushed) >= 8 * (seed + 1) * 2
        assert_same_bits(a, b)
        assert_same_optimizer_bits(trainer_a, trainer_b)


@pytest.mark.parametrize("make", [Validated, Rewards])
def test_weights_that_stay_between_uses_change_no_bit(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"val_check_interval": 2, "limit_val_batches": 2, "num_sanity_val_steps": 2}

    def go() -> tuple[Any, int]:
        kept = 0
        keep = SlotRing.keep

        def counting(ring: SlotRing, slot: Slot) -> Slot:
            nonlocal kept
            kept += 1
            return keep(ring, slot)

        with monkeypatch.context() as patch:
            patch.setattr(SlotRing, "keep", counting)
            return run(make, steps=6, trainer=settings, prefetch=1)[0], kept

    with monkeypatch.context() as patch:
        patch.setattr(Budget, "borrow", lambda *_: False)
        plain, kept = go()
    assert kept == 0
    for seed in range(3):
        with monkeypatch.context() as patch:
            random_delays(patch, seed)
            other, kept = go()
        assert kept >= UNITS
        assert_same_bits(plain, other)
        assert all(torch.equal(a, b) for a, b in zip(plain.written, other.written, strict=True))


@pytest.mark.parametrize("how", ["assigned", "in place"])
def test_what_a_step_writes_to_weights_counts(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where their fetch is under way already."""
    make = partial(WritesWithin, how, "net.layers.1", late=True)
    plain, _ = fit(make, SingleDeviceStrategy("cuda:0"), accelerator="gpu", deterministic="warn", max_steps=8)
    ours = []
    for seed in range(3):
        with monkeypatch.context() as patch:
            random_delays(patch, seed)
            ours.append(run(make, update="blocking")[0])
        assert_same_bits(ours[0], ours[-1])
    expected = torch.stack(plain.losses).cpu()
    assert torch.allclose(torch.stack(ours[0].losses).cpu(), expected, rtol=1e-3)


def test_slices_of_the_sequence_are_close() -> None:
    make = partial(zoo.Llama, log_norm=False)
    a, _ = run(make, steps=4)
    b, _ = run(make, steps=4, sequence_chunks=3)
    for x, y in zip(a.losses, b.losses, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def note_taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Half of the host's updates are waited for, so groups move; their names."""
    taken: list[str] = []
    take = DeviceShare._take
    monkeypatch.setattr(DeviceShare, "_last_step", lambda self: (1.0, 0.5, 1.0))
    monkeypatch.setattr(
        DeviceShare, "_take", lambda self, group, by: (taken.append(group.name), take(self, group, by))[1]
    )
    return taken


@pytest.mark.parametrize("update", SCHEDULES)
def test_updates_on_the_device_give_the_hosts_bits(update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"trainer": {} if update == "in_backward" else {"gradient_clip_val": 0.3}}
    make = partial(zoo.Llama, log_norm=False)
    host, _ = run(make, "bf16-mixed", update=update, steps=9, device_update="never", **arguments)
    taken = note_taken(monkeypatch)
    device, _ = run(make, "bf16-mixed", update=update, steps=9, **arguments)
    assert len(taken) > 1
    assert_same_bits(host, device)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("compiled", [False, True])
def test_losses_of_twenty_steps(compiled: bool, clip: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    make = partial(zoo.Llama, log_norm=False, lr=1e-3)
    arguments = {"steps": 20, "trainer": {"gradient_clip_val": clip}}
    plain = {"update": "blocking", "recompute": "always", "device_update": "never", "prefetch": 1}
    a, _ = run(make, "bf16-mixed", **plain, **arguments)
    taken = note_taken(monkeypatch)
    b, _ = run(make, "bf16-mixed", compile=compiled, prefetch=1, **arguments)
    assert taken
    assert len(a.losses) == len(b.losses) == 20
    for x, y in zip(a.losses, b.losses, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-2 if compiled else 0.0)


def test_the_device_kernel_is_used_and_reads_memory_once() -> None:
    from lightning_megatrain.update.adam import AdamScalars
    from lightning_megatrain.update.device import _kernel_for, adam_device_
    from lightning_megatrain.update.reference import adam_on_device

    assert _kernel_for(torch.device("cuda", 0)) is not None
    numel = (1 << 24) + 3
    master, grad = torch.randn(numel), torch.randn(numel).bfloat16().cuda()
    halves = [t.cuda() for t in split_master(master)]
    moments = [torch.randn(numel).cuda(), torch.rand(numel).cuda()]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    mine = [t.clone() for t in (*halves, *moments)]
    adam_device_(*mine, grad, AdamScalars(weight_decay=0.1), 7, 0.3)
    assert torch.cuda.max_memory_allocated() - before == sum(t.nbytes for t in mine) // 512 * 512 + 4 * 512
    expected = [t.clone() for t in (*halves, *moments)]
    adam_on_device(*expected, grad, AdamScalars(weight_decay=0.1).at(7, 0.3))
    assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))


def test_free_memory_between_tensors_is_within_reach_at_a_limit() -> None:
    torch.cuda.empty_cache()
    mib = 2**20
    memory = CudaMemory(torch.device("cuda", 0), torch.cuda.memory_reserved() + 700 * mib)
    try:
        whole = torch.empty(400 * mib, dtype=torch.uint8, device="cuda")
        del whole  # a segment of fixed size would be cut up now, and neither be used for more nor given back
        parts = [torch.empty((30 if i % 2 else 10) * mib, dtype=torch.uint8, device="cuda") for i in range(20)]
        kept = parts[::2]
        del parts
        assert sum(part.nbytes for part in kept) == 100 * mib
        # Each of them holds a page of 20 MiB.
        assert torch.empty(490 * mib, dtype=torch.uint8, device="cuda").nbytes == 490 * mib
    finally:
        memory.close()
        kept = []
        torch.cuda.empty_cache()


# Warnings are errors: no graph is given back, even where the limit is small.
@pytest.mark.parametrize("limit", [0.02, 0.5])
def test_kept_graphs_stay_within_the_limit(limit: float) -> None:
    width, rows = 1024, 4096
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    chosen = MegaTrainStrategy(host_memory="64GiB", device_memory=limit)
    trainer = L.Trainer(strategy=chosen, accelerator="gpu", devices=1, precision="bf16-mixed", max_steps=6, **QUIET)
    trainer.fit(Stack(width, 40), torch.utils.data.DataLoader(torch.randn(6 * rows, 16), batch_size=rows))
    assert torch.cuda.max_memory_reserved() <= limit * total
    assert torch.cuda.max_memory_allocated() - base > 0


class Ballast(torch.autograd.Function):
    """Takes memory for a moment, in the forward or the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, where: str, nbytes: int) -> torch.Tensor:
        ctx.nbytes = nbytes if where == "backward" else 0
        torch.empty(nbytes - ctx.nbytes, dtype=torch.uint8, device=x.device)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        torch.empty(ctx.nbytes, dtype=torch.uint8, device=gradient.device)
        return gradient, None, None


class TakesMore(Stack):
    """From its fourth step on, the loss takes half of what the strategy may use."""

    def __init__(self, where: str) -> None:
        super().__init__(1024, 40)
        self.where = where

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return Ballast.apply(loss, self.where, 3 * 2**29) if self.where and batch_idx >= 3 else loss


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_memory_that_others_take_is_given_back(where: str) -> None:
    def go(where: str) -> tuple[dict[str, torch.Tensor], int]:
        L.seed_everything(1, verbose=False)
        module, data = TakesMore(where), torch.randn(6 * 4096, 16)
        chosen = MegaTrainStrategy(host_memory="64GiB", device_memory="3GiB", device_update="never")
        trainer = L.Trainer(strategy=chosen, accelerator="gpu", devices=1, precision="bf16-mixed", max_steps=6, **QUIET)
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4096))
        return module.state_dict(), chosen.kept_graphs

    torch.cuda.empty_cache()
    plain, many = go("")
    with pytest.warns(RuntimeWarning, match="outside the units"):
        ours, few = go(where)
    assert 0 < few < many
    assert all(torch.equal(value, ours[name]) for name, value in plain.items())


def test_a_worker_error_surfaces_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_megatrain.update.optimizers import AdamUpdate

    def update(self: GroupUpdate, group: Any, *args: Any) -> None:
        raise ZeroDivisionError("planted")

    make = partial(zoo.Llama, log_norm=False)
    with monkeypatch.context() as patch:
        patch.setattr(AdamUpdate, "update", update)
        with pytest.raises(ZeroDivisionError, match="planted"):
            run(make, "bf16-mixed", update="in_backward")
    run(make, "bf16-mixed", update="in_backward", steps=2)


def test_parameters_on_the_gpu_are_refused() -> None:
    with pytest.raises(ValueError, match=r"is on cuda:0.*build the module on the CPU"):
        run(lambda: zoo.Encoder().cuda())
