"""What this machine's device can do: matrix products, and copies from the host."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatrain.memory.arena import Arena
from lightning_megatrain.stream.streams import Lane, Streams

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


@dataclass(frozen=True)
class LinkRates:
    """Rates of copies of one size, in 10^9 bytes per second.

    Attributes:
        nbytes: bytes of a copy.
        to_device_gb_s: from registered host memory.
        to_host_gb_s: to registered host memory.
        both_gb_s: sum of both, at once.
        pageable_to_device_gb_s: from ordinary host memory.
        pageable_to_host_gb_s: to ordinary host memory.
    """

    nbytes: int
    to_device_gb_s: float
    to_host_gb_s: float
    both_gb_s: float
    pageable_to_device_gb_s: float
    pageable_to_host_gb_s: float


def bench_link(device: torch.device, sizes: Sequence[int], *, traffic: int = 1 << 30) -> list[LinkRates]:
    """Measure copies between host and device, launched one after the other on the lanes that trainings use.

    Needs twice the largest size on the device, and four times that on the host.

    Args:
        device: a CUDA device; on the CPU host memory is copied to host memory.
        sizes: bytes of a copy.
        traffic: bytes that are copied for each rate, at least; four copies are made at least.
    """
    streams, largest = Streams.on(device), max(sizes)
    arrays = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(2)]
    # Registered memory stays so as long as its arena is there.
    arenas = [Arena(largest, pin=pin and device.type == "cuda") for pin in (True, True, False, False)]
    pinned_in, pinned_out, pageable_in, pageable_out = (arena.view(torch.uint8, largest) for arena in arenas)
    fetch: _Route = ("fetch", arrays[0], pinned_in)
    push: _Route = ("push", pinned_out, arrays[1])
    lists: list[list[_Route]] = [
        [fetch],
        [push],
        [fetch, push],
        [("fetch", arrays[0], pageable_in)],
        [("push", pageable_out, arrays[1])],
    ]
    found = []
    for size in sizes:
        times = max(4, -(-traffic // size))
        found.append(LinkRates(size, *(_rate(streams, routes, size, times) for routes in lists)))
    return found


_Route = tuple[Lane, Tensor, Tensor]
"""Lane, target and source."""


def _rate(streams: Streams, routes: Sequence[_Route], size: int, times: int) -> float:
    """10^9 bytes per second over all routes at once."""

    def copy() -> None:
        for lane, target, source in routes:
            streams.copy(lane, target[:size], source[:size])

    return len(routes) * size / _seconds(copy, streams.device, times) / 1e9


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
