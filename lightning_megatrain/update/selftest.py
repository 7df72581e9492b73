"""Some milliseconds of comparison between the compiled kernel and the reference, before the kernel gets a model.

It catches a library built with value-changing compiler flags (contraction, fast-math), a vector path that is wrong
on this machine, and a layout of arguments that does not match. The thorough comparison is in the tests.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_megatrain.memory.split import split_master
from lightning_megatrain.update import reference
from lightning_megatrain.update.reference import AdamScalars

if TYPE_CHECKING:
    from lightning_megatrain.update.kernel import Kernel

_NUMEL = 1037  # full vectors of every width, and a tail
_STEP = 3


def first_difference(kernel: "Kernel") -> str | None:
    """Name the first of the kernel's functions that is not bit for bit its reference, or None if all are."""
    from lightning_megatrain.update.kernel import Store

    generator = torch.Generator().manual_seed(0)

    def random(spread: float) -> Tensor:
        """Values across many binades: exponents normal around 0 with the given spread."""
        exponent = torch.randn(_NUMEL, generator=generator) * spread
        return torch.randn(_NUMEL, generator=generator) * torch.exp2(exponent)

    hypers = (
        AdamScalars(lr=1e-2, weight_decay=0.1),
        AdamScalars(lr=1e-2, beta1=0.3, weight_decay=0.1, decoupled=False, maximize=True),
    )
    keys = reference.stochastic_keys(seed=1, step=_STEP)
    for hyper in hypers:
        c = hyper.at(_STEP, scale=0.7)
        for store in Store:
            for moments in (torch.float32, torch.bfloat16):
                for grads in (torch.float32, torch.bfloat16):
                    master, grad = random(4.0), random(8.0).to(grads)
                    m, v = random(8.0).to(moments), random(20.0).abs().to(moments)
                    low = None
                    if store is Store.SPLIT:
                        master, low = split_master(master)
                    elif store is not Store.FP32:
                        master = master.bfloat16()
                    state = [t for t in (m, v, master, low) if t is not None]
                    expected = [t.clone() for t in state]
                    em, ev, ep = expected[:3]

                    kernel.adam(store, master, low, m, v, grad, c, keys, offset=7, threads=1)
                    if store is Store.SPLIT:
                        reference.adam_split_reference(ep, expected[3], em, ev, grad, c)
                    elif store is Store.FP32:
                        reference.adam_fp32_reference(ep, em, ev, grad, c)
                    else:
                        stochastic = keys if store is Store.BF16_STOCHASTIC else None
                        reference.adam_bf16_reference(ep, em, ev, grad, c, stochastic, offset=7)
                    if not all(map(_same_bits, state, expected)):
                        return f"adam on {store.name.lower()}, moments {moments}, gradients {grads}"

    for dtype in (torch.float32, torch.bfloat16):
        x, y = random(8.0).to(dtype), random(8.0)
        if kernel.sum_of_squares(x, threads=1) != reference.sum_of_squares_reference(x):
            return f"sum of squares of {dtype}"
        expected_sum = x.clone()
        kernel.accumulate(x, y, threads=1)
        reference.accumulate_reference(expected_sum, y)
        if not _same_bits(x, expected_sum):
            return f"accumulate into {dtype}"
    return None


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
