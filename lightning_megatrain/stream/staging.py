"""Copies between the device and host memory that is not registered with CUDA, through two buffers that are."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_megatrain.memory.arena import Arena
from lightning_megatrain.stream.streams import Copy, Streams

_BYTES = 64 << 20
"""Of each buffer: from here on a larger one does not copy faster."""


class Staging:
    """Moves whole tensors while nothing else runs; the copies in one buffer and out of the other overlap.

    CUDA itself copies unregistered memory at a fraction of the link's rate.

    Args:
        streams: the lanes of the device.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        arenas = [Arena(_BYTES, pin=streams.device.type == "cuda") for _ in range(2)]
        self._buffers = [arena.view(torch.uint8, _BYTES) for arena in arenas]
        self._arenas = arenas

    def to_device(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copy flat host tensors to flat device tensors of the same dtypes and sizes, and wait for it."""
        made = self._streams.record()  # what had the targets' memory before is done with it
        under_way: list[Copy | None] = [None, None]
        for turn, (target, source) in enumerate(_parts(targets, sources)):
            before = under_way[turn % 2]
            if before is not None:
                before.done.wait()
            buffer = self._buffers[turn % 2][: source.numel()]
            buffer.copy_(source)
            under_way[turn % 2] = self._streams.copy("fetch", target, buffer, after=[made])
        self._finish(under_way)

    def to_host(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copy flat device tensors to flat host tensors of the same dtypes and sizes, and wait for it."""
        made = self._streams.record()
        before: tuple[Copy, Tensor] | None = None
        for turn, (target, source) in enumerate(_parts(targets, sources)):
            buffer = self._buffers[turn % 2][: source.numel()]
            copy = self._streams.copy("push", buffer, source, after=[made])
            if before is not None:
                _land(*before)
            before = copy, target
        if before is not None:
            _land(*before)

    def close(self) -> None:
        """Give the buffers back."""
        self._buffers = []
        for arena in self._arenas:
            arena.close()

    def _finish(self, under_way: Sequence[Copy | None]) -> None:
        for copy in under_way:
            if copy is not None:
                copy.done.wait()


def _land(copy: Copy, target: Tensor) -> None:
    copy.done.wait()
    target.copy_(copy.target)


def _parts(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Both, as bytes, in parts that fit a buffer."""
    for target, source in zip(targets, sources, strict=True):
        there, here = target.view(torch.uint8), source.view(torch.uint8)
        for start in range(0, here.numel(), _BYTES):
            yield there[start : start + _BYTES], here[start : start + _BYTES]
