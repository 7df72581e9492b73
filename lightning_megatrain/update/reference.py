"""The host update written out in torch: what the C kernel must equal bit for bit, and what runs without it.

One step of AdamW (``decoupled``) or Adam, after Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019),
algorithm 2, in the order of operations of ``torch.optim``'s single-tensor loop. Each line is one or more fp32
operations, each rounded once; nothing is fused::

    g = grad * scale                        (negated if maximize)
    g = g + weight_decay * p                (Adam)
    p = p * (1 - lr * weight_decay)         (AdamW)
    m = m + (g - m) * (1 - beta1)           (g - (g - m) * beta1 if 1 - beta1 >= 0.5, as torch.lerp)
    v = v * beta2
    v = v + ((1 - beta2) * g) * g
    d = sqrt(v) / sqrt(1 - beta2 ** step) + eps
    p = p + (-lr / (1 - beta1 ** step) * m) / d

Scalars are worked out in double and rounded once to fp32. torch's own loop differs in three roundings: its ``lerp``
and ``addcmul`` are fused multiply-adds where the processor has them, and its ``sqrt`` may be MKL's, good to one
unit in the last place.

Moments kept in bf16 are widened to fp32, used, and rounded to nearest even. So is a bf16 parameter, unless it is
rounded stochastically: see :func:`random16`. NaNs stay NaNs everywhere; their payloads are not part of the
contract.

Tensors are flat and contiguous; ``adam.py`` checks that. They are on the CPU, but for :func:`adam_on_device`, which
runs the same operations where the tensors are: each is rounded as IEEE 754 says there too, so the bits are the same.
Temporaries stay near ``CHUNK`` or ``DEVICE_CHUNK`` elements.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatrain.memory.split import join_master, join_whole, split_master_, split_whole_

CHUNK = 1 << 20  # elements
DEVICE_CHUNK = 1 << 23  # elements: a launch must be worth its microseconds
SUM_LANES, SUM_CHUNK = 16, 1 << 14  # the kernel's order of additions
_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True)
class AdamCoefficients:
    """The scalars of one step as the loop uses them: Python floats that are exact in fp32.

    ``grad_factor`` is the scale with ``maximize``'s sign, ``decay`` is 1 and ``l2`` is 0 where they do not apply:
    multiplying by one is exact, so the loop needs no branch. ``lerp_weight`` already has the sign that
    ``lerp_from_grad`` asks for.
    """

    grad_factor: float
    decay: float
    l2: float
    lerp_weight: float
    beta2: float
    grad_sq_weight: float
    bias2_sqrt: float
    eps: float
    step_size: float
    coupled: bool
    lerp_from_grad: bool


@dataclass(frozen=True)
class AdamScalars:
    """Hyperparameters of one parameter group: of ``torch.optim.AdamW`` if ``decoupled``, else of
    ``torch.optim.Adam``."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True
    maximize: bool = False

    def at(self, step: int, scale: float = 1.0) -> AdamCoefficients:
        """Coefficients of the ``step``-th update (the first is 1) of gradients that are to be multiplied by ``scale``.

        Raises:
            ValueError: ``step`` is less than one.
        """
        if step < 1:
            raise ValueError(f"Adam counts its steps from 1, got step={step}; pass the count after this update.")
        weight = _fp32(1 - self.beta1)
        from_grad = weight >= 0.5
        return AdamCoefficients(
            grad_factor=_fp32(-scale if self.maximize else scale),
            decay=_fp32(1 - self.lr * self.weight_decay) if self.decoupled else 1.0,
            l2=0.0 if self.decoupled else _fp32(self.weight_decay),
            lerp_weight=_fp32(weight - 1) if from_grad else weight,
            beta2=_fp32(self.beta2),
            grad_sq_weight=_fp32(1 - self.beta2),
            bias2_sqrt=_fp32((1 - self.beta2**step) ** 0.5),
            eps=_fp32(self.eps),
            step_size=_fp32(-(self.lr / (1 - self.beta1**step))),
            coupled=not self.decoupled and self.weight_decay != 0,
            lerp_from_grad=from_grad,
        )


def adam_split_reference(
    high: Tensor,
    low: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    coefficients: AdamCoefficients,
) -> None:
    """One step on a split master; tensors as in :func:`~lightning_megatrain.update.adam.adam_split_`."""
    for part in _chunks(grad.numel()):
        master = join_master(high[part], low[part])
        _adam(master, exp_avg[part], exp_avg_sq[part], grad[part], coefficients)
        split_master_(master, high[part], low[part])


def adam_on_device(
    high: Tensor,
    low: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    coefficients: AdamCoefficients,
) -> None:
    """:func:`adam_split_reference` on tensors of any device, which it never waits for."""
    for part in _chunks(grad.numel(), DEVICE_CHUNK):
        master = join_whole(high[part], low[part])
        _adam(master, exp_avg[part], exp_avg_sq[part], grad[part], coefficients)
        split_whole_(master, high[part], low[part])


