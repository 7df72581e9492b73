"""Gradients of one step on the host: where they land, how they add up, and what ``p.grad`` shows."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_megatrain.memory.gradients import GradientArena, SlabRing
from lightning_megatrain.memory.layout import Group
from lightning_megatrain.memory.progress import working
from lightning_megatrain.memory.store import Store
from lightning_megatrain.update.adam import accumulate_, sum_of_squares
from lightning_megatrain.update.threads import ThreadPlan
from lightning_megatrain.update.worker import Worker

SLABS = 3
"""Host slabs: one being filled, one being read by the update, one between."""

SUMS_WIDE = hasattr(Tensor, "grad_dtype")
"""Whether this torch takes gradients of another dtype than the parameter's, as fp32 sums for bf16 weights are."""

Use = Callable[[Tensor, list[bool]], None]
"""What is done with a group's flat gradients once they are complete, and which parameters have one."""


class Landing(Protocol):
    """A copy to the host under way."""

    @property
    def done(self) -> Any:
        """Has ``wait()``, which blocks the host until the copy is complete."""


class HostGradients:
    """Takes gradients group by group and adds them to those that are there.

    ``p.grad`` is the truth about which gradients exist. Before a backward it is read and taken off (:meth:`begin`);
    what arrives is added on the worker thread, in the order and rounding of plain accumulation; :meth:`settle` puts
    it back as views of the gradient arena. Gradients that are used as they land pass through a slab instead.

    Args:
        store: the adopted store.
        worker: does the host's share of the work.
        pin: register gradient memory with CUDA.
        threads: threads that add.
        sum_dtype: dtype in which gradients of several batches are summed; None for that of the wire.
    """

    def __init__(
        self,
        store: Store,
        worker: Worker,
        *,
        pin: bool,
        threads: ThreadPlan | None = None,
        sum_dtype: torch.dtype | None = None,
    ) -> None:
        self._groups = store.groups
        self._worker = worker
        self._pin = pin
        self._threads = threads
        self._dtype = store.format.wire_dtype
        unit_numel = max((g.layout.trainable_numel for g in self._groups if not g.resident), default=0)
        self._sum_dtype = sum_dtype or self._dtype
        self._converts = self._sum_dtype != self._dtype  # then nothing is pushed straight into the arena
        self.arena = GradientArena(self._groups, self._sum_dtype, pin=pin and not self._converts)
        self._apart = GradientArena(self._groups, self._dtype, pin=pin)
        self._slabs = SlabRing(SLABS, unit_numel, self._dtype, pin=pin)
        self._wide_slabs: SlabRing | None = None
        self._slab: tuple[Tensor, SlabRing] | None = None  # for the next landing, and where it is given back
        # Which parameters had a gradient when this backward began, and which got one since.
        self._before: list[list[bool]] = [[False] * g.layout.trainable_count for g in self._groups]
        self._now: list[list[bool]] = [[False] * g.layout.trainable_count for g in self._groups]
        self._open: set[int] = set()  # groups with gradients in this backward and more to come
        self._norms: dict[int, Tensor] = {}  # of groups whose gradients all came in one push

    @property
    def nbytes(self) -> int:
        """Persistent host bytes; slabs not counted."""
        return self.arena.nbytes + self._apart.nbytes

    @property
    def slab_nbytes(self) -> int:
        """Host bytes of the slabs."""
        return self._slabs.nbytes + (self._wide_slabs.nbytes if self._wide_slabs else 0)

    def allocate(self) -> None:
        """Touch the arena of every group now, instead of in the first step."""
        total = sum(group.layout.trainable_numel for group in self._groups) * self._sum_dtype.itemsize
        with working("Memory for gradients", total) as advance:
            for group in self._groups:
                advance(self.arena.flat(group.index).nbytes)

    def begin(self, *, keep: bool) -> None:
        """A backward is about to run: take ``p.grad`` off every parameter; ``keep`` what it held, to be added to."""
        self._open.clear()
        for group in self._groups:
            before, now = self._before[group.index], self._now[group.index]
            for index, parameter in enumerate(group.parameters[: group.layout.trainable_count]):
                now[index] = False
                before[index] = parameter.grad is not None and keep
                if before[index]:
                    self.keep(group, index, parameter)
                parameter.grad = None
                if not before[index] and self.arena.holds(group.index):
                    self.arena.leave(group.index, index)
                if self._converts:
                    parameter.grad_dtype = parameter.dtype  # autograd must make gradients of the wire's dtype
            if not any(before):
                self._norms.pop(group.index, None)

    def keep(self, group: Group, index: int, parameter: Parameter) -> None:
        """Bring a gradient that somebody put into ``p.grad`` into the arena."""
        assert parameter.grad is not None
        view = self.arena.views(group.index)[index]
        if parameter.grad is not view:
            view.copy_(parameter.grad)
            self._norms.pop(group.index, None)

    def _sums_apart(self, group: int, last: bool) -> bool:
        """Whether gradients of several uses in this backward are summed before they join those of earlier ones.

        That is autograd's own order, so accumulation keeps plain training's bits.
        """
        return any(self._before[group]) and (not last or group in self._open)

    def destination(self, group: int, last: bool, *, used_at_once: bool) -> Tensor:
        """Flat host memory, ``[trainable_numel]``, for the next gradients of ``group``; waits for a free slab.

        Args:
            group: index of the group.
            last: no more gradients of this group follow in this backward.
            used_at_once: the gradients are used when they land and need no place of their own.
        """
        apart, first = self._sums_apart(group, last), not any(self._now[group])
        joins = not first or (any(self._before[group]) and not apart) or (self._converts and not apart)
        if joins or (used_at_once and last and not self._groups[group].resident):
            ring = self._ring(group)
            slab = self._take_slab(group, ring)
            self._slab = slab, ring
            return slab[: self._groups[group].layout.trainable_numel]
        return (self._apart if apart else self.arena).flat(group)

    def _ring(self, group: int) -> SlabRing:
        if not self._groups[group].resident:
            return self._slabs
        if self._wide_slabs is None:
            widest = max(g.layout.trainable_numel for g in self._groups if g.resident)
            self._wide_slabs = SlabRing(1, widest, self._dtype, pin=self._pin)
        return self._wide_slabs

    def _take_slab(self, group: int, ring: SlabRing) -> Tensor:
        if (slab := ring.take(timeout=0)) is not None:
            return slab
        with self._worker.span("wait", f"slab {self._groups[group].name}"):
            while (slab := ring.take(timeout=1.0)) is None:
                self._worker.require()  # a dead worker gives no slab back
        return slab

    def landed(
        self,
        group: int,
        copies: Sequence[Landing],
        present: Sequence[bool],
        last: bool,
        norm: Tensor | None = None,
        use: Use | None = None,
    ) -> None:
        """Copies into the last :meth:`destination` are under way.

        Args:
            group: index of the group.
            copies: the copies; kept until they are done. Empty when no parameter had a gradient.
            present: per trainable parameter, whether it got one.
            last: no more gradients of this group follow in this backward.
            norm: Euclidean norm of what was pushed, a scalar on the device.
            use: called on the worker with the group's complete gradients.
        """
        if copies:
            alone = not any(self._before[group]) and not any(self._now[group])
            self._norms.pop(group, None)
            if alone and norm is not None:
                self._norms[group] = norm
        if copies or last:
            self._worker.submit(group, self._landing(group, copies, list(present), last, use))
        self._now[group] = [a or b for a, b in zip(self._now[group], present, strict=True)]
        (self._open.discard if last else self._open.add)(group)

    def _landing(
        self, group: int, copies: Sequence[Landing], present: list[bool], last: bool, use: Use | None
    ) -> Callable[[], None]:
        """What the worker does with gradients that arrive, from what is known now."""
        (slab, ring), self._slab = self._slab or (None, self._slabs), None
        before, now = list(self._before[group]), list(self._now[group])
        together = [a or b for a, b in zip(now, present, strict=True)]
        apart = self._sums_apart(group, last)
        layout = self._groups[group].layout

        def task() -> None:
            for copy in copies:
                copy.done.wait()
            gradients = None if slab is None else slab[: layout.trainable_numel]
            held = now if apart or not any(before) else before
            if gradients is not None and (any(held) or (self._converts and not apart)):
                self._add(group, (self._apart if apart else self.arena).flat(group), gradients, held, present)
                gradients = None
            if apart and last:
                self._add(group, self.arena.flat(group), self._apart.flat(group), before, together)
            if use is not None:
                use(self.arena.flat(group) if gradients is None else gradients, together)
            if slab is not None:
                ring.give(slab)

        return task

    def _add(self, group: int, target: Tensor, source: Tensor, held: list[bool], present: list[bool]) -> None:
        """``target += source`` where a parameter has both; its first gradient replaces what lies there."""
        with self._worker.span("update", f"sum {self._groups[group].name}"):
            self._add_parts(group, target, source, held, present)

    def _add_parts(self, group: int, target: Tensor, source: Tensor, held: list[bool], present: list[bool]) -> None:
        if all(held) and all(present):
            accumulate_(target, source, threads=self._threads)
            return
        for index, (old, new) in enumerate(zip(held, present, strict=True)):
            span = self._groups[group].layout.span(index)
            if old and new:
                accumulate_(target[span], source[span], threads=self._threads)
            elif new:
                target[span].copy_(source[span])

    def unfinished(self) -> list[int]:
        """Groups that were told to expect more gradients than came."""
        return sorted(self._open)

    def missing(self, group: int) -> list[bool]:
        """``present`` for a landing that brings nothing."""
        return [False] * len(self._now[group])

    def settle(self) -> None:
        """A backward has run and the worker is idle: put gradients into ``p.grad``."""
        for group, index, parameter in self.trainable():
            if parameter.grad is not None:
                self._add_stray(group, index, parameter)
            if self._before[group.index][index] or self._now[group.index][index]:
                if self._converts:
                    parameter.grad_dtype = self._sum_dtype
                parameter.grad = self.arena.views(group.index)[index]

    def _add_stray(self, group: Group, index: int, parameter: Parameter) -> None:
        """Add a gradient that autograd left on a unit's parameter, which was used outside its unit."""
        assert parameter.grad is not None
        view = self.arena.views(group.index)[index]
        if self._before[group.index][index] or self._now[group.index][index]:
            view.add_(parameter.grad.to(view.device))
        else:
            view.copy_(parameter.grad)
        self._now[group.index][index] = True
        self._norms.pop(group.index, None)

    def norms(self, parameters: Collection[Parameter], *, untouched: bool) -> dict[str, float]:
        """Euclidean norm of ``p.grad`` by group, in the order of the groups; groups without gradients are left out.

        Args:
            parameters: those that count.
            untouched: nobody has had a chance to change ``p.grad`` since it settled, so the norms that were taken on
                the device before the push are true, and the host need not read the gradients.
        """
        result: dict[str, float | Tensor] = {}
        for group in self._groups:
            trainable = group.parameters[: group.layout.trainable_count]
            counted = [p for p in trainable if p.grad is not None and p in parameters]
            everything = len(counted) == sum(p.grad is not None for p in trainable)
            if counted and untouched and everything and group.index in self._norms:
                result[group.name] = self._norms[group.index]
            elif counted:
                squares = (
                    sum_of_squares(p.grad.reshape(-1), threads=self._threads) for p in counted if p.grad is not None
                )
                result[group.name] = math.sqrt(sum(squares))
        on_device = [v for v in result.values() if isinstance(v, Tensor)]
        fetched = iter(torch.stack(on_device).tolist() if on_device else [])  # the one wait for the device
        return {name: next(fetched) if isinstance(value, Tensor) else value for name, value in result.items()}

    def trainable(self) -> Iterator[tuple[Group, int, Parameter]]:
        """Every trainable parameter with its group and place."""
        for group in self._groups:
            for index, parameter in enumerate(group.parameters[: group.layout.trainable_count]):
                yield group, index, parameter

    def reset(self) -> None:
        """After an error elsewhere: forget the backward under way."""
        self._open.clear()
        if self._slab is not None:
            slab, ring = self._slab
            ring.give(slab)
            self._slab = None

    def close(self) -> None:
        """Give the memory back; ``p.grad`` is None afterwards."""
        for _, _, parameter in self.trainable():
            parameter.grad = None
            if self._converts:
                parameter.grad_dtype = torch.float32  # what it will be outside fit
        self.give_back()

    def give_back(self) -> None:
        """Give the memory back, except what ``p.grad`` shows."""
        for memory in (self._slabs, self._wide_slabs, self.arena, self._apart):
            if memory is not None:
                memory.close()
