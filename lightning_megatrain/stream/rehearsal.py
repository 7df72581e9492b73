"""A step without weights: the engine runs on stand-ins, to learn what memory and time the device will take."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lightning_megatrain.memory.arena import Arena
from lightning_megatrain.memory.device import DeviceMemory, device_memory
from lightning_megatrain.memory.layout import Group
from lightning_megatrain.memory.store import Store, StoreFormat
from lightning_megatrain.stream.budget import Budget
from lightning_megatrain.stream.discovery import UnitSelector, find_units, make_groups
from lightning_megatrain.stream.engine import Engine
from lightning_megatrain.stream.saved import Activations, SavedInputs, SavedOnHost
from lightning_megatrain.stream.streams import Copy, Event, HostStreams, Lane, Streams
from lightning_megatrain.stream.tracker import MemoryTracker, OnDevice


@dataclass(frozen=True)
class StepSettings:
    """How a step will be run.

    Attributes:
        store_format: how masters are kept.
        prefetch: as for :class:`Engine`.
        microbatch: as for :class:`Engine`.
        keeps_graphs: whether every unit's graph is kept.
        residents_early: as :attr:`GradientSink.takes_residents_early`.
        norms: as :attr:`GradientSink.wants_norms`.
        activations: as for :class:`SavedInputs`.
        sequence_chunks: as for :class:`Engine`.
        device_limit: bytes of the device that may be used.
        host_limit: bytes of the host that ``activations="auto"`` may take.
    """

    store_format: StoreFormat
    prefetch: int
    microbatch: int | None
    keeps_graphs: bool
    residents_early: bool
    norms: bool
    activations: Activations = "device"
    sequence_chunks: int | None = None
    device_limit: int = 0
    host_limit: int = 0


@dataclass(frozen=True)
class StepMemory:
    """Bytes that a training step takes.

    Attributes:
        engine: of the device, what the engine holds throughout: resident weights, slots, gradient buffers.
        peak: of the device, the most at any time, with the batch, activations and gradients.
        saved_on_host: of the host, inputs of units that wait there for their backward.
    """

    engine: int
    peak: int
    saved_on_host: int = 0


class MetaRehearsal:
    """Training steps on the meta device, to count what they take; a model serves for any number of them.

    Args:
        model: the whole module, on the meta device; it is used up.
        units: which modules are streamed, as for :func:`find_units`.
        shorten: run a few units of a model whose units are alike, and reckon with the others: each of them adds what
            it saves for the backward to all that is held from the end of the forward to the start of the backward.
    """

    def __init__(self, model: nn.Module, units: UnitSelector, *, shorten: bool = True) -> None:
        self._model = model
        self._left_out = _shorten(model, units) if shorten else 0
        self._units = find_units(model, units)
        self._groups = make_groups(model, self._units)

    def memory(self, settings: StepSettings, loss: Callable[[torch.device], Tensor]) -> StepMemory:
        """Run a step and count.

        Args:
            settings: how the step will be run.
            loss: makes a batch on the device it is given, and computes its loss.

        Raises:
            RuntimeError: an operation has no form on the meta device, such as one whose result's shape depends on
                values.
        """
        tracker = MemoryTracker()
        device = torch.device("meta")
        store = _EmptyStore(self._groups, settings.store_format, device)
        for memory in (store.wire_memory, store.slab_memory):
            tracker.leave_out(memory)
        modules = list(self._units.values())
        streams = _MetaStreams(device)
        units = len(modules) + self._left_out
        saved = _MetaSavedInputs(settings, streams, tracker, units, len(modules) / units)
        with _Top(tracker, modules) as top, tracker, OnDevice():
            # Autograd runs nodes without the function modes around it, hence the recompute enters its own.
            engine = _engine(self._model, modules, settings, store, streams, OnDevice, saved)
            held = tracker.live
            _step(engine, lambda: loss(device))
        # Of a unit that is left out. The first may save less: what it is given may need no gradient.
        on_host = sum(saved.each[1:]) // max(1, len(saved.each) - 1)
        peak = tracker.peak
        if self._left_out:
            # Of the few that are run, the last ones' copies are still under way.
            peak = max(peak, top.peak + self._left_out * max(0, top.saved_per_unit - on_host))
        return StepMemory(engine=held, peak=peak, saved_on_host=sum(saved.each) + self._left_out * on_host)


_SHORT = 4
"""Units that are run for all: the first has neighbours unlike it, and so has the last."""


def _shorten(model: nn.Module, selector: UnitSelector) -> int:
    """Take units off the end of the one list that holds them all, if they are alike; how many."""
    units = find_units(model, selector)
    forms = {(type(m), tuple((n, p.shape) for n, p in m.named_parameters())) for m in units.values()}
    owners = {name.rpartition(".")[0] for name in units}
    if len(units) <= _SHORT or len(forms) > 1 or len(owners) > 1:
        return 0
    blocks = model.get_submodule(owners.pop())
    if not isinstance(blocks, nn.ModuleList) or len(blocks) != len(units):
        return 0
    del blocks[_SHORT:]
    return len(units) - _SHORT


class _Top:
    """The peak while the most units have saved their inputs: from the last unit's forward to the end of its backward.

    Attributes:
        peak: bytes.
        saved_per_unit: bytes that each unit's forward leaves behind for its backward.
    """

    def __init__(self, tracker: MemoryTracker, units: Sequence[nn.Module]) -> None:
        self.peak = self.saved_per_unit = 0
        self._tracker = tracker
        self._before: list[int] = []
        self._units = units if len(units) >= _SHORT else []
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> "_Top":
        for unit in self._units:
            self._hooks.append(unit.register_forward_pre_hook(lambda *_: self._before.append(self._tracker.live)))
        if self._units:
            self._hooks.append(self._units[-2].register_forward_hook(self._begin))
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begin(self, module: nn.Module, args: Any, output: Any) -> None:
        made = next(t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad)
        made.register_hook(self._end)
        self._earlier, self._tracker.peak = self._tracker.peak, self._tracker.live

    def _end(self, gradient: Tensor) -> None:
        self.peak = self._tracker.peak
        self._tracker.peak = max(self._earlier, self.peak)
        self.saved_per_unit = self._before[2] - self._before[1]


@dataclass(frozen=True)
class StepSeconds:
    """How long a step's passes take, copies included and updates not."""

    forward: float
    backward: float

    @property
    def whole(self) -> float:
        """Both."""
        return self.forward + self.backward


