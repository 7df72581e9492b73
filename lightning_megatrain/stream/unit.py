"""A unit: the module whose parameters move together, and what its forward saw."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatrain.memory.layout import Group
from lightning_megatrain.stream.streams import Streams


class Unit:
    """One streamed module.

    Binding swaps ``parameter.data``, never the parameter object: optimizers, hooks, tied names and code that keeps
    parameters in lists all go on seeing the same object.

    Args:
        group: its parameters and their layout; may be empty when all of them are shared with other modules.
        module: the module itself.
        host_views: gives what ``parameter.data`` is at rest, in layout order.
    """

    def __init__(self, group: Group, module: nn.Module, host_views: Callable[[], Sequence[Tensor]]) -> None:
        self.group = group
        self.module = module
        self.forward: Callable[..., Any] = module.forward
        self.pending = 0  # uses in this step whose backward has not run
        self.used = False  # in this step
        self.is_bound = False
        self._host_views = host_views
        self._versions = self._parameter_versions()
        own = {id(p) for p in group.parameters}
        self.shared = [p for p in module.parameters() if id(p) not in own]  # resident: other modules use them too
        self._modules = list(module.modules())
        self._buffers_change: dict[tuple[bool, ...], bool] = {}  # by training flags, once seen
        self.graph_checked = False

    @property
    def name(self) -> str:
        """Qualified name of the module."""
        return self.group.name

    def bind(self, views: Sequence[Tensor]) -> None:
        """Put slot views in place of the parameters' data."""
        self.seen()
        self._put(views)
        self.is_bound = True

    def unbind(self) -> None:
        """Put the host views back.

        Raises:
            RuntimeError: something wrote to the slot's instead, which are a copy.
        """
        was_bound, self.is_bound = self.is_bound, False
        before, self._versions = self._versions, self._parameter_versions()
        self._put(self._host_views())
        if was_bound and before != self._versions:
            index = next(i for i, (a, b) in enumerate(zip(before, self._versions, strict=True)) if a != b)
            raise RuntimeError(
                f"Parameter {self.group.layout.entries[index].name!r} was written to while unit {self.name!r} ran, "
                "on a copy; write to it in on_train_batch_start, or choose other modules with "
                "MegaTrainStrategy(units=...)."
            )

    def _put(self, views: Sequence[Tensor]) -> None:
        for parameter, view in zip(self.group.parameters, views, strict=True):
            parameter.data = view

    def _parameter_versions(self) -> list[int]:
        return [p._version for p in self.group.parameters]

    def was_assigned(self) -> bool:
        """Whether somebody has put other tensors in the place of the parameters' data, which is at rest."""
        at_rest = zip(self.group.parameters, self._host_views(), strict=True)
        return any(p.data_ptr() != view.data_ptr() or p.stride() != view.stride() for p, view in at_rest)

    def was_written(self) -> bool:
        """Whether parameters' values have changed in place since the unit was used last, or since :meth:`seen`."""
        return self._versions != self._parameter_versions()

    def seen(self) -> None:
        """What was written until now is known: no slot has older values."""
        self._versions = self._parameter_versions()

    def training_flags(self) -> tuple[bool, ...]:
        """``training`` of every module inside."""
        return tuple(m.training for m in self._modules)

    def set_training_flags(self, flags: tuple[bool, ...]) -> None:
        """Set ``training`` of every module inside, one by one."""
        for module, flag in zip(self._modules, flags, strict=True):
            module.training = flag

    def requires_grad_flags(self) -> tuple[bool, ...]:
        """``requires_grad`` of every parameter, in layout order; read at every call, for it may be toggled."""
        return tuple(p.requires_grad for p in self.group.parameters)

    def set_requires_grad_flags(self, flags: tuple[bool, ...]) -> None:
        """Set ``requires_grad`` of every parameter."""
        for parameter, flag in zip(self.group.parameters, flags, strict=True):
            parameter.requires_grad_(flag)

    def buffers(self) -> dict[tuple[int, str], Tensor]:
        """Buffers inside, keyed by position and name."""
        return {
            (i, name): buffer
            for i, module in enumerate(self._modules)
            for name, buffer in module._buffers.items()
            if buffer is not None
        }

    def buffers_before(self, *, at_first: bool = True) -> "BuffersBefore":
        """The buffers, and copies of those that a forward may change (running statistics, counters).

        Large ones are copied ``at_first`` in a mode, until it is known whether anything changes in it, and later only
        where something does.
        """
        may_change = self._buffers_change.get(self.training_flags(), at_first)
        return {
            key: (buffer, _version(buffer), buffer.clone() if may_change or _is_small(buffer) else None)
            for key, buffer in self.buffers().items()
        }

    def note_buffers(self, before: "BuffersBefore") -> bool:
        """After a forward: may it have changed a buffer?

        Raises:
            RuntimeError: it wrote to one of which there is no copy.
        """
        now, flags = self.buffers(), self.training_flags()
        changed = [
            k for k, (buffer, version, _) in before.items() if now.get(k) is not buffer or _version(buffer) != version
        ]
        for module, name in changed:
            buffer, version, copy = before[module, name]
            if copy is None and _version(buffer) != version:
                raise RuntimeError(
                    f"Unit {self.name!r} changes its buffer {name!r} in some steps and not in its first one, so its "
                    "forward cannot be computed again; let it change in the first one too, or choose other modules "
                    "with MegaTrainStrategy(units=...)."
                )
        if not changed and flags not in self._buffers_change:  # once, for it waits for the device: not all count
            changed = [key for key, (buffer, _, copy) in before.items() if _differ(buffer, copy)]
        found = bool(changed) or now.keys() != before.keys() or self._buffers_change.get(flags, False)
        self._buffers_change[flags] = found
        return found

    def put_buffers(self, buffers: dict[tuple[int, str], Tensor]) -> None:
        """Install buffer tensors, keyed as by :meth:`buffers`."""
        for (index, name), buffer in buffers.items():
            self._modules[index]._buffers[name] = buffer


