"""The update of groups that the device holds: one pass over its memory, with the bits of the host's.

The kernel is CUDA C, compiled when it is first needed by the compiler library that torch brings along. Where that is
not possible the torch reference runs on the device, with the same bits and several times the traffic.
"""

import functools
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from lightning_megatrain.update.reference import AdamCoefficients, AdamScalars, adam_on_device

SOURCE = Path(__file__).parent / "csrc" / "adam_device.cu"

_FLAGS = ["--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false"]
_THREADS, _BLOCKS = 256, 4096
_MOST = 1 << 30
"""Elements of one launch: counts are passed as 32-bit numbers."""

DeviceKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, AdamCoefficients], None]


def adam_device_(
    high: Tensor,
    low: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    hyper: AdamScalars,
    step: int,
    scale: float = 1.0,
) -> None:
    """One step on a split master, as :func:`~lightning_megatrain.update.adam.adam_split_`, where the tensors are.

    Args:
        high: bf16 ``[n]``.
        low: int16 ``[n]``.
        exp_avg: fp32 or bf16 ``[n]``.
        exp_avg_sq: as ``exp_avg``.
        grad: bf16 ``[n]``; only read.
        hyper: the group's hyperparameters.
        step: count of updates including this one; the first is 1.
        scale: factor on the gradient, applied on the fly in fp32.

    Raises:
        ValueError: ``step`` is less than 1.
    """
    coefficients = hyper.at(step, scale)
    kernel = _kernel_for(grad.device) if grad.is_cuda and exp_avg.dtype == torch.float32 else None
    (kernel or adam_on_device)(high, low, exp_avg, exp_avg_sq, grad, coefficients)


@functools.cache
def _kernel_for(device: torch.device) -> DeviceKernel | None:
    """The compiled kernel if it gives the reference's bits on this device, else None with a warning."""
    try:
        with torch.cuda.device(device):
            kernel = _compile()
            _check(kernel, device)
            return kernel
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        warnings.warn(
            f"The device's update kernel could not be used ({reason}), so updates on the device run in torch, with the "
            "same numbers and more slowly; use a release of torch that has torch.cuda._compile_kernel.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _compile() -> DeviceKernel:
    from torch.utils import cpp_extension  # slow to import

    # torch looks for the headers of a CUDA toolkit, which need not be there: the source includes nothing.
    with mock.patch.object(cpp_extension, "include_paths", return_value=[]):
        compiled = torch.cuda._compile_kernel(SOURCE.read_text(), "adam_split", nvcc_options=list(_FLAGS))

    def run(high: Tensor, low: Tensor, m: Tensor, v: Tensor, grad: Tensor, c: AdamCoefficients) -> None:
        for start in range(0, grad.numel(), _MOST):
            parts = [tensor[start : start + _MOST] for tensor in (high, low, m, v, grad)]
            count = parts[-1].numel()
            blocks = min(_BLOCKS, -(-count // _THREADS))
            compiled(grid=(blocks, 1, 1), block=(_THREADS, 1, 1), args=[*parts, count, *scalars(c)])

    return run


def scalars(c: AdamCoefficients) -> list[int]:
    """The kernel's arguments after the count: floats as their bit patterns, for torch passes Python's as doubles."""
    values = (c.grad_factor, c.decay, c.l2, c.lerp_weight, c.beta2, c.grad_sq_weight, c.bias2_sqrt, c.eps, c.step_size)
    return [*struct.unpack("9i", struct.pack("9f", *values)), int(c.coupled), int(c.lerp_from_grad)]


def _check(kernel: DeviceKernel, device: torch.device) -> None:
    """Hold the kernel against the reference, on values of every size.

    Raises:
        RuntimeError: a bit differs.
    """
    generator = torch.Generator(device).manual_seed(0)
    numel = 1 << 14
    wide = torch.randn(4, numel, generator=generator, device=device)
    wide *= torch.exp2(torch.randint(-140, 60, wide.shape, generator=generator, device=device).float())
    bits = torch.randint(-(2**31), 2**31, (numel,), generator=generator, device=device, dtype=torch.int32)
    state = [bits.view(torch.int16)[:numel].view(torch.bfloat16), bits.view(torch.int16)[numel:]]
    state += [wide[1], wide[2].abs()]
    for hyper in (AdamScalars(weight_decay=0.1), AdamScalars(weight_decay=0.1, decoupled=False, beta1=0.2)):
        grad, coefficients = wide[3].bfloat16(), hyper.at(3, 0.7)
        results = []
        for update in (kernel, adam_on_device):
            high, low, m, v = (tensor.clone() for tensor in state)
            update(high, low, m, v, grad, coefficients)
            results.append((high, low, m, v))
        for a, b in zip(*results, strict=True):
            same = a == b if not a.is_floating_point() else (a == b) | (a.isnan() & b.isnan())
            if not bool(same.all()):
                raise RuntimeError("it does not give the reference's bits")
