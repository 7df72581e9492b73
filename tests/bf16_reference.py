"""What a step of `bf16-mixed` and `bf16-true` must compute, written out without any streaming."""

import copy
import math
from typing import Any

import lightning as L
import torch
from torch import Tensor
from zoo import Zoo

from lightning_megatrain.memory.split import split_master
from lightning_megatrain.memory.store import StoreFormat


def ulps(a: Tensor, b: Tensor, *operands: Tensor) -> float:
    """Largest difference in units of the last place of the largest operand, for a sum may cancel and its error not."""
    largest = torch.stack([x.double().abs() for x in (a, b, *operands)]).amax(0)
    spacing = torch.ldexp(torch.ones_like(largest), torch.frexp(largest)[1] - 24).clamp_min(2.0**-149)
    return float(((a.double() - b.double()).abs() / spacing).max()) if a.numel() else 0.0


def adamw(
    p: Tensor, state: dict[str, Tensor] | None, g: Tensor, group: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loshchilov and Hutter (2019), algorithm 2, one fp32 operation at a time.

    `torch.optim.AdamW` fuses the first moment's multiply and add where the processor can; where a moment cancels, the
    difference grows beyond an ulp of the weight. `tests/update` compares with it.
    """
    state = state or {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    step, (beta1, beta2), lr = int(state["step"]) + 1, group["betas"], group["lr"]
    p = p * (1 - lr * group["weight_decay"])
    m = state["exp_avg"] + (g - state["exp_avg"]) * (1 - beta1)
    v = state["exp_avg_sq"] * beta2
    v = v + ((1 - beta2) * g) * g
    root = v.double().sqrt().float()  # correctly rounded, which MKL's fp32 root is not
    denominator = root / math.sqrt(1 - beta2**step) + group["eps"]
    p = p + (-lr / (1 - beta1**step) * m) / denominator
    return p, {"step": torch.tensor(float(step)), "exp_avg": m, "exp_avg_sq": v}


class StepReference(L.Callback):
    """Recomputes every training step from the state before it and compares the state after it.

    The reference: bf16 weights that are the rounded masters, forward and backward under the same precision contexts and
    from the same random state, gradients in bf16, clipping by `clip_grad_norm_`'s factor, AdamW in fp32.
    """

    def __init__(self, clip: float | None = None, applied: list[float] | None = None) -> None:
        self.clip = clip
        self.applied = applied  # factors the updater used: its norm may differ in the last places of an fp32 sum
        self.steps = 0
        self.worst = 0.0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.plain = copy.deepcopy(pl_module)

    def _masters(self, trainer: L.Trainer, module: L.LightningModule) -> dict[str, Tensor]:
        state = trainer.strategy.lightning_module_state_dict()
        return {n: state[n].detach().clone().float() for n, _ in module.named_parameters()}

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Tensor, i: int) -> None:
        optimizer = trainer.optimizers[0]
        self.masters = self._masters(trainer, pl_module)
        self.state = {
            n: {k: v.clone() for k, v in optimizer.state[p].items()}
            for n, p in pl_module.named_parameters()
            if p in optimizer.state
        }
        self.groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        self.names = [
            [n for n, p in pl_module.named_parameters() if any(p is q for q in g["params"])]
            for g in optimizer.param_groups
        ]
        self.random = torch.get_rng_state()
        self.cuda_random = torch.cuda.get_rng_state() if trainer.strategy.root_device.type == "cuda" else None
        self.batch = batch.clone()
        self.buffers = {n: b.clone() for n, b in pl_module.named_buffers()}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        now = torch.get_rng_state()
        torch.set_rng_state(self.random)
        cuda_now = None
        if self.cuda_random is not None:
            cuda_now = torch.cuda.get_rng_state()
            torch.cuda.set_rng_state(self.cuda_random)
        expected = self._step(trainer)
        torch.set_rng_state(now)
        if cuda_now is not None:
            torch.cuda.set_rng_state(cuda_now)
        after = self._masters(trainer, pl_module)
        for name, (master, state, gradient) in expected.items():
            self.worst = max(self.worst, ulps(after[name], master, self.masters[name]))
            mine = trainer.optimizers[0].state[pl_module.get_parameter(name)]
            before = self.state.get(name, {"exp_avg": torch.zeros_like(master)})["exp_avg"]
            self.worst = max(self.worst, ulps(mine["exp_avg"], state["exp_avg"], before, gradient * 0.1))
            self.worst = max(self.worst, ulps(mine["exp_avg_sq"], state["exp_avg_sq"]))
            assert mine["step"] == state["step"]
        untouched = set(after) - set(expected)
        assert all(torch.equal(after[n], self.masters[n]) for n in untouched)
        self.steps += 1

    def _step(self, trainer: L.Trainer) -> dict[str, tuple[Tensor, dict[str, Tensor], Tensor]]:
        plain, precision = self.plain, trainer.strategy.precision_plugin
        device = trainer.strategy.root_device
        split = precision.store_format is StoreFormat.SPLIT
        assert isinstance(plain, Zoo)
        for name, parameter in plain.named_parameters():
            master = self.masters[name]
            wire = split_master(master.view(-1))[0].view_as(master) if split else master.to(torch.bfloat16)
            parameter.data = wire.to(device)
            parameter.grad = None
        for name, buffer in self.buffers.items():
            owner, _, leaf = name.rpartition(".")
            plain.get_submodule(owner)._buffers[leaf] = buffer.clone()
        plain._device = device
        plain.train()
        with precision.train_step_context():
            loss = plain.loss(self.batch.to(device))
        loss.backward()
        gradients = {n: p.grad.cpu().float() for n, p in plain.named_parameters() if p.grad is not None}
        scale = 1.0
        if self.clip is not None:
            norm = torch.stack([g.double().norm() for g in gradients.values()]).norm().item()
            scale = min(1.0, self.clip / (norm + 1e-6))
            if self.applied is not None:
                assert abs(self.applied[-1] / scale - 1) < 1e-6
                scale = self.applied[-1]
        result = {}
        for names, group in zip(self.names, self.groups, strict=True):
            for name in names:
                if name not in gradients:
                    continue
                gradient = gradients[name] * scale if scale != 1.0 else gradients[name]
                master, state = adamw(self.masters[name], self.state.get(name), gradient, group)
                result[name] = (master if split else master.to(torch.bfloat16).float(), state, gradient)
        return result
