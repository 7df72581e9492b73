"""What this machine's device can do: matrix products, and copies from the host."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

TRAINING_SHARE = 0.68
"""Part of the rate of large matrix products that training sustains: 544 of 802 TFLOP/s on an H200."""


@dataclass(frozen=True)
class DeviceBench:
    """Rates; ``link_bytes_per_s`` is None where the host itself computes."""

    flops_per_s: float
    link_bytes_per_s: float | None


def bench_device(device: torch.device, dtype: torch.dtype) -> DeviceBench:
    """Measure a device, in well under a second.

    Args:
        device: ``cpu`` or a CUDA device.
        dtype: dtype of the matrix products.
    """
    cuda = device.type == "cuda"
    size = 8192 if cuda else 512
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))

    def product() -> None:
        torch.mm(a, b)

    flops = 2 * size**3 / _seconds(product, device, 10 if cuda else 3)
    if not cuda:
        return DeviceBench(flops, None)
    source = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(1 << 28, dtype=torch.uint8, device=device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    return DeviceBench(flops, source.numel() / _seconds(copy, device, 5))


class Traffic:
    """Copies to the device, started and not waited for: traffic beside which something else is measured.

    Args:
        device: a CUDA device; on the CPU nothing is copied.
        nbytes: bytes of one call.
    """

    def __init__(self, device: torch.device, nbytes: int = 1 << 30) -> None:
        self._source = self._target = None
        if device.type == "cuda":
            self._source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            self._target = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def __call__(self) -> None:
        """Start a copy."""
        if self._source is not None and self._target is not None:
            self._target.copy_(self._source, non_blocking=True)


def _seconds(run: Callable[[], None], device: torch.device, times: int) -> float:
    """Seconds of one run, after a first that does not count."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    run()
    wait()
    began = time.perf_counter()
    for _ in range(times):
        run()
    wait()
    return (time.perf_counter() - began) / times