_MOST_STEPS, _ENOUGH_SECONDS = 5, 2.0
"""Short steps are timed several times, and their median counts: where the host's launches are what takes long, whatever
else it does shows, in a run too."""


def step_seconds(
    model: nn.Module,
    units: UnitSelector,
    settings: StepSettings,
    loss: Callable[[torch.device], Tensor],
    device: torch.device,
    *,
    compute_context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    step_context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> StepSeconds:
    """Run a training step on a CUDA device and take the time.

    Copies are made, all from and to the same host memory, so the host needs no more than the largest unit takes.
    Weights are random numbers.

    Args:
        model: the whole module, on the meta device; it is used up.
        units: which modules are streamed, as for :func:`find_units`.
        settings: how the step will be run.
        loss: makes a batch on the device it is given, and computes its loss.
        device: the device.
        compute_context: as for :class:`Engine`.
        step_context: entered around ``loss``, as the precision does.

    Raises:
        torch.OutOfMemoryError: the step does not fit the device.
    """
    _share_memory(model, device)
    modules = find_units(model, units)
    store = _EmptyStore(make_groups(model, modules), settings.store_format, torch.device("cpu"), pin=True)
    for memory in (store.wire_memory, store.slab_memory):  # drawn on the device, which is faster
        memory.copy_(torch.randn(memory.numel(), dtype=memory.dtype, device=device) * 0.02)
    streams = Streams.on(device)
    room = device_memory(device)
    if room is not None and settings.device_limit:
        room.limit = min(room.limit, settings.device_limit)  # what is decided by, and not a limit of the allocator
    saved = SavedInputs(settings.activations, streams, room, len(modules), pin=True, host_limit=None)

    def run() -> Tensor:
        with step_context():
            return loss(device)

    def timed() -> StepSeconds:
        marks = [streams.mark()]
        _step(engine, run, close=False, after_forward=lambda: marks.append(streams.mark()))
        marks.append(streams.mark())
        streams.synchronize()
        forward, backward = (b.seconds() - a.seconds() for a, b in pairwise(marks))
        return StepSeconds(forward, backward)

    took: list[StepSeconds] = []
    try:
        engine = _engine(model, list(modules.values()), settings, store, streams, compute_context, saved)
        timed()  # kernels are chosen, and the allocator learns what is needed
        while len(took) < _MOST_STEPS and sum(step.whole for step in took) < _ENOUGH_SECONDS:
            took.append(timed())
        engine.close()
    finally:
        if room is not None:
            room.close()
    return sorted(took, key=lambda step: step.whole)[len(took) // 2]


def _engine(
    model: nn.Module,
    units: Sequence[nn.Module],
    settings: StepSettings,
    store: "_EmptyStore",
    streams: Streams,
    compute_context: Any,
    saved: SavedInputs,
) -> Engine:
    for group in store.groups:
        store.show(group)
    return Engine(
        model,
        units,
        store.groups,
        store,
        streams,
        prefetch=settings.prefetch,
        microbatch=settings.microbatch,
        sequence_chunks=settings.sequence_chunks,
        saved=saved,
        budget=Budget("never" if settings.keeps_graphs else "always"),
        sink=_NoUpdates(store, settings),
        compute_context=compute_context,
    )


def _step(
    engine: Engine, loss: Callable[[], Tensor], *, close: bool = True, after_forward: Callable[[], None] = lambda: None
) -> None:
    try:
        engine.begin_step()
        value = loss()
        after_forward()
        engine.begin_backward()
        value.backward()
        engine.end_backward()
        engine.end_step()
    except BaseException:
        engine.close()
        raise
    if close:
        engine.close()


def _share_memory(model: nn.Module, device: torch.device) -> None:
    """Parameters on the CPU that are all the same, untouched memory, and buffers of ones on the device."""
    largest = max((p.numel() for p in model.parameters()), default=0)
    memory = torch.empty(largest, dtype=torch.float32)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                data = memory[: parameter.numel()].view(parameter.shape)
                made.setdefault(id(parameter), nn.Parameter(data, parameter.requires_grad))
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.ones_like(buffer, device=device)


class _EmptyStore(Store):
    """A store with the memory of one group for all."""

    def __init__(
        self, groups: Sequence[Group], store_format: StoreFormat, device: torch.device, *, pin: bool = False
    ) -> None:
        super().__init__(groups, store_format, pin=pin)
        largest, dtype = max(g.layout.numel for g in groups), store_format.wire_dtype
        self.wire_memory, self.slab_memory = (
            torch.empty(largest, dtype=dtype, device=device, pin_memory=pin) for _ in range(2)
        )
        self._wires = [self.wire_memory[: g.layout.numel] for g in groups]
        self._views = [g.layout.views(wire) for g, wire in zip(groups, self._wires, strict=True)]

    def wire(self, group: int) -> Tensor:
        return self._wires[group]

    def host_views(self, group: int) -> list[Tensor]:
        return self._views[group]

    def take_assigned(self, groups: Iterable[Group] | None = None) -> None:
        return

    def write_wire(self, group: int, index: int, value: Tensor) -> None:
        return


class _MetaStreams(HostStreams):
    """Copies between host and device happen at once and cost nothing."""

    def copy(self, lane: Lane, target: Tensor, source: Tensor, after: Any = ()) -> Copy:
        return Copy(target, source, Event())


_MOST_HOST_BYTES = 1 << 50


class _MetaArena(Arena):
    """Host memory that takes none: a part of a tensor on the meta device."""

    def __init__(self, memory: Tensor) -> None:
        super().__init__(0)
        self.nbytes = memory.numel()
        self._memory = memory

    def view(self, dtype: torch.dtype, numel: int, offset: int = 0) -> Tensor:
        return self._memory[offset : offset + numel * dtype.itemsize].view(dtype)

    def close(self) -> None:
        return


class _Tracked(DeviceMemory):
    """What the tracker counts."""

    def __init__(self, tracker: MemoryTracker, limit: int) -> None:
        self.limit = limit
        self._tracker = tracker

    def allocated(self) -> int:
        return self._tracker.live

    def peak(self) -> int:
        return self._tracker.peak

    def reset_peak(self) -> None:
        return


class _MetaSavedInputs(SavedInputs):
    """Inputs that go to the host go nowhere.

    Attributes:
        each: host bytes of each use of a unit; all are held when the forward ends.
    """

    def __init__(
        self, settings: StepSettings, streams: Streams, tracker: MemoryTracker, units: int, part: float
    ) -> None:
        memory = _Tracked(tracker, settings.device_limit)
        # What is asked for is counted, whether it fits or not. Of the units, ``part`` are run.
        limit = int(settings.host_limit * part) if settings.activations == "auto" else _MOST_HOST_BYTES
        super().__init__(settings.activations, streams, memory, units, pin=False, host_limit=limit)
        self.each: list[int] = []
        self._host = torch.empty(_MOST_HOST_BYTES, dtype=torch.uint8, device="meta")
        tracker.leave_out(self._host)

    def put(self, tensors: Sequence[Tensor]) -> list[SavedOnHost]:
        found = super().put(tensors)
        self.each.append(sum(one.host.nbytes for one in found))
        return found

    def _arena(self, nbytes: int) -> Arena:
        return _MetaArena(self._host[:nbytes])


class _NoUpdates:
    """A sink that throws gradients away."""

    def __init__(self, store: _EmptyStore, settings: StepSettings) -> None:
        self.takes_residents_early, self.wants_norms = settings.residents_early, settings.norms
        self.overlaps = False
        self._store = store
        self._under_way: list[Any] = []

    def destination(self, group: int, last: bool) -> Tensor:
        return self._store.slab_memory[: self._store.groups[group].layout.trainable_numel]

    def landed(self, group: int, copies: Any, *args: Any) -> None:
        # A copy holds on to its source until the device has made it, and work is launched long before. Gradients of
        # units are copied from buffers that stay; those of residents are there at least until a unit's follow.
        if self._store.groups[group].resident:
            self._under_way.append(copies)
        else:
            self._under_way.clear()

    def updated(self, group: int) -> bool:
        return True

    def wait_updated(self, group: int) -> None:
        return
