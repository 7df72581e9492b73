"""What this machine's memory and its update kernel can do, measured side by side in one run.

The update is bound by memory: on a split master with fp32 moments and bf16 gradients it moves 26 bytes per
parameter, so ``26 * kernel_gparams_s / dram_gb_s`` says how much of the attainable rate the kernel reaches. torch's
fused AdamW, on fp32 parameters, moves 28 and makes no bf16 copy.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypedDict

import torch

from lightning_megatrain.memory.arena import Arena
from lightning_megatrain.memory.split import split_master
from lightning_megatrain.update import reference
from lightning_megatrain.update.adam import AdamScalars, adam_split_
from lightning_megatrain.update.kernel import get_kernel
from lightning_megatrain.update.threads import ThreadPlan, Threads, plan_threads

SPLIT_BYTES = 26  # moved per parameter: high, low, m and v read and written, a bf16 gradient read
_REFERENCE_NUMEL = 1 << 23  # enough: the reference works in chunks, so its rate does not depend on the length


class HostBench(TypedDict):
    """Medians; G is 10**9."""

    kernel_gparams_s: float
    torch_fused_gparams_s: float
    reference_gparams_s: float
    dram_gb_s: float
    isa: str
    threads: int


def bench_host(numel: int = 1 << 26, threads: Threads = "auto", repeats: int = 7) -> HostBench:
    """Measure the host update over ``numel`` parameters; needs about 34 bytes of memory for each.

    The four candidates take turns, ``repeats`` times after one warm-up, so that a disturbance hits them alike; each
    gets the same number of threads. Where there is no kernel its rate is the reference's, ``isa`` is
    ``"reference"`` and the bandwidth is that of torch's in-place multiplication.

    Raises:
        ValueError: ``threads`` or ``numel`` is not positive.
    """
    if numel < 1:
        raise ValueError(f"numel={numel} is not a number of parameters; set 1 or more.")
    plan = plan_threads(threads)
    kernel = get_kernel()
    hyper = AdamScalars(lr=1e-4, weight_decay=0.1)

    high, low = split_master(torch.randn(numel))
    moments = torch.randn(numel) * 1e-3, torch.rand(numel) * 1e-6
    grad = (torch.randn(numel) * 1e-3).bfloat16()
    part = slice(0, min(numel, _REFERENCE_NUMEL))
    small = high[part].clone(), low[part].clone(), moments[0][part].clone(), moments[1][part].clone(), grad[part]
    coefficients = hyper.at(1)

    param = torch.randn(numel).requires_grad_()
    param.grad = grad.float()
    optimizer = torch.optim.AdamW([param], lr=1e-4, weight_decay=0.1, fused=True)
    # One more tensor would only cost memory: the bandwidth is measured on the gradient that torch's step reads.
    buffer = param.grad

    def update() -> None:
        adam_split_(high, low, *moments, grad, hyper, 1, threads=plan)

    def refer() -> None:
        reference.adam_split_reference(*small, coefficients)

    with _torch_threads(plan.count):
        seconds = _take_turns([_mover(buffer, plan), update, optimizer.step, refer], repeats)
    moved, kernel_s, fused_s, reference_s = seconds
    return HostBench(
        kernel_gparams_s=numel / kernel_s / 1e9,
        torch_fused_gparams_s=numel / fused_s / 1e9,
        reference_gparams_s=small[0].numel() / reference_s / 1e9,
        dram_gb_s=2 * buffer.nbytes / moved / 1e9,
        isa=kernel.isa if kernel else "reference",
        threads=plan.count,
    )


def update_bandwidth(
    numel: int = 1 << 26, beside: Callable[[], None] = lambda: None, threads: Threads = "auto", repeats: int = 5
) -> float:
    """Host memory traffic that the update of a split master reaches, in bytes per second.

    Args:
        numel: parameters to update; more than caches hold. Each takes 16 bytes.
        beside: starts other traffic on the host's memory and returns; called before each round.
        threads: of the host optimizer.
        repeats: rounds, of which the median counts.
    """
    plan = plan_threads(threads)
    dtypes = (torch.bfloat16, torch.int16, torch.float32, torch.float32, torch.bfloat16)
    arenas = [Arena(numel * dtype.itemsize) for dtype in dtypes]  # the memory that trainings use, zeros
    high, low, first, second, grad = (a.view(d, numel) for a, d in zip(arenas, dtypes, strict=True))
    hyper = AdamScalars(lr=1e-4, weight_decay=0.1)

    def update() -> None:
        adam_split_(high, low, first, second, grad, hyper, 1, threads=plan)

    with _torch_threads(plan.count):
        [seconds] = _take_turns([update], repeats, before=beside)
    return SPLIT_BYTES * numel / seconds


def _mover(buffer: torch.Tensor, plan: ThreadPlan) -> Callable[[], object]:
    """Reads and writes all of ``buffer`` without changing it."""
    kernel = get_kernel()
    return (lambda: kernel.scale(buffer, 1.0, plan)) if kernel else (lambda: buffer.mul_(1.0))


def _take_turns(
    candidates: list[Callable[[], object]], repeats: int, before: Callable[[], None] = lambda: None
) -> list[float]:
    """Median seconds of each candidate over ``repeats`` rounds; the round before them warms up."""
    rounds: list[list[float]] = []
    for _ in range(repeats + 1):
        times = []
        for candidate in candidates:
            before()
            start = time.perf_counter()
            candidate()
            times.append(time.perf_counter() - start)
        rounds.append(times)
    return [statistics.median(column) for column in zip(*rounds[1:], strict=True)]


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
