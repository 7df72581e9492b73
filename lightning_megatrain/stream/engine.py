"""The engine: fetches, binds, recomputes and pushes units, in whatever order the model uses them."""

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_megatrain.memory.layout import Group
from lightning_megatrain.memory.store import Store
from lightning_megatrain.stream.autograd import Call, StreamedBlock
from lightning_megatrain.stream.budget import Budget
from lightning_megatrain.stream.chunked import chunk
from lightning_megatrain.stream.compiled import CompiledForward
from lightning_megatrain.stream.fetcher import Fetcher
from lightning_megatrain.stream.gradients import GradientBuffers, flat_norm
from lightning_megatrain.stream.microbatch import SliceRows
from lightning_megatrain.stream.order import UseOrder
from lightning_megatrain.stream.patch import drop_caches, install, uninstall
from lightning_megatrain.stream.residents import Residents
from lightning_megatrain.stream.runner import Runner
from lightning_megatrain.stream.saved import SavedInputs
from lightning_megatrain.stream.share import DeviceShare
from lightning_megatrain.stream.sink import DeviceUpdates, GradientSink
from lightning_megatrain.stream.streams import Streams
from lightning_megatrain.stream.unit import Unit, check_trainable


class Engine:
    """Streams the units of one model through a ring of device slots.

    Args:
        model: the whole module.
        modules: the units' modules, in the order of their groups.
        groups: all groups, units first.
        store: the adopted store.
        streams: the lanes of the device.
        prefetch: units fetched ahead of the one being used; the ring has one slot more.
        microbatch: batch size inside a unit; None runs the whole batch at once, ``"auto"`` as much of it as there is
            gain in, and less when memory runs out.
        sequence_chunks: slices of the sequence in which the feed-forward part of a unit is run, or None.
        saved: where inputs wait for the backward; None for where they are.
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
        microbatch: int | Literal["auto"] | None = None,
        sequence_chunks: int | None = None,
        saved: SavedInputs | None = None,
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
        self._saved = saved
        self._last: weakref.ref[Call] | None = None
        self.budget = budget or Budget()
        dtype = store.format.wire_dtype
        self.updates = updates
        self.share = None
        if sink is not None and updates is not None:
            at_once = sink.takes_residents_early
            self.share = DeviceShare(store, streams, self.residents, updates, at_once=at_once)
        store.recall = self.recall
        held = self.share.slots if self.share is not None else {}
        self._fetcher = Fetcher(self.units, store, streams, sink, prefetch=prefetch, held=held)
        self.budget.let_go = self._fetcher.let_go
        if self.share is not None:
            self.budget.give_back = self.share.give_back
        self.runner = Runner(streams, self._fetcher.bound, self.budget, SliceRows(microbatch), saved, compute_context)
        self._gradients = GradientBuffers(groups, dtype, streams) if sink is not None else None
        with torch.inference_mode(False):
            self._anchor = torch.empty(0, requires_grad=True)
        self._anchor_node = torch.autograd.graph.get_gradient_edge(self._anchor).node
        self._collecting = self._trains = False
        self.used_gradients = False
        """Gradients of the last backward have gone somewhere: it cannot be run again."""
        self._left: list[int] = []  # versions of weights when the last step without training ended
        self._orders = {True: UseOrder(), False: UseOrder()}
        self._recent: deque[int] = deque(maxlen=max(1, prefetch))
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._arrived: dict[int, int] = {}  # resident group: gradients autograd has made in this backward
        # Last, with what follows: nothing may stay on the model if there is no memory for the above.
        self._undo = [
            chunk(unit.name, unit.module, sequence_chunks, compute_context)
            for unit in self.units
            if sequence_chunks is not None
        ]
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
            if self._fetcher.in_step:
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
        if self.share is not None:
            self.share.close()
        for unit in self.units:
            uninstall(unit)
        for handle in self._hooks:
            handle.remove()
        self._hooks = []
        for undo in reversed(self._undo):  # a child of two units was wrapped twice
            undo()
        self._undo = []
        if self._saved is not None:
            self._saved.close()
        self.store.recall = lambda groups: None  # with no way back to this engine, its device memory is free at once

    @property
    def held_groups(self) -> int:
        """Groups that the device holds, to be updated there."""
        return len(self.share.held) if self.share is not None else 0

    def recall(self, groups: Collection[int] | None = None) -> None:
        """Bring what the device holds home, so that the host's bytes are the true ones.

        Args:
            groups: units, in a step; None for everything, between steps.
        """
        if self.share is not None:
            self.share.recall(groups)

    def reset(self) -> None:
        """Forget all work under way, after an error or at the end: nothing stays bound, nothing stays in a slot."""
        self.streams.synchronize()
        for unit in self.units:
            unit.unbind()
            unit.pending = 0
        self.residents.to_host()
        self._fetcher.ring.clear()
        self._fetcher.let_go()
        self._recent.clear()
        self._arrived.clear()
        self._fetcher.in_step = self._collecting = False

    # Phases of a step

    def begin_step(self, *, fresh: bool = False, trains: bool = True) -> None:
        """A step starts: residents go to the device.

        Whatever touched the host's weights since the last step is seen by this one, unless they are ``fresh``.

        Args:
            fresh: nobody wrote to weights since the last step, so what the device has of them is used again. This is
                not believed where versions have changed.
            trains: this is a training step, and not one of validation, test or prediction.
        """
        self.end_step()
        self._take_assigned()
        fresh = fresh and self._left == self._versions()
        if not fresh:
            self._let_go()
            if not trains:
                self.budget.evaluate()
        self._last = None
        if self._saved is not None:
            self._saved.begin()
        if trains:
            self.budget.begin()
            if self.share is not None:
                self.budget.reserve(self.share.begin(self.budget.spare, self.budget.size))
        elif self.share is not None:
            self.share.interrupt()
        self._fetcher.in_step = True
        self._trains = trains
        for unit in self.units:
            unit.pending = 0
            unit.used = False
        self._notice_writes()
        for order in self._orders.values():
            order.begin()
        self._bring_residents(upload=not fresh)

    def give_back(self) -> bool:
        """Memory ran out in a step that starts anew if this frees any: what it was spent on, residents included."""
        if self.budget.relieve():
            return True
        if not self.held_groups:
            return False
        assert self.share is not None
        self.end_step()
        self.budget.reserve(-self.share.give_up(0))
        return True

    def begin_again(self) -> None:
        """A training step whose forward or backward failed starts anew."""
        if self.share is not None:
            self.share.interrupt()
        self.begin_step()

    def _take_assigned(self) -> None:
        """Where the parameters' data are the host's: take over what somebody assigned to them."""
        if not (self._fetcher.in_step or self.residents.on_device or self.residents.lent or self._fetcher.bound_count):
            self.store.take_assigned()

    def _see_written(self, unit: Unit) -> None:
        """Within a step: take over what code outside of the unit wrote to its weights since it was used last.

        Raises:
            RuntimeError: they may have been being updated meanwhile.
        """
        if unit.is_bound or not ((assigned := unit.was_assigned()) or unit.was_written()):
            return
        if self.sink is not None:
            if self.sink.overlaps and not unit.used and unit.group.layout.trainable_count:
                raise RuntimeError(
                    f"Weights of unit {unit.name!r} were written to in a step, perhaps while they were being updated "
                    "behind the forward; write to them in on_train_batch_start, or set "
                    "MegaTrainStrategy(update='blocking')."
                )
            self.sink.wait_updated(unit.group.index)
        if assigned:
            self.store.take_assigned([unit.group])
        self._notice_writes([unit])

    def _notice_writes(self, units: Iterable[Unit] | None = None) -> None:
        """Whatever was written in place to weights at rest is newer than what slots have of them."""
        for unit in self.units if units is None else units:
            if not unit.is_bound and unit.was_written():
                self.store.versions[unit.group.index] += 1
                unit.seen()

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
        inside, self._fetcher.in_step = self._fetcher.in_step, False
        self._recent.clear()
        self._fetcher.ring.clear()
        if lost := self.residents.to_host():
            raise RuntimeError(
                f"Parameter {lost[0]!r} was written to after its gradient was complete, when its update had begun; "
                "set MegaTrainStrategy(update='blocking')."
            )
        if inside:
            self._notice_writes()
            if not self._trains:
                self._left = self._versions()

    def _versions(self) -> list[int]:
        """They change with what is written to weights, except in place to a parameter's ``data``."""
        return [*self.store.versions, *(p._version for group in self.store.groups for p in group.parameters)]

    def _let_go(self) -> None:
        """Of units' weights that stayed on the device for uses without gradients."""
        if self._fetcher.let_go():
            self.budget.returned()

    @contextlib.contextmanager
    def host_window(self) -> Iterator[None]:
        """Let code meet the host's weights, until the next forward if within a step, and see what it changes."""
        inside = self._fetcher.in_step
        self.end_step()
        self._take_assigned()
        try:
            yield
        finally:
            # Residents stay on the host until a module needs them: code that follows may write weights.
            self._fetcher.in_step = inside
            self._notice_writes()

    def begin_backward(self) -> None:
        """A backward whose gradients are wanted is about to run."""
        self._arrived.clear()  # of one that failed half-way
        if self._fetcher.in_step:
            self._need_residents()
        for group in self.residents.groups:
            check_trainable(group)
        if self.share is not None:
            self.share.begin_backward()
        self.used_gradients = False
        self._collecting = True

    def forget_gradients(self) -> None:
        """Of a backward that failed before any were used: take off what autograd has left on the parameters."""
        for group in self.store.groups:
            for parameter in group.parameters:
                parameter.grad = None

    def end_backward(self) -> None:
        """It has run: send the gradients that autograd left on resident parameters to the host."""
        self._collecting = False
        self._arrived.clear()
        for group in self.residents.groups:
            self._push_resident(group)
        self.budget.end()

    def _push_resident(self, group: Group) -> None:
        assert self.sink is not None
        gradients = self.residents.take_gradients(group)
        present = [g is not None for g in gradients]
        if not any(present):
            return
        self.used_gradients = True
        if self.sink.takes_residents_early:
            self.residents.give(group)
        norm = None
        if self.sink.wants_norms:
            norm = torch.linalg.vector_norm(torch.stack([flat_norm(g) for g in gradients if g is not None]))
        if self.share is not None and group.index in self.share.held:
            # Not before the backward is over: it may still read these very weights.
            self._made(group, self.share.pack(group, gradients), present, not self._collecting, norm)
            return
        target = self.sink.destination(group.index, last=True)
        copies = self.residents.push(group, gradients, target)
        self.sink.landed(group.index, copies, present, True, norm)

    # One use of a unit

    def use(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a unit's ``forward`` does while it is streamed: same arguments, same result."""
        if self._fetcher.in_step:
            self._need_residents()
            self._see_written(unit)
        else:
            self._take_assigned()
        if not torch.is_grad_enabled():
            return self._use_without_gradients(unit, args, kwargs)
        check_trainable(unit.group)
        call, tensors = Call.of(unit, *drop_caches(args, kwargs))
        trains = self.sink is not None and any(unit.requires_grad_flags())
        if not trains and not any(t.requires_grad for t in (*tensors, *unit.shared)):
            return self._use_without_gradients(unit, args, kwargs)
        self._let_go()  # what follows makes better use of the memory
        if self.sink is not None:
            self.sink.wait_updated(unit.group.index)  # an update may count as a new version when it is over
        unit.used = True
        call.preceding = list(reversed(self._recent))
        call.version = self.store.versions[unit.group.index]
        call.before, self._last = self._last, weakref.ref(call)
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
        found = self.runner.without_gradients(unit, args, kwargs, expected)
        unit.used = True
        if self._fetcher.in_step:
            try:
                self._fetcher.used(unit.group.index, self.budget.borrow)
            except torch.OutOfMemoryError:
                self.budget.lend_no_more()
        return found

    def forward(self, call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Forward of one use whose backward may follow."""
        expected = self._orders[True].observe(call.unit.group.index, self._fetcher.prefetch)
        return self.runner.forward(call, tensors, expected)

    def backward(
        self, call: Call, tensors: Sequence[Tensor], needs: Sequence[bool], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Backward of one use: recompute, push the unit's own gradients, return those of inputs and shared parameters.

        ``needs`` speaks of the call's tensors first, then of the unit's shared parameters.
        """
        unit = call.unit
        assert call.conditions is not None
        self._see_written(unit)
        if call.version != self.store.versions[unit.group.index]:
            raise RuntimeError(
                f"The weights of unit {unit.name!r} were updated between this forward and its backward, so the "
                "recompute would use other weights; run the forward again after the optimizer's step."
            )
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
        inputs, made = self.runner.backward(call, tensors, needs, gradients, [*shared, *wanted])
        for_shared = [next(made) if need else None for need in shared_needs]
        if wanted:
            self._push(unit, [next(made) if flag else None for flag in flags[:count]])
        return inputs + for_shared

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """Around code of the user's that runs units: if memory runs out outside of them, say what it was spent on.

        Raises:
            torch.OutOfMemoryError: memory ran out.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            kept, held = self.budget.kept if self._trains else 0, self.held_groups
            if not kept and not held:
                raise
            raise torch.OutOfMemoryError(
                f"Device memory ran out outside the units, with the graphs of {kept} of them kept and {held} groups "
                "updated on the device; set a smaller MegaTrainStrategy(device_memory=...), or recompute='always' "
                "and device_update='never'."
            ) from error

    # Gradients

    def _push(self, unit: Unit, gradients: Sequence[Tensor | None]) -> None:
        assert self.sink is not None
        assert self._gradients is not None
        self.used_gradients = True
        unit.pending -= 1
        last = unit.pending <= 0
        present = [g is not None for g in gradients]
        held = self.share is not None and unit.group.index in self.share.held
        if not any(present):
            if not held:  # else what other uses made is known, and used when the backward is over
                self.sink.landed(unit.group.index, [], present, last)
            return
        with self.streams.span("push", f"push {unit.name}"):
            packed = self._gradients.pack(unit.group, gradients)
            if held:
                assert self.share is not None
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
