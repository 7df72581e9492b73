"""Gradients in, updated weights out: the schedule of one step's host work."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_megatrain.memory.gradients import GradientArena, SlabRing
from lightning_megatrain.memory.layout import Group
from lightning_megatrain.memory.store import Moments, Store, StoreFormat
from lightning_megatrain.update.adam import accumulate_, sum_of_squares
from lightning_megatrain.update.optimizers import (
    AdamUpdate,
    GroupUpdate,
    TorchUpdate,
    ensure_moments,
    is_adam,
    load_optimizer_state,
)
from lightning_megatrain.update.worker import Worker

Schedule = Literal["blocking", "in_backward"]

SLABS = 3
"""Host slabs: one being filled, one being read by the update, one between."""


class Landing(Protocol):
    """A copy to the host under way."""

    @property
    def done(self) -> Any:
        """Has ``wait()``, which blocks the host until the copy is complete."""


class Updater:
    """Takes gradients unit by unit and updates weights with the user's optimizers.

    ``p.grad`` is the truth about which gradients exist. Before a backward it is read and taken off
    (:meth:`before_backward`); gradients that arrive are added to what it held, on the worker thread, in the order and
    rounding of plain accumulation; after the backward it is put back as a view of the gradient arena (:meth:`settle`).
    With the ``in_backward`` schedule gradients are used as soon as a unit has all of them and ``p.grad`` stays None.

    Args:
        store: the adopted store.
        optimizers: the user's optimizers; ``in_backward`` takes exactly one.
        schedule: when the update runs.
        pin: register gradient memory with CUDA.
        inline: do the host's share on the calling thread instead of a worker's.
    """

    def __init__(
        self, store: Store, optimizers: Sequence[Optimizer], schedule: Schedule, *, pin: bool, inline: bool
    ) -> None:
        self.schedule = schedule
        self.worker = Worker(inline=inline)
        self._store = store
        self._groups = store.groups
        self._optimizers = list(optimizers)
        dtype = store.format.wire_dtype
        unit_numel = max((g.layout.trainable_numel for g in self._groups if not g.resident), default=0)
        self._arena = GradientArena(self._groups, dtype, pin=pin)
        self._apart = GradientArena(self._groups, dtype, pin=pin)
        self._slabs = SlabRing(SLABS, unit_numel, dtype, pin=pin)
        self._wide_slabs: SlabRing | None = None
        self._pin = pin
        self._moments = Moments(self._groups) if any(is_adam(o) for o in optimizers) else None
        self._updates = [self._update_for(o) for o in optimizers]
        self._home = {p: (g, i) for g in self._groups for i, p in enumerate(g.parameters)}
        # Which parameters had a gradient when this backward began, and which got one since.
        self._before: list[list[bool]] = [[False] * g.layout.trainable_count for g in self._groups]
        self._now: list[list[bool]] = [[False] * g.layout.trainable_count for g in self._groups]
        self._open: set[int] = set()  # groups with gradients in this backward and more to come
        self._updated: set[int] = set()
        self._slab: Tensor | None = None
        self._midway = False
        self.scale = 1.0

    def _update_for(self, optimizer: Optimizer) -> GroupUpdate:
        if is_adam(optimizer) and self._store.format is not StoreFormat.FP32:
            assert self._moments is not None
            return AdamUpdate(self._store, optimizer, self._moments)
        return TorchUpdate(self._store, optimizer, self._moments if is_adam(optimizer) else None)

    # Bytes

    @property
    def nbytes(self) -> int:
        """Persistent host bytes: moments and gradients, slabs not counted."""
        return (self._moments.nbytes if self._moments else 0) + self._arena.nbytes + self._apart.nbytes

    # Backward

    def before_backward(self) -> None:
        """A backward is about to run: take ``p.grad`` off every parameter, keeping what it holds."""
        self.worker.require()
        self._updated.clear()
        self._open.clear()
        if self.schedule == "in_backward":
            self._updates[0].snapshot()
        for group, index, parameter in self._trainable():
            self._now[group.index][index] = False
            self._before[group.index][index] = parameter.grad is not None and self.schedule == "blocking"
            if parameter.grad is not None:
                if self.schedule == "blocking":
                    self._keep(group, index, parameter.grad)
                parameter.grad = None

    def _keep(self, group: Group, index: int, gradient: Tensor) -> None:
        """Bring a gradient that somebody put into ``p.grad`` into the arena."""
        view = self._arena.views(group.index)[index]
        if gradient is not view:
            view.copy_(gradient)

    def _sums_apart(self, group: int, last: bool) -> bool:
        """Whether gradients of several uses in this backward are summed before they join those of earlier ones.

        That is autograd's own order, so accumulation keeps plain training's bits.
        """
        return any(self._before[group]) and (not last or group in self._open)

    def destination(self, group: int, last: bool) -> Tensor:
        """Flat host memory, ``[trainable_numel]``, for the next gradients of ``group``; waits for a free slab."""
        numel = self._groups[group].layout.trainable_numel
        apart, first = self._sums_apart(group, last), not any(self._now[group])
        joins = not first or (any(self._before[group]) and not apart)
        used_at_once = self.schedule == "in_backward" and last and not self._groups[group].resident
        if joins or used_at_once:
            self._slab = self._take_slab(group)
            return self._slab[:numel]
        return (self._apart if apart else self._arena).flat(group)

    def _ring(self, group: int) -> SlabRing:
        if not self._groups[group].resident:
            return self._slabs
        if self._wide_slabs is None:
            widest = max(g.layout.trainable_numel for g in self._groups if g.resident)
            self._wide_slabs = SlabRing(1, widest, self._store.format.wire_dtype, pin=self._pin)
        return self._wide_slabs

    def _take_slab(self, group: int) -> Tensor:
        while (slab := self._ring(group).take(timeout=1.0)) is None:
            self.worker.require()  # a dead worker gives no slab back
        return slab

    def landed(self, group: int, copies: Sequence[Landing], present: Sequence[bool], last: bool) -> None:
        """Copies into the last :meth:`destination` are under way.

        Args:
            group: index of the group.
            copies: the copies; kept until they are done. Empty when no parameter had a gradient.
            present: per trainable parameter, whether it got one.
            last: no more gradients of this group follow before the step.

        Raises:
            RuntimeError: ``in_backward`` already updated the group in this step.
        """
        if group in self._updated:
            raise RuntimeError(
                f"Unit {self._groups[group].name!r} got gradients after it was updated: backward ran twice in one "
                "step; set MegaTrainStrategy(update='blocking')."
            )
        update = self.schedule == "in_backward" and last
        if copies or last:
            self.worker.submit(group, self._landing(group, copies, list(present), last, update))
        self._now[group] = [a or b for a, b in zip(self._now[group], present, strict=True)]
        (self._open.discard if last else self._open.add)(group)
        if update:
            self._note_updated(group)

    def _landing(
        self, group: int, copies: Sequence[Landing], present: list[bool], last: bool, update: bool
    ) -> Callable[[], None]:
        """What the worker does with gradients that arrive, from what is known now."""
        slab, self._slab = self._slab, None
        before, now = list(self._before[group]), list(self._now[group])
        together = [a or b for a, b in zip(now, present, strict=True)]
        apart = self._sums_apart(group, last)
        layout = self._groups[group].layout

        def task() -> None:
            for copy in copies:
                copy.done.wait()
            gradients = None if slab is None else slab[: layout.trainable_numel]
            held = now if apart or not any(before) else before
            if gradients is not None and any(held):
                self._add(group, (self._apart if apart else self._arena).flat(group), gradients, held, present)
                gradients = None
            if apart and last:
                self._add(group, self._arena.flat(group), self._apart.flat(group), before, together)
            if update:
                flat = self._arena.flat(group) if gradients is None else gradients
                self._updates[0].update(self._groups[group], flat, together)
            if slab is not None:
                self._ring(group).give(slab)

        return task

    def _add(self, group: int, target: Tensor, source: Tensor, held: list[bool], present: list[bool]) -> None:
        """``target += source`` where a parameter has both; its first gradient replaces what lies there."""
        if all(held) and all(present):
            accumulate_(target, source)
            return
        for index, (old, new) in enumerate(zip(held, present, strict=True)):
            span = self._groups[group].layout.span(index)
            if old and new:
                accumulate_(target[span], source[span])
            elif new:
                target[span].copy_(source[span])

    def settle(self) -> None:
        """A backward has run: wait until its gradients are on the host and put them into ``p.grad``.

        Raises:
            RuntimeError: a unit's weights were used outside the unit while updates run in backward.
        """
        for unfinished in sorted(self._open):  # uses whose backward never came
            self.landed(unfinished, [], [False] * len(self._now[unfinished]), last=True)
        self.worker.wait()
        for group, index, parameter in self._trainable():
            if parameter.grad is not None:
                self._add_stray(group, index, parameter)
            if self._has(group, index) and self.schedule == "blocking":
                parameter.grad = self._arena.views(group.index)[index]

    def _add_stray(self, group: Group, index: int, parameter: Parameter) -> None:
        """A gradient that autograd left on a unit's parameter, which was used outside its unit."""
        if self.schedule == "in_backward":
            raise RuntimeError(
                f"Parameter {group.layout.entries[index].name!r} was used outside its unit, so its gradient is "
                "complete only when backward ends; set MegaTrainStrategy(update='blocking')."
            )
        assert parameter.grad is not None
        view = self._arena.views(group.index)[index]
        if self._has(group, index):
            view.add_(parameter.grad.to(view.device))
        else:
            view.copy_(parameter.grad)
        self._now[group.index][index] = True

    def _has(self, group: Group, index: int) -> bool:
        return self._before[group.index][index] or self._now[group.index][index]

    # Step

    def step(self, optimizer: Optimizer) -> None:
        """The optimizer's step: nothing is under way and ``p.grad`` is final. Runs the optimizer's step hooks."""
        self.worker.require()
        if self.schedule == "blocking" and self._store.format is StoreFormat.FP32:
            self._seed_moments(optimizer)
            optimizer.step()
            for group in {self._home[p][0].index for p in self._parameters_of(optimizer)}:
                self._store.versions[group] += 1
            return
        work = self._step_groups if self.schedule == "blocking" else self._finish
        Optimizer.profile_hook_step(work)(optimizer)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # what a scheduler looks for

    def _seed_moments(self, optimizer: Optimizer) -> None:
        """Give parameters that Adam steps for the first time moments that are touched already."""
        if self._moments is None or not is_adam(optimizer):
            return
        for parameter in self._parameters_of(optimizer):
            group, index = self._home[parameter]
            if parameter.grad is not None and index < group.layout.trainable_count:
                ensure_moments(optimizer, parameter, self._moments.views(group.index, index))

    def _step_groups(self, optimizer: Optimizer) -> None:
        update = self._updates[self._optimizers.index(optimizer)]
        update.snapshot()
        scale, self.scale = self.scale, 1.0
        for group in self._groups:
            present = []
            for index, parameter in enumerate(group.parameters[: group.layout.trainable_count]):
                here = parameter.grad is not None and update.owns(parameter)
                if here:
                    assert parameter.grad is not None
                    self._keep(group, index, parameter.grad)
                present.append(here)
            if any(present):
                update.update(group, self._arena.flat(group.index), present, scale)
                self._store.versions[group.index] += 1

    def _finish(self, optimizer: Optimizer) -> None:
        """With ``in_backward`` every group was updated when its gradients landed; now the step is whole."""
        self._midway = False

    def gradient_norm(self, optimizer: Optimizer) -> float:
        """Euclidean norm of all ``p.grad`` of an optimizer, summed in double."""
        parameters = self._parameters_of(optimizer)
        return math.sqrt(sum(sum_of_squares(p.grad.reshape(-1)) for p in parameters if p.grad is not None))

    def wait_updated(self, group: int) -> None:
        """Block until no update of ``group`` is under way.

        Raises:
            BaseException: what the worker raised, once.
        """
        self.worker.wait(group)

    # State

    def load_optimizer_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Fill the optimizers from what their ``state_dict()`` returned, moments straight into their arenas."""
        for optimizer, state in zip(self._optimizers, states, strict=False):
            load_optimizer_state(optimizer, state, self._place_state)

    def _place_state(self, optimizer: Optimizer, parameter: Parameter, state: dict[str, Any]) -> dict[str, Any]:
        kept = {k: v.detach() if isinstance(v, Tensor) else v for k, v in state.items()}
        if self._moments is not None and is_adam(optimizer) and parameter in self._home:
            group, index = self._home[parameter]
            if index < group.layout.trainable_count:
                names = ("exp_avg", "exp_avg_sq")
                for name, moment in zip(names, self._moments.views(group.index, index), strict=True):
                    moment.copy_(kept[name])
                    kept[name] = moment
                kept["step"] = kept["step"].clone() if isinstance(kept["step"], Tensor) else kept["step"]
                return kept
        return {k: v.to("cpu", copy=True) if isinstance(v, Tensor) else v for k, v in kept.items()}

    @property
    def torn(self) -> bool:
        """An update failed, or a step was left, half-way: this state must not be saved."""
        return self.worker.failed is not None or self._midway

    def require_whole(self) -> None:
        """Refuse to hand out a torn state.

        Raises:
            RuntimeError: says what happened.
        """
        if self.torn:
            raise RuntimeError(
                "The last step was left half-way, so weights and optimizer state do not belong together and are not "
                "saved; go back to an earlier checkpoint."
            ) from self.worker.failed

    def reset(self) -> None:
        """After an error elsewhere: let the worker finish what it has and forget the backward under way."""
        self.worker.close()
        self._open.clear()
        self._slab = None

    def close(self) -> None:
        """End the worker and give gradient memory back; ``p.grad`` is None afterwards."""
        self.worker.close()
        for _, _, parameter in self._trainable():
            parameter.grad = None
        for memory in (self._slabs, self._wide_slabs, self._arena, self._apart):
            if memory is not None:
                memory.close()

    # Helpers

    def _note_updated(self, group: int) -> None:
        self._midway = True
        self._updated.add(group)
        self._store.versions[group] += 1

    def _trainable(self) -> Iterator[tuple[Group, int, Parameter]]:
        for group in self._groups:
            for index, parameter in enumerate(group.parameters[: group.layout.trainable_count]):
                yield group, index, parameter

    def _parameters_of(self, optimizer: Optimizer) -> list[Parameter]:
        return [p for param_group in optimizer.param_groups for p in param_group["params"] if p in self._home]