def adam_bf16_reference(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    coefficients: AdamCoefficients,
    keys: tuple[int, int] | None = None,
    offset: int = 0,
) -> None:
    """One step on a bf16 parameter, rounded to nearest even, or stochastically if ``keys`` are given."""
    for part in _chunks(grad.numel()):
        wide = param[part].float()
        _adam(wide, exp_avg[part], exp_avg_sq[part], grad[part], coefficients)
        if keys is None:
            param[part].copy_(wide)
        else:
            _round_stochastic_(param[part], wide, keys, offset + part.start)


def adam_fp32_reference(
    param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, coefficients: AdamCoefficients
) -> None:
    """One step on an fp32 parameter."""
    for part in _chunks(grad.numel()):
        _adam(param[part], exp_avg[part], exp_avg_sq[part], grad[part], coefficients)


def _adam(p: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, c: AdamCoefficients) -> None:
    """The formulas of the module docstring on one chunk; ``p`` is fp32 and updated in place, so are the moments."""
    m, v = exp_avg.float(), exp_avg_sq.float()  # the tensors themselves when they are fp32
    g = grad.float() * c.grad_factor
    if c.coupled:
        g += p * c.l2
    p *= c.decay
    d = (g - m) * c.lerp_weight
    torch.add(g if c.lerp_from_grad else m, d, out=m)
    v *= c.beta2
    v += (g * c.grad_sq_weight).mul_(g)
    # torch's fp32 sqrt may be MKL's, which is not correctly rounded. In double an error of one unit cannot reach the
    # fp32 result: the root of a 24-bit number is never within 2**-51 (relative) of a point halfway between two others.
    root = v.double().sqrt_().float()
    # By a tensor: CUDA would divide by a Python number through its reciprocal, which is rounded once more.
    denom = root.div_(root.new_full((), c.bias2_sqrt)).add_(c.eps)
    p += (m * c.step_size).div_(denom)
    if m is not exp_avg:
        exp_avg.copy_(m)
        exp_avg_sq.copy_(v)


def stochastic_keys(seed: int, step: int) -> tuple[int, int]:
    """Two 32-bit keys for :func:`random16` from a seed and a step: splitmix64 (Steele, Lea and Flood, 2014)."""
    z = (seed * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    z ^= z >> 31
    return z & _MASK32, z >> 32


def random16(index: Tensor, keys: tuple[int, int]) -> Tensor:
    """16 uniform bits for each element, a function of nothing but its index in the whole (int64) and the keys.

    So the result does not depend on how a run of parameters is cut or on the number of threads. The mixer is
    lowbias32 (C. Wellons, "Prospecting for Hash Functions"), its two rounds keyed apart.
    """
    x = (index & _MASK32) ^ keys[0] ^ (((index >> 32) * 0x9E3779B9) & _MASK32)
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK32
    x = x ^ (x >> 15) ^ keys[1]
    x = (x * 0x846CA68B) & _MASK32
    return (x ^ (x >> 16)) & 0xFFFF


def _round_stochastic_(out: Tensor, value: Tensor, keys: tuple[int, int], offset: int) -> None:
    """Round fp32 ``value`` to bf16 ``out``: away from zero as often as the share of the gap it covers."""
    bits = value.view(torch.int32).to(torch.int64) & _MASK32
    index = torch.arange(offset, offset + value.numel(), dtype=torch.int64)
    rounded = (bits + random16(index, keys)) >> 16
    rounded = torch.where(value.isnan(), (bits >> 16) | 0x0040, rounded)
    out.view(torch.int16).copy_(rounded)


def sum_of_squares_reference(x: Tensor) -> float:
    """Sum of squares in double, in the kernel's order: 16 lanes down rows of 16, lanes in order, chunks in order."""
    total = 0.0
    for part in _chunks(x.numel()):
        squares = x[part].double().square_()
        padding = -squares.numel() % SUM_CHUNK
        rows = torch.nn.functional.pad(squares, (0, padding)).view(-1, SUM_CHUNK // SUM_LANES, SUM_LANES)
        # cumsum, unlike sum, adds strictly in order. Padded zeros change nothing.
        lanes = rows.cumsum(1)[:, -1]
        for chunk in lanes.cumsum(1)[:, -1].tolist():
            total += chunk
    return total


def accumulate_reference(dst: Tensor, src: Tensor) -> None:
    """``dst += src``, added in fp32 and rounded once to ``dst``'s dtype."""
    for part in _chunks(dst.numel()):
        dst[part].copy_(dst[part].float() + src[part].float())


def _chunks(numel: int, size: int = CHUNK) -> Iterator[slice]:
    for start in range(0, numel, size):
        yield slice(start, min(start + size, numel))


def _fp32(x: float) -> float:
    return ctypes.c_float(x).value