@contextlib.contextmanager
def no_autocast_cache() -> Iterator[None]:
    """Inside, autocast keeps no copies of weights: they would be there for all units until it ends."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


BuffersBefore = dict[tuple[int, str], tuple[Tensor, int, Tensor | None]]
"""By position and name: the buffer, its version, and a copy if it may change."""

_SMALL = 2**20
"""Bytes of a buffer that may be copied in every forward."""


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version  # those made in a validation have none


def _is_small(buffer: Tensor) -> bool:
    return _is_dense(buffer) and buffer.nbytes <= _SMALL


def _is_dense(buffer: Tensor) -> bool:
    return buffer.layout is torch.strided and not buffer.is_nested


def _differ(buffer: Tensor, copy: Tensor | None) -> bool:
    """Batch norm, for one, writes its statistics without counting a version."""
    if copy is None or buffer.is_meta or not _is_dense(buffer):
        return False
    return not torch.equal(_bits(buffer), _bits(copy))


def _bits(buffer: Tensor) -> Tensor:
    # Not every dtype can be compared, and a number that is none equals itself.
    return buffer.contiguous().view(-1).view(torch.uint8)


def check_trainable(group: Group) -> None:
    """Refuse parameters that began to require gradients after the layout was made.

    Raises:
        RuntimeError: names the parameter.
    """
    frozen = group.layout.trainable_count
    for entry, parameter in zip(group.layout.entries[frozen:], group.parameters[frozen:], strict=True):
        if parameter.requires_grad:
            raise RuntimeError(
                f"Parameter {entry.name!r} was frozen when this step began and requires a gradient now; "
                "set requires_grad between steps, for example in on_train_batch_start."
            )


@dataclass
class Conditions:
    """Everything outside its inputs that a block's forward depends on, so that a recompute sees the same.

    Attributes:
        random_state: generator states, or None once it is known that the forward drew nothing.
        buffers: buffer values before a forward that changed them, else None.
    """

    random_state: list[Tensor] | None
    autocast: list[tuple[str, bool, torch.dtype]]
    default_dtype: torch.dtype
    training: tuple[bool, ...]
    requires_grad: tuple[bool, ...]
    buffers: dict[tuple[int, str], Tensor] | None = None

    @classmethod
    def capture(cls, unit: Unit, streams: Streams) -> "Conditions":
        """Read them, before the forward."""
        kinds = {"cpu", streams.device.type} - {"meta"}
        autocast = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in sorted(kinds)]
        return cls(
            streams.random_state(),
            autocast,
            torch.get_default_dtype(),
            unit.training_flags(),
            unit.requires_grad_flags(),
        )

    @contextlib.contextmanager
    def restored(self, unit: Unit, streams: Streams) -> Iterator[None]:
        """Reproduce the state of generators, modules and buffers; what is current now comes back afterwards."""
        now = Conditions.capture(unit, streams)
        after = unit.buffers() if self.buffers is not None else None
        try:
            self._apply(unit, streams, now)
            if self.buffers is not None:
                unit.put_buffers({key: buffer.clone() for key, buffer in self.buffers.items()})
            yield
        finally:
            now._apply(unit, streams, self)
            if after is not None:
                unit.put_buffers(after)

    @contextlib.contextmanager
    def numerics(self) -> Iterator[None]:
        """Reproduce autocast and the default dtype, for the recompute alone: plain backwards run without either.

        Both are set explicitly: autograd may run this on a thread of its own, and the default dtype is process-wide.
        """
        default_dtype = torch.get_default_dtype()
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            torch.set_default_dtype(self.default_dtype)
            try:
                yield
            finally:
                torch.set_default_dtype(default_dtype)

    def rewind(self, streams: Streams, buffers: "BuffersBefore") -> None:
        """Undo what the forward that was about to run did to generators and, as they were before it, buffers."""
        assert self.random_state is not None
        streams.set_random_state(self.random_state)
        with torch.no_grad():  # all of them: batch norm writes its statistics without counting a version
            for buffer, _, copy in buffers.values():
                if copy is not None:
                    buffer.copy_(copy)

    def _apply(self, unit: Unit, streams: Streams, current: "Conditions") -> None:
        if self.random_state is not None and current.random_state is not None:
            streams.set_random_state(self.random_state)
        if self.training != current.training:
            unit.set_training_flags(self.training)
        if self.requires_grad != current.requires_grad:
            unit.set_requires_grad_flags(self.requires_grad)
