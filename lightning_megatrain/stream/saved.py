"""Inputs of units that wait on the host for their backward, where the device has no room for them."""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_megatrain.memory.arena import Arena
from lightning_megatrain.memory.device import DeviceMemory
from lightning_megatrain.memory.host import available_host_bytes, format_bytes
from lightning_megatrain.stream.streams import Copy, Event, Streams

Activations = Literal["auto", "device", "host"]

_SMALLEST = 1 << 20
"""Bytes from which a tensor is worth a copy."""

_SHARE = 0.25
"""Part of the device's memory beyond what the engine holds that saved inputs may take before they go to the host."""

_UNDER_WAY = 2
"""Copies to the host whose source is still held: the compute lane waits for those before."""


class _Buffer:
    """Host memory for one tensor, used again and again."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.read = Event()  # the copy that last read it


class SavedOnHost:
    """One tensor on the host.

    Attributes:
        position: of the tensor among those of its use.
    """

    def __init__(self, position: int, tensor: Tensor, buffer: _Buffer, give_back: Callable[[_Buffer], None]) -> None:
        self.position = position
        # As it lies in memory, where it has no gaps: a block may ask for a view that other strides do not allow.
        self.host = buffer.arena.view(tensor.dtype, tensor.numel()).as_strided(
            tensor.shape, _strides_without_gaps(tensor)
        )
        self.buffer = buffer
        self.pushed = Event()  # and not the copy, which would hold the source
        self.fetched: Copy | None = None
        self.let_go = weakref.finalize(self, give_back, buffer)


class SavedInputs:
    """Decides where the inputs of uses wait for their backward, and moves them.

    With ``"auto"`` they go to the host when those of all units would take more than a quarter of the device's memory,
    as long as the host has room.

    Args:
        where: ``"device"``, ``"host"`` or ``"auto"``.
        streams: the lanes of the device.
        memory: the device's; None where it is not known, then ``"auto"`` means the device.
        units: how many units there are.
        pin: register host memory with CUDA.
        host_limit: host bytes that may be held; None for what is available.
    """

    def __init__(
        self,
        where: Activations,
        streams: Streams,
        memory: DeviceMemory | None,
        units: int,
        *,
        pin: bool,
        host_limit: int | None,
    ) -> None:
        self._where = where
        self._streams = streams
        self._memory = memory
        self._units = units
        self._pin = pin
        self._host_limit = host_limit
        self._free: dict[int, list[_Buffer]] = {}
        self._under_way: deque[tuple[Copy, int]] = deque()
        self._fetching: list[Copy] = []
        self._seen: dict[int, weakref.ref[Tensor]] = {}
        self._static: int | None = None  # before anything is spent on speed
        self.nbytes = 0
        """Host bytes held."""

    def begin(self) -> None:
        """A batch starts."""
        self._seen.clear()
        while self._under_way:
            self._finish()
        # What was fetched for a backward that never came: its memory may go when the copies into it are done.
        for copy in self._fetching:
            self._streams.compute_after(copy.done)
        self._fetching.clear()
        if self._static is None and self._memory is not None:
            self._static = self._memory.allocated()

    def put(self, tensors: Sequence[Tensor]) -> list[SavedOnHost]:
        """Start copying those inputs of a use to the host that are to wait there; the others stay where they are.

        Only what a unit made for the next one goes: a tensor that many units are given is there once as it is.

        Raises:
            RuntimeError: there is not enough host memory.
        """
        saved = []
        for position, tensor in enumerate(tensors):
            seen = self._seen.get(id(tensor))
            if not tensor.requires_grad or tensor.nbytes < _SMALLEST or (seen is not None and seen() is tensor):
                continue
            self._seen[id(tensor)] = weakref.ref(tensor)
            if self._goes(tensor):
                saved.append(self._push(position, tensor))
        return saved

    def _goes(self, tensor: Tensor) -> bool:
        if self._where != "auto" or self._memory is None:
            return self._where == "host"
        much = self._units * tensor.nbytes > _SHARE * (self._memory.limit - (self._static or 0))
        return much and self._has_room(tensor.nbytes)

    def _push(self, position: int, tensor: Tensor) -> SavedOnHost:
        saved = SavedOnHost(position, tensor, self._buffer(tensor.nbytes), self._give_back)
        after = [self._streams.record(), saved.buffer.read]
        with self._streams.span("push", "save input", tensor.nbytes):
            copy = self._streams.copy("push", saved.host, tensor.detach(), after=after)
        saved.pushed = copy.done
        self._under_way.append((copy, tensor._version))
        while len(self._under_way) > _UNDER_WAY:
            self._finish()
        return saved

    def _finish(self) -> None:
        """Let go of the oldest source: whatever has its memory next is computed after the copy."""
        copy, version = self._under_way.popleft()
        self._streams.compute_after(copy.done)
        if copy.source._version != version:
            raise RuntimeError(
                "An input of a unit was changed in place while it was being saved for the backward; write that "
                "operation out of place, or set MegaTrainStrategy(activations='device')."
            )

    def prefetch(self, saved: Sequence[SavedOnHost]) -> None:
        """Start bringing tensors back."""
        while self._under_way:
            self._finish()
        for one in saved:
            if one.fetched is None:
                like = one.host
                target = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self._streams.device)
                after = [self._streams.record(), one.pushed]  # what had the target's memory is done with it
                with self._streams.span("fetch", "fetch input", target.nbytes):
                    one.fetched = self._streams.copy("fetch", target, one.host, after=after)
                self._fetching.append(one.fetched)

    def get(self, saved: Sequence[SavedOnHost], tensors: Sequence[Tensor]) -> list[Tensor]:
        """All tensors of a use, in order: those that were saved on the host, and ``tensors``, the others."""
        self.prefetch(saved)
        back = {}
        for one in saved:
            assert one.fetched is not None
            self._streams.compute_after(one.fetched.done)
            # A new batch may have begun since it was fetched.
            self._fetching = [copy for copy in self._fetching if copy is not one.fetched]
            back[one.position] = one.fetched.target
            one.buffer.read = one.fetched.done
            one.fetched = None
            if not torch._C._autograd._get_current_graph_task_keep_graph():
                one.let_go()
        rest = iter(tensors)
        return [back[i] if i in back else next(rest) for i in range(len(back) + len(tensors))]

    def _buffer(self, nbytes: int) -> _Buffer:
        # The smallest that is large enough: inputs of all lengths share the same few buffers.
        size = min((size for size, free in list(self._free.items()) if free and size >= nbytes), default=None)
        if size is not None:
            return self._free[size].pop()
        for buffers in list(self._free.values()):  # all too small
            while buffers:
                buffer = buffers.pop()
                buffer.read.wait()
                self.nbytes -= buffer.arena.nbytes
                buffer.arena.close()
        left = self._left
        if nbytes > left:
            raise RuntimeError(
                f"An input of a unit takes {format_bytes(nbytes)} on the host, beside {format_bytes(self.nbytes)} for "
                f"others, but {format_bytes(max(0, left))} are left; set MegaTrainStrategy(activations='device'), "
                "use shorter sequences or smaller batches, or raise host_memory if there is more."
            )
        self.nbytes += nbytes
        return _Buffer(self._arena(nbytes))

    @property
    def _left(self) -> int:
        """Host bytes that may be taken yet."""
        return available_host_bytes() if self._host_limit is None else self._host_limit - self.nbytes

    def _has_room(self, nbytes: int) -> bool:
        free = [size for size, buffers in list(self._free.items()) for _ in buffers]
        return max(free, default=0) >= nbytes or nbytes <= self._left + sum(free)

    def _arena(self, nbytes: int) -> Arena:
        return Arena(nbytes, pin=self._pin)

    def _give_back(self, buffer: _Buffer) -> None:
        self._free.setdefault(buffer.arena.nbytes, []).append(buffer)

    def close(self) -> None:
        """Give the host memory back."""
        self._under_way.clear()
        for buffers in self._free.values():
            for buffer in buffers:
                buffer.arena.close()
        self._free.clear()
        self.nbytes = 0


def _strides_without_gaps(tensor: Tensor) -> list[int]:
    """Strides of a tensor of the same shape, its dimensions in the same order in memory and nothing between them.

    A tensor that says the same several times has no such order, and gets that of its dimensions.
    """
    repeats = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    strides, step = [0] * tensor.dim(), 1
    for dim in sorted(range(tensor.dim()), key=lambda d: (0 if repeats else tensor.stride(d), -d)):
        strides[dim] = step
        step *= max(1, tensor.shape[dim])
    return strides
