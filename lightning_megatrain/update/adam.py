"""AdamW and Adam on flat host tensors: the host update of one run of parameters that share their hyperparameters.

Three functions for three stores, each one pass over memory, in place, by the compiled kernel or else the torch
reference (``reference.py``, which also gives the formula and its rounding). Both give the same bits. ``amsgrad`` is
not among them: its optimizers keep their torch path.

Bytes moved per parameter and step with fp32 moments and bf16 gradients: 26 on a split master (read 14, write 12),
22 on bf16; with fp32 gradients, 28 on fp32.
"""

import torch
from torch import Tensor

from lightning_megatrain.update import reference
from lightning_megatrain.update.kernel import Store, get_kernel
from lightning_megatrain.update.reference import AdamCoefficients, AdamScalars, stochastic_keys
from lightning_megatrain.update.threads import ThreadPlan

__all__ = [
    "AdamCoefficients",
    "AdamScalars",
    "accumulate_",
    "adam_bf16_",
    "adam_fp32_",
    "adam_split_",
    "sum_of_squares",
]

_BF16, _FP32 = (torch.bfloat16,), (torch.float32,)
_EITHER = (torch.bfloat16, torch.float32)


def adam_split_(
    high: Tensor,
    low: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    hyper: AdamScalars,
    step: int,
    scale: float = 1.0,
    *,
    threads: ThreadPlan | int | None = None,
) -> None:
    """One step on a split master (``memory/split.py``). ``high``, the wire copy, is written in the same pass.

    Args:
        high: bf16 ``[n]``.
        low: int16 ``[n]``.
        exp_avg: fp32 or bf16 ``[n]``.
        exp_avg_sq: as ``exp_avg``.
        grad: bf16 or fp32 ``[n]``; only read.
        hyper: the group's hyperparameters.
        step: count of updates including this one; the first is 1.
        scale: factor on the gradient (clipping, accumulation), applied on the fly in fp32.
        threads: threads to use; ``default_threads()`` if omitted. The result does not depend on it.

    Raises:
        ValueError: a tensor's dtype, length, layout or device is wrong, or ``step`` is less than 1.
    """
    _check(
        grad,
        param=(high, _BF16),
        low=(low, (torch.int16,)),
        exp_avg=(exp_avg, _EITHER),
        exp_avg_sq=(exp_avg_sq, (exp_avg.dtype,)),
    )
    coefficients = hyper.at(step, scale)
    if kernel := get_kernel():
        kernel.adam(Store.SPLIT, high, low, exp_avg, exp_avg_sq, grad, coefficients, threads=threads)
    else:
        reference.adam_split_reference(high, low, exp_avg, exp_avg_sq, grad, coefficients)


def adam_bf16_(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    hyper: AdamScalars,
    step: int,
    scale: float = 1.0,
    *,
    stochastic: bool = False,
    seed: int = 0,
    offset: int = 0,
    threads: ThreadPlan | int | None = None,
) -> None:
    """One step on a bf16 parameter without a finer master, computed in fp32; other arguments as :func:`adam_split_`.

    Args:
        param: bf16 ``[n]``, rounded to nearest even unless ``stochastic``.
        stochastic: round away from zero with a probability equal to the share of the gap the exact value covers, so
            that updates too small for bf16 still count on average. Reproducible: the draw is a function of
            ``seed``, ``step`` and element index.
        seed: any integer.
        offset: index of ``param[0]`` in the whole model, so that no two parameters share their draws.

    Raises:
        ValueError: a tensor's dtype, length, layout or device is wrong, or ``step`` is less than 1.
    """
    _check(grad, param=(param, _BF16), exp_avg=(exp_avg, _EITHER), exp_avg_sq=(exp_avg_sq, (exp_avg.dtype,)))
    coefficients = hyper.at(step, scale)
    keys = stochastic_keys(seed, step)
    if kernel := get_kernel():
        store = Store.BF16_STOCHASTIC if stochastic else Store.BF16
        kernel.adam(store, param, None, exp_avg, exp_avg_sq, grad, coefficients, keys, offset, threads)
    else:
        reference.adam_bf16_reference(
            param, exp_avg, exp_avg_sq, grad, coefficients, keys if stochastic else None, offset
        )


def adam_fp32_(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    hyper: AdamScalars,
    step: int,
    scale: float = 1.0,
    *,
    threads: ThreadPlan | int | None = None,
) -> None:
    """One step on an fp32 parameter ``[n]``; other arguments as :func:`adam_split_`.

    Raises:
        ValueError: a tensor's dtype, length, layout or device is wrong, or ``step`` is less than 1.
    """
    _check(grad, param=(param, _FP32), exp_avg=(exp_avg, _EITHER), exp_avg_sq=(exp_avg_sq, (exp_avg.dtype,)))
    coefficients = hyper.at(step, scale)
    if kernel := get_kernel():
        kernel.adam(Store.FP32, param, None, exp_avg, exp_avg_sq, grad, coefficients, threads=threads)
    else:
        reference.adam_fp32_reference(param, exp_avg, exp_avg_sq, grad, coefficients)


def sum_of_squares(x: Tensor, *, threads: ThreadPlan | int | None = None) -> float:
    """Sum of squares of a bf16 or fp32 tensor ``[n]``, in double, in an order that does not depend on the threads.

    Raises:
        ValueError: the tensor's dtype, layout or device is wrong.
    """
    _check(x)
    kernel = get_kernel()
    return kernel.sum_of_squares(x, threads) if kernel else reference.sum_of_squares_reference(x)


def accumulate_(dst: Tensor, src: Tensor, *, threads: ThreadPlan | int | None = None) -> None:
    """``dst += src``, both bf16 or fp32 ``[n]``: added in fp32, rounded once to ``dst``'s dtype.

    Raises:
        ValueError: a tensor's dtype, length, layout or device is wrong.
    """
    _check(src, dst=(dst, _EITHER))
    if kernel := get_kernel():
        kernel.accumulate(dst, src, threads)
    else:
        reference.accumulate_reference(dst, src)


def _check(grad: Tensor, **others: tuple[Tensor, tuple[torch.dtype, ...]]) -> None:
    """The kernel is handed addresses, so nothing may slip through here."""
    for name, (tensor, dtypes) in {"grad": (grad, _EITHER), **others}.items():
        if (
            tensor.dtype not in dtypes
            or tensor.shape != (grad.numel(),)
            or tensor.device.type != "cpu"
            or not tensor.is_contiguous()
        ):
            raise ValueError(
                f"host update: `{name}` must be a flat contiguous CPU tensor of {grad.numel()} elements, "
                f"{' or '.join(map(str, dtypes))}; got {tensor.dtype}, shape {tuple(tensor.shape)}, "
                f"strides {tensor.stride()}, on {tensor.device}. Pass views of the arena, not parameters."
            )
