"""One use of a unit: its forward, and its backward from a kept graph or by computing the forward again."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from lightning_megatrain.memory.slots import Slot
from lightning_megatrain.stream.autograd import Call, Output
from lightning_megatrain.stream.budget import Budget
from lightning_megatrain.stream.closure import check_graph
from lightning_megatrain.stream.gradients import InputGradients, ParameterGradients
from lightning_megatrain.stream.kept import KeptGraph
from lightning_megatrain.stream.microbatch import CannotCutError, SliceRows, Slices
from lightning_megatrain.stream.saved import SavedInputs, SavedOnHost
from lightning_megatrain.stream.streams import Streams
from lightning_megatrain.stream.unit import Conditions, Unit, no_autocast_cache

_T = TypeVar("_T")


class Bind(Protocol):
    """Binds a unit to a slot for the time of a context, while the units expected next are being fetched."""

    def __call__(self, unit: Unit, expected: Sequence[int]) -> contextlib.AbstractContextManager[Slot]:
        """The unit's parameters are views of the slot inside the context."""


class Runner:
    """Runs units on their inputs, slice by slice, and again with less when memory runs out.

    Args:
        streams: the lanes of the device.
        bind: binds a unit to its weights.
        budget: decides which graphs are kept, and frees device memory when it runs out.
        slice_rows: decides how much of a batch goes through a unit at once.
        saved: where inputs wait for the backward; None for where they are.
        compute_context: entered around every block's forward, in forward and recompute alike.
    """

    def __init__(
        self,
        streams: Streams,
        bind: Bind,
        budget: Budget,
        slice_rows: SliceRows,
        saved: SavedInputs | None,
        compute_context: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        self._streams = streams
        self._bound = bind
        self._budget = budget
        self._slice_rows = slice_rows
        self._saved = saved
        self._compute_context = compute_context

    def without_gradients(
        self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any], expected: Sequence[int]
    ) -> Any:
        """A use that no backward follows."""
        call, inputs = Call.of(unit, args, kwargs)
        before, buffers = Conditions.capture(unit, self._streams), {}
        if any(before.training):
            buffers = unit.buffers_before(at_first=False)
        found = None
        while found is None:
            run = partial(self._cut_without_gradients, call, inputs, expected)
            try:
                found = self._unless_memory_runs_out(run, call, inputs)
            except CannotCutError:
                if not self._slice_rows.leave_whole():
                    raise
            if found is None:
                before.rewind(self._streams, buffers)
        return found[0]

    def _cut_without_gradients(self, call: Call, inputs: Sequence[Tensor], expected: Sequence[int]) -> tuple[Any]:
        slices = Slices(call.unit.name, inputs, self._slice_rows.of(inputs))
        parts = []
        with self._bound(call.unit, expected) as slot, no_autocast_cache(), self._compute_context():
            for part in slices:
                call.output, tensors = Output.of(call.run(slices.take(inputs, part)))
                parts.append([_own(t, slot) for t in tensors])
        assert call.output is not None
        return (call.output.rebuild(slices.join(parts)),)

    def forward(self, call: Call, tensors: Sequence[Tensor], expected: Sequence[int]) -> list[Tensor]:
        """Forward of one use whose backward may follow. Returns outputs without a graph.

        The block runs with gradients on, and unless its graph is kept it is dropped at once: code that asks
        ``is_grad_enabled`` and kernels that choose by ``requires_grad`` take the same path as in the recompute.
        """
        unit = call.unit
        call.conditions = Conditions.capture(unit, self._streams)
        buffers = unit.buffers_before()
        input_versions = [t._version for t in tensors]
        call.slice_rows = self._slice_rows.of(tensors)
        keeps, joined = self._budget.keeps(tensors), None
        while joined is None:
            run = partial(self._forward_slices, call, tensors, expected, keeps)
            try:
                joined = self._unless_memory_runs_out(run, call, tensors)
                keeps = keeps and joined is not None
            except CannotCutError:
                if not self._slice_rows.leave_whole():
                    raise
                call.slice_rows = None
            if joined is None:
                call.conditions.rewind(self._streams, buffers)
        if [t._version for t in tensors] != input_versions:
            raise RuntimeError(
                f"Unit {unit.name!r} changes one of its inputs in place, so it cannot be recomputed from them; "
                "write the operation out of place, or choose other modules with MegaTrainStrategy(units=...)."
            )
        if unit.note_buffers(buffers):
            # What was not copied has not been written to, though another may have taken its place.
            call.conditions.buffers = {key: b if copy is None else copy for key, (b, _, copy) in buffers.items()}
        assert call.conditions.random_state is not None
        drawn = zip(call.conditions.random_state, self._streams.random_state(), strict=True)
        if all(torch.equal(before, after) for before, after in drawn):
            call.conditions.random_state = None
        return joined

    def _forward_slices(
        self, call: Call, tensors: Sequence[Tensor], expected: Sequence[int], keeps: bool
    ) -> list[Tensor]:
        """Outputs of all slices, joined and without a graph; with ``keeps`` the graphs are in ``call.kept``."""
        unit, parts = call.unit, []
        slices = Slices(unit.name, tensors, call.slice_rows)
        kept = KeptGraph(unit.name) if keeps else None
        with self._bound(unit, expected) as slot:
            for part in slices:
                with self._budget.making(), kept.saving(slot) if kept is not None else contextlib.nullcontext():
                    leaves, outputs = self._run(call, slices.take(tensors, part), [t.requires_grad for t in tensors])
                check_graph(unit, leaves, outputs, expected=lambda: kept is not None and kept.is_bound)
                parts.append([_own(o.detach(), slot) for o in outputs])
                if kept is not None:
                    kept.add(leaves, outputs, [*unit.group.parameters, *unit.shared])
                del leaves, outputs  # and, unless kept, this slice's graph, before the next one's is made
        joined = slices.join(parts)
        call.output_shapes = [o.shape for o in parts[-1]]
        call.kept = kept
        if kept is not None:
            self._budget.hold(kept)
        return joined

    def backward(
        self,
        call: Call,
        tensors: Sequence[Tensor],
        needs: Sequence[bool],
        gradients: Sequence[Tensor | None],
        parameters: Sequence[Tensor],
    ) -> tuple[list[Tensor | None], Iterator[Tensor | None]]:
        """Gradients of one use: of its inputs, None where ``needs`` does not ask for them, and of ``parameters``."""
        found = None
        while found is None:
            # A second backward finds no graph any more and computes it again.
            kept = call.kept if call.kept is not None and call.kept.left else None
            run = partial(self._backward_slices, call, tensors, needs, gradients, parameters, kept)
            found = self._unless_memory_runs_out(run, call, tensors)
            if found is None and call.kept is not None:
                call.kept.drop()
        return found

    def _backward_slices(
        self,
        call: Call,
        tensors: Sequence[Tensor],
        needs: Sequence[bool],
        gradients: Sequence[Tensor | None],
        parameters: Sequence[Tensor],
        kept: KeptGraph | None,
    ) -> tuple[list[Tensor | None], Iterator[Tensor | None]]:
        """Gradients of the inputs, None where none is needed, and of ``parameters``."""
        unit, conditions = call.unit, call.conditions
        assert conditions is not None
        slices = Slices(unit.name, tensors, call.slice_rows)
        for_inputs, for_parameters = InputGradients(slices, needs), ParameterGradients(len(parameters), slices)
        restored = conditions.restored(unit, self._streams) if kept is None else contextlib.nullcontext()
        with self._bound(unit, call.preceding) as slot, restored:
            for part in slices:
                if kept is not None:
                    leaves, outputs = kept.take()
                else:
                    with conditions.numerics():
                        leaves, outputs = self._run(call, slices.take(tensors, part), needs, verb="recompute")
                shapes = [o.shape for o in outputs]
                if slices.is_last(part) and shapes != (call.output_shapes or shapes):
                    raise RuntimeError(
                        f"Unit {unit.name!r} gave outputs of other shapes when it was recomputed; its forward must "
                        "depend on its arguments, parameters and buffers alone."
                    )
                pairs = [
                    (o, g if slices.whole else g[part])
                    for o, g in zip(outputs, gradients, strict=True)
                    if g is not None and o.requires_grad
                ]
                targets: list[Any] = [leaf for leaf, need in zip(leaves, needs, strict=True) if need]
                targets += parameters if kept is None else kept.edges(parameters)
                found: Sequence[Tensor | None] = [None] * len(targets)
                if pairs and targets:
                    bound = kept.bound(slot) if kept is not None else contextlib.nullcontext()
                    with self._streams.span("compute", f"backward {unit.name}"), bound:
                        found = torch.autograd.grad(
                            [o for o, _ in pairs], targets, [g for _, g in pairs], allow_unused=True
                        )
                for_inputs.add(found[: sum(needs)])
                for_parameters.add(found[sum(needs) :])
                del leaves, outputs, pairs, targets, found  # likewise
        return for_inputs.result(), for_parameters.result()

    def _run(
        self, call: Call, tensors: Sequence[Tensor], needs: Sequence[bool], verb: str = "forward"
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Run the bound block with gradients on; returns the leaves that stand for its inputs, and its outputs."""
        leaves = [t.detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
        with (
            torch.enable_grad(),
            no_autocast_cache(),
            self._compute_context(),
            self._streams.span("compute", f"{verb} {call.unit.name}"),
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

    def _unless_memory_runs_out(self, run: Callable[[], _T], call: Call, tensors: Sequence[Tensor]) -> _T | None:
        """What ``run`` returns, or None if memory ran out in it and another try may take less."""
        try:
            return run()
        except torch.OutOfMemoryError:
            if not self._budget.relieve() and not self._takes_smaller_slices(call, tensors):
                raise
        return None  # and the error with its frames, which hold tensors, is gone

    def _takes_smaller_slices(self, call: Call, tensors: Sequence[Tensor]) -> bool:
        # Random numbers that were drawn slice by slice cannot be drawn again in other slices.
        drawn = call.conditions is not None and call.conditions.random_state is not None
        if (drawn and call.output_shapes) or not self._slice_rows.shrink(tensors, call.slice_rows):
            return False
        call.slice_rows = self._slice_rows.of(tensors)
        call.output_shapes = []  # those of slices that are no more
        return True

    # Inputs

    def save_inputs(self, call: Call, tensors: Sequence[Tensor]) -> list[SavedOnHost]:
        """After the forward of a use: those of its inputs that wait on the host for the backward."""
        return [] if self._saved is None or call.kept is not None else self._saved.put(tensors)

    def saved_inputs(self, call: Call, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """All inputs of a use whose backward begins, given those that are not on the host; fetches the next ones."""
        if self._saved is None:
            return tensors
        found = None
        while found is None:
            found = self._unless_memory_runs_out(partial(self._saved.get, call.saved, tensors), call, tensors)
        before = call.before() if call.before is not None else None
        if before is not None and before.saved:
            with contextlib.suppress(torch.OutOfMemoryError):  # then it is fetched when it is needed
                self._saved.prefetch(before.saved)
        return found


def _own(tensor: Tensor, slot: Slot) -> Tensor:
    """A block may return a view of its weights; the slot's bytes are gone after release, so that is copied."""
    aliases = tensor.untyped_storage()._cdata == slot.buffer.untyped_storage()._cdata
    return tensor.clone() if aliases else tensor
