"""The engine: fetches, binds, recomputes and pushes units, in whatever order the model uses them."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_megatrain.memory.layout import Group
from lightning_megatrain.memory.slots import Slot
from lightning_megatrain.memory.store import Store
from lightning_megatrain.stream.autograd import Call, Output, StreamedBlock
from lightning_megatrain.stream.budget import Budget
from lightning_megatrain.stream.closure import check_graph
from lightning_megatrain.stream.compiled import CompiledForward
from lightning_megatrain.stream.fetcher import Fetcher
from lightning_megatrain.stream.gradients import GradientBuffers, InputGradients, ParameterGradients, flat_norm
from lightning_megatrain.stream.kept import KeptGraph
from lightning_megatrain.stream.microbatch import Slices
from lightning_megatrain.stream.order import UseOrder
from lightning_megatrain.stream.patch import drop_caches, install, uninstall
from lightning_megatrain.stream.residents import Residents
from lightning_megatrain.stream.share import DeviceShare
from lightning_megatrain.stream.sink import DeviceUpdates, GradientSink
from lightning_megatrain.stream.streams import Streams
from lightning_megatrain.stream.unit import Conditions, Unit, check_trainable, no_autocast_cache

_T = TypeVar("_T")


class Engine:
    """Streams the units of one model through a ring of device slots.

    Args:
        model: the whole module.
        modules: the units' modules, in the order of their groups.
        groups: all groups, units first.
        store: the adopted store.
        streams: the lanes of the device.
        prefetch: units fetched ahead of the one being used; the ring has one slot more.
        microbatch: batch size inside a unit, or None to run the whole batch at once.
        budget: decides which graphs are kept from the forward, so that their backward computes nothing again.
        compile: run blocks through ``torch.compile``.
        sink: where gradients go; None for a run without training.
        updates: updates groups that the device holds; None where all updates are the host's.
        compute_context: entered around every block's forward, in forward and recompute alike.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[nn.Module],
        groups: Sequence[Group],
        store: Store,
        streams: Streams,
        *,
        prefetch: int = 2,
        microbatch: int | None = None,
        budget: Budget | None = None,
        compile: bool = False,
        sink: GradientSink | None = None,
        updates: DeviceUpdates | None = None,
        compute_context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.store = store
        self.streams = streams
        self.sink = sink
        self.units = [
            Unit(group, module, partial(store.at_rest, group.index))
            for group, module in zip(groups, modules, strict=False)
        ]
        for unit in self.units if compile else ():
            unit.forward = CompiledForward(unit.name, unit.forward)
        self.residents = Residents(groups, store, streams)
        self._microbatch = microbatch
        self.budget = budget or Budget()
        self._compute_context = compute_context
        dtype = store.format.wire_dtype
        self.updates = updates
        self.share = None
        if sink is not None and updates is not None:
            at_once = sink.takes_residents_early
            self.share = DeviceShare(store, streams, self.residents, updates, at_once=at_once)
        store.recall = self.recall
        held = self.share.slots if self.share is not None else {}
        self._fetcher = Fetcher(self.units, store, streams, sink, prefetch=prefetch, held=held)
        self._gradients = GradientBuffers(groups, dtype, streams) if sink is not None else None
        with torch.inference_mode(False):
            self._anchor = torch.empty(0, requires_grad=True)
        self._anchor_node = torch.autograd.graph.get_gradient_edge(self._anchor).node
        self._collecting = False
        self._orders = {True: UseOrder(), False: UseOrder()}
        self._recent: deque[int] = deque(maxlen=max(1, prefetch))
        self._in_step = False
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._arrived: dict[int, int] = {}  # resident group: gradients autograd has made in this backward
        self._install(model, groups)

    # Life of the engine

    def _install(self, model: nn.Module, groups: Sequence[Group]) -> None:
        for unit in self.units:
            install(unit, self.use)
        resident = {id(p) for group in groups if group.resident for p in group.parameters}

        # Outside a step a module borrows device copies for one forward: nobody says when the host's weights change, and
        # what is written to them must not be lost. Plain functions: deep-copying a module copies its hooks, and a bound
        # method would take the engine along.
        def lend(module: nn.Module, args: Any) -> None:
            if self._in_step:
                self._need_residents()
            elif not self.residents.on_device:
                self._take_assigned()
                self._wait_for_residents()
                self.residents.lend(module)

        def take_back(module: nn.Module, args: Any, output: Any) -> None:
            self.residents.take_back(module)

        for module in model.modules():
            if any(id(p) in resident for p in module.parameters(recurse=False)):
                self._hooks.append(module.register_forward_pre_hook(lend))
                self._hooks.append(module.register_forward_hook(take_back, always_call=True))
        if self.sink is not None and self.sink.takes_residents_early:
            for group in self.residents.groups:
                for parameter in group.parameters[: group.layout.trainable_count]:
                    hook = parameter.register_post_accumulate_grad_hook(lambda p, g=group: self._resident_made(g))
                    self._hooks.append(hook)

    def _resident_made(self, group: Group) -> None:
        """Autograd finished the gradient of one parameter of a resident group."""
        self._arrived[group.index] = self._arrived.get(group.index, 0) + 1
        if self._arrived[group.index] == group.layout.trainable_count:
            self._push_resident(group)

    def close(self) -> None:
        """Take everything off the model; its parameters' data are host views afterwards."""
        self._take_assigned()
        self.reset()
        self.recall()
        for unit in self.units:
            uninstall(unit)
        for handle in self._hooks:
            handle.remove()
        self._hooks = []

    @property
    def held_groups(self) -> int:
        """Groups that the device holds, to be updated there."""
        return len(self.share.held) if self.share is not None else 0

    def recall(self) -> None:
        """Between steps: bring what the device holds home, so that the host's bytes are the true ones."""
        if self.share is not None:
            self.share.recall()

    def reset(self) -> None:
        """Forget all work under way, after an error or at the end: nothing stays bound, nothing stays in a slot."""
        self.streams.synchronize()
        for unit in self.units:
            unit.unbind()
            unit.pending = 0
        self.residents.to_host()
        self._fetcher.ring.clear()
        self._recent.clear()
        self._arrived.clear()
        self._in_step = self._collecting = False

    # Phases of a step

    def begin_step(self, *, upload: bool = True, trains: bool = True) -> None:
        """A step starts: residents go to the device, slots are stale.

        Whatever touched the host's weights since the last step is seen by this one, for residents unless ``upload``
        is False.

        Args:
            upload: refresh the device's copies of residents.
            trains: this is a training step, and not one of validation, test or prediction.
        """
        self.end_step()
        self._take_assigned()
        if trains:
            self.budget.begin()
            if self.share is not None:
                self.budget.reserve(self.share.begin(self.budget.spare))
        self._in_step = True
        for unit in self.units:
            unit.pending = 0
        for order in self._orders.values():
            order.begin()
        self._bring_residents(upload=upload)

    def _take_assigned(self) -> None:
        """Where the parameters' data are the host's: take over what somebody assigned to them."""
        if not (self._in_step or self.residents.on_device or self.residents.lent or self._fetcher.bound_count):
            self.store.take_assigned()

    def _need_residents(self) -> None:
        """Within a step, after :meth:`host_window`: take over what was written meanwhile, and go on."""
        if not self.residents.on_device:
            self.store.take_assigned()
            self._bring_residents()

    def _bring_residents(self, *, upload: bool = True) -> None:
        if not self.residents.on_device:
            self._wait_for_residents()
        self.residents.to_device(upload=upload)

    def _wait_for_residents(self) -> None:
        for group in self.residents.groups if self.sink is not None else ():
            assert self.sink is not None
            self.sink.wait_updated(group.index)

    def end_step(self) -> None:
        """The step's forward and backward are over: weights are on the host again. May be called twice.

        Raises:
            RuntimeError: a resident weight was written to when its update had begun.
        """
        self._in_step = False
        self._recent.clear()
        self._fetcher.ring.clear()
        if lost := self.residents.to_host():
            raise RuntimeError(
                f"Parameter {lost[0]!r} was written to after its gradient was complete, when its update had begun; "
                "set MegaTrainStrategy(update='blocking')."
            )

    @contextlib.contextmanager
    def host_window(self) -> Iterator[None]:
        """Let code meet the host's weights, until the next forward if within a step, and see what it changes."""
        inside = self._in_step
        self.end_step()
        self._take_assigned()
        try:
            yield
        finally:
            # Residents stay on the host until a module needs them: code that follows may write weights.
            self._in_step = inside

    def begin_backward(self) -> None:
        """A backward whose gradients are wanted is about to run."""
        self._arrived.clear()  # of one that failed half-way
        if self._in_step:
            self._need_residents()
        for group in self.residents.groups:
            check_trainable(group)
        if self.share is not None:
            self.share.begin_backward()
        self._collecting = True

    def end_backward(self) -> None:
        """It has run: send the gradients that autograd left on resident parameters to the host."""
        self._collecting = False
        self._arrived.clear()
        for group in self.residents.groups:
            self._push_resident(group)

    def _push_resident(self, group: Group) -> None:
        assert self.sink is not None
        gradients = self.residents.take_gradients(group)
        present = [g is not None for g in gradients]
        if not any(present):
            return
        if self.sink.takes_residents_early:
            self.residents.give(group)
        norm = None
        if self.sink.wants_norms:
            norm = torch.linalg.vector_norm(torch.stack([flat_norm(g) for g in gradients if g is not None]))
        if self.share is not None and group.index in self.share.held:
            self._made(group, self.share.pack(group, gradients), present, True, norm)
            return
        target = self.sink.destination(group.index, last=True)
        copies = self.residents.push(group, gradients, target)
        self.sink.landed(group.index, copies, present, True, norm)

    # One use of a unit

    def use(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a unit's ``forward`` does while it is streamed: same arguments, same result."""
        if self._in_step:
            self._need_residents()
        else:
            self._take_assigned()
        if not torch.is_grad_enabled():
            return self._use_without_gradients(unit, args, kwargs)
        check_trainable(unit.group)
        call, tensors = Call.of(unit, *drop_caches(args, kwargs))
        trains = self.sink is not None and any(unit.requires_grad_flags())
        if not trains and not any(t.requires_grad for t in (*tensors, *unit.shared)):
            return self._use_without_gradients(unit, args, kwargs)
        call.preceding = list(reversed(self._recent))
        call.version = self.store.versions[unit.group.index]
        if trains:
            unit.pending += 1
            if unit.pending > 1 and any(p._backward_hooks for p in unit.group.parameters):
                raise RuntimeError(
                    f"Unit {unit.name!r} is used twice in one step and a parameter of it has a gradient hook, which "
                    "would see the gradient of each use instead of their sum; use on_before_optimizer_step."
                )
        outputs = StreamedBlock.apply(self, call, self._anchor if trains else None, *tensors, *unit.shared)
        self._recent.append(unit.group.index)
        assert call.output is not None
        return call.output.rebuild(outputs)

    def _use_without_gradients(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        expected = self._orders[False].observe(unit.group.index, self._fetcher.prefetch)
        if self._microbatch is None:
            with self._bound(unit, expected) as slot, no_autocast_cache(), self._compute_context():
                output, tensors = Output.of(unit.forward(*args, **kwargs))
                return output.rebuild([_own(t, slot) for t in tensors])
        call, inputs = Call.of(unit, args, kwargs)
        slices = Slices(unit.name, inputs, self._microbatch)
        parts = []
        with self._bound(unit, expected) as slot, no_autocast_cache(), self._compute_context():
            for part in slices:
                call.output, tensors = Output.of(call.run(slices.take(inputs, part)))
                parts.append([_own(t, slot) for t in tensors])
        assert call.output is not None
        return call.output.rebuild(slices.join(parts))

    def forward(self, call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Forward of one use whose backward may follow. Returns outputs without a graph.

        The block runs with gradients on, and unless its graph is kept it is dropped at once: code that asks
        ``is_grad_enabled`` and kernels that choose by ``requires_grad`` take the same path as in the recompute.
        """
        unit = call.unit
        call.conditions = Conditions.capture(unit, self.streams)
        buffers = unit.buffers_before()
        input_versions = [t._version for t in tensors]
        slices = Slices(unit.name, tensors, self._microbatch)
        expected = self._orders[True].observe(unit.group.index, self._fetcher.prefetch)
        keeps = self.budget.keeps(tensors)
        parts = self._unless_memory_runs_out(lambda: self._forward_slices(call, tensors, slices, expected, keeps))
        if parts is None:
            call.conditions.rewind(self.streams, buffers)
            parts = self._forward_slices(call, tensors, slices, expected, False)
        if [t._version for t in tensors] != input_versions:
            raise RuntimeError(
                f"Unit {unit.name!r} changes one of its inputs in place, so it cannot be recomputed from them; "
                "write the operation out of place, or choose other modules with MegaTrainStrategy(units=...)."
            )
        if unit.note_buffers(buffers):
            assert buffers is not None
            call.conditions.buffers = {key: copy for key, (_, _, copy) in buffers.items()}
        assert call.conditions.random_state is not None
        drawn = zip(call.conditions.random_state, self.streams.random_state(), strict=True)
        if all(torch.equal(before, after) for before, after in drawn):
            call.conditions.random_state = None
        call.output_shapes = [o.shape for o in parts[-1]]
        return slices.join(parts)

    def _forward_slices(
        self, call: Call, tensors: Sequence[Tensor], slices: Slices, expected: Sequence[int], keeps: bool
    ) -> list[list[Tensor]]:
        """Outputs of each slice, without a graph; with ``keeps`` the graphs are in ``call.kept``."""
        unit, parts = call.unit, []
        kept = KeptGraph(unit.name) if keeps else None
        with self._bound(unit, expected) as slot:
            for part in slices:
                with self.budget.making(), kept.saving(slot) if kept is not None else contextlib.nullcontext():
                    leaves, outputs = self._run(call, slices.take(tensors, part), [t.requires_grad for t in tensors])
                check_graph(unit, leaves, outputs, expected=lambda: kept is not None and kept.is_bound)
                parts.append([_own(o.detach(), slot) for o in outputs])
                if kept is not None:
                    kept.add(leaves, outputs)
                del leaves, outputs  # and, unless kept, this slice's graph, before the next one's is made
        call.kept = kept
        if kept is not None:
            self.budget.hold(kept)
        return parts

    def backward(
        self, call: Call, tensors: Sequence[Tensor], needs: Sequence[bool], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Backward of one use: recompute, push the unit's own gradients, return those of inputs and shared parameters.

        ``needs`` speaks of the call's tensors first, then of the unit's shared parameters.
        """
        unit = call.unit
        assert call.conditions is not None
        if call.version != self.store.versions[unit.group.index]:
            raise RuntimeError(
                f"The weights of unit {unit.name!r} were updated between this forward and its backward, so the "
                "recompute would use other weights; run the forward again after the optimizer's step."
            )
        slices = Slices(unit.name, tensors, self._microbatch)
        flags = call.conditions.requires_grad
        # `autograd.grad` with respect to some inputs must leave parameters alone; `backward` reaches every leaf, and so
        # the anchor.
        collects = self.sink is not None and torch._C._will_engine_execute_node(self._anchor_node)
        if collects and not self._collecting:
            raise RuntimeError(
                "A backward ran that the strategy was not told of; call self.manual_backward(loss) instead of "
                "loss.backward()."
            )
        count = unit.group.layout.trainable_count if collects else 0
        wanted = [p for p, flag in zip(unit.group.parameters[:count], flags[:count], strict=True) if flag]
        needs, shared_needs = needs[: len(tensors)], needs[len(tensors) :]
        shared = [p for p, need in zip(unit.shared, shared_needs, strict=True) if need]
        find = partial(self._backward_slices, call, tensors, needs, gradients, slices, [*shared, *wanted])
        # A second backward finds no graph any more and computes it again.
        kept = call.kept if call.kept is not None and call.kept.left else None
        found = self._unless_memory_runs_out(lambda: find(kept))
        inputs, made = found if found is not None else find(None)
        for_shared = [next(made) if need else None for need in shared_needs]
        if wanted:
            self._push(unit, [next(made) if flag else None for flag in flags[:count]])
        return inputs + for_shared

    def _backward_slices(
        self,
        call: Call,
        tensors: Sequence[Tensor],
        needs: Sequence[bool],
        gradients: Sequence[Tensor | None],
        slices: Slices,
        parameters: Sequence[Tensor],
        kept: KeptGraph | None,
    ) -> tuple[list[Tensor | None], Iterator[Tensor | None]]:
        """Gradients of the inputs, None where none is needed, and of ``parameters``."""
        unit, conditions = call.unit, call.conditions
        assert conditions is not None
        for_inputs, for_parameters = InputGradients(slices, needs), ParameterGradients(len(parameters), slices)
        restored = conditions.restored(unit, self.streams) if kept is None else contextlib.nullcontext()
        with self._bound(unit, call.preceding) as slot, restored:
            for part in slices:
                if kept is not None:
                    leaves, outputs = kept.take()
                else:
                    with conditions.numerics():
                        leaves, outputs = self._run(call, slices.take(tensors, part), needs)
                if part.stop in (None, len(tensors[0])) and [o.shape for o in outputs] != call.output_shapes:
                    raise RuntimeError(
                        f"Unit {unit.name!r} gave outputs of other shapes when it was recomputed; its forward must "
                        "depend on its arguments, parameters and buffers alone."
                    )
                pairs = [
                    (o, g if slices.whole else g[part])
                    for o, g in zip(outputs, gradients, strict=True)
                    if g is not None and o.requires_grad
                ]
                targets = [leaf for leaf, need in zip(leaves, needs, strict=True) if need] + list(parameters)
                found: Sequence[Tensor | None] = [None] * len(targets)
                if pairs and targets:
                    bound = kept.bound(slot) if kept is not None else contextlib.nullcontext()
                    with self.streams.span("compute", f"backward {unit.name}"), bound:
                        found = torch.autograd.grad(
                            [o for o, _ in pairs], targets, [g for _, g in pairs], allow_unused=True
                        )
                for_inputs.add(found[: sum(needs)])
                for_parameters.add(found[sum(needs) :])
                del leaves, outputs, pairs, targets, found  # likewise
        return for_inputs.result(), for_parameters.result()

    def _run(self, call: Call, tensors: Sequence[Tensor], needs: Sequence[bool]) -> tuple[list[Tensor], list[Tensor]]:
        """Run the bound block with gradients on; returns the leaves that stand for its inputs, and its outputs."""
        leaves = [t.detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
        with (
            torch.enable_grad(),
            no_autocast_cache(),
            self._compute_context(),
            self.streams.span("compute", f"forward {call.unit.name}"),
        ):
            output, outputs = Output.of(call.run(leaves))
        if not outputs:
            raise RuntimeError(
                f"Unit {call.unit.name!r} returns no tensor that autograd could follow; return tensors, or tuples, "
                "lists or dicts of them, or make other modules units with MegaTrainStrategy(units=...)."
            )
        if call.output is None:
            call.output = output
        return leaves, outputs

    def _bound(self, unit: Unit, expected: Sequence[int]) -> contextlib.AbstractContextManager[Slot]:
        # Outside a step nobody says when the host's weights change, so no slot is trusted twice.
        return self._fetcher.bound(unit, expected, forget=not self._in_step)

    def _unless_memory_runs_out(self, run: Callable[[], _T]) -> _T | None:
        """What ``run`` returns, or None if memory ran out in it and there is more now."""
        try:
            return run()
        except torch.OutOfMemoryError:
            if not self.budget.relieve():
                raise
        return None  # and the error with its frames, which hold tensors, is gone

    # Gradients

    def _push(self, unit: Unit, gradients: Sequence[Tensor | None]) -> None:
        assert self.sink is not None
        assert self._gradients is not None
        unit.pending -= 1
        last = unit.pending <= 0
        present = [g is not None for g in gradients]
        if not any(present):
            self.sink.landed(unit.group.index, [], present, last)
            return
        with self.streams.span("push", f"push {unit.name}"):
            packed = self._gradients.pack(unit.group, gradients)
            if self.share is not None and unit.group.index in self.share.held:
                flat = self.share.collect(unit.group, packed, last)
                norm = flat_norm(flat) if self.sink.wants_norms else None
                self._made(unit.group, flat, present, last, norm)
                return
            norm = flat_norm(packed) if self.sink.wants_norms else None
            target = self.sink.destination(unit.group.index, last)
            copy = self.streams.copy("push", target, packed, after=[self.streams.record()])
            self._gradients.pushed(copy.done)
        self.sink.landed(unit.group.index, [copy], present, last, norm)

    def _made(self, group: Group, flat: Tensor, present: Sequence[bool], last: bool, norm: Tensor | None) -> None:
        assert self.share is not None
        assert self.updates is not None
        self.updates.made(group.index, flat, self.share.held[group.index].memory, present, last, norm)


def _own(tensor: Tensor, slot: Slot) -> Tensor:
    """A block may return a view of its weights; the slot's bytes are gone after release, so that is copied."""
    aliases = tensor.untyped_storage()._cdata == slot.buffer.untyped_storage()._cdata
    return tensor.clone() if aliases else tensor
