"""Groups that live on the device for a while, weights, moments and all, and are updated there."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_megatrain.memory.layout import Group
from lightning_megatrain.memory.slots import Slot
from lightning_megatrain.memory.store import GroupMemory, Store
from lightning_megatrain.stream.gradients import fill
from lightning_megatrain.stream.residents import Residents
from lightning_megatrain.stream.sink import DeviceUpdates
from lightning_megatrain.stream.spans import Span
from lightning_megatrain.stream.staging import Staging
from lightning_megatrain.stream.streams import Copy, Event, Streams

RESERVE = 1.15
"""Groups are taken for so many times the update that was waited for: what is left must end in time, too."""

_FIRST, _EVERY, _LAST = 3, 3, 18
"""At the beginning of the first of these, every so many steps, and no more from the last on, the steps before are
judged; later, where something else was done in between."""

_SLOWER = 1.01
"""Steps that take so many times as long as before are slower."""

WORTH = 0.02
"""Part of a step that must have been waited for an update to do anything about it."""

_CAUSES = ("update", "worker", "slab")
"""What the device waits for when the host's updates are late: one of them, all of them, memory that they still read."""

_HELPED = 0.8
"""Taking more has helped if no more than this part of the waiting is left."""


@dataclass(frozen=True)
class _Taking:
    """What it was like before more groups were taken.

    Attributes:
        step: seconds of the fastest of the last steps: whatever else the host does makes some of them longer.
        waited: seconds of the last one that the device waited.
        groups: how many were taken already.
    """

    step: float
    waited: float
    groups: int


@dataclass(eq=False)
class Held:
    """One group on the device.

    Attributes:
        group: the group.
        memory: its weights and moments, flat.
        gradient: flat ``[trainable_numel]``, where gradients wait for more of them or for the step.
        filled: ``gradient`` holds gradients of this backward.
    """

    group: Group
    memory: GroupMemory
    gradient: Tensor
    filled: bool = False


class DeviceShare:
    """Spends device memory on the update: groups that are held are neither fetched, pushed, nor updated by the host.

    The host stays their home. They are taken when a step begins, and brought home when somebody needs the host's bytes
    (:meth:`recall`): a checkpoint, the end of the run. Meanwhile the host's are stale, and at rest the parameters' data
    are the device's.

    Args:
        store: the adopted store, in split format.
        streams: the lanes of the device.
        residents: the resident groups, whose weights are on the device in any case.
        updates: updates held groups.
        at_once: gradients are used as soon as they are complete, and not when the step ends.
    """

    def __init__(
        self, store: Store, streams: Streams, residents: Residents, updates: DeviceUpdates, *, at_once: bool
    ) -> None:
        self.held: dict[int, Held] = {}
        self.slots: dict[int, Slot] = {}
        self._wanted: list[int] = []
        self._store = store
        self._streams = streams
        self._residents = residents
        self._updates = updates
        self._at_once = at_once
        self._steps = 0
        self._due = _FIRST
        self._fastest = float("inf")  # seconds of a step, since groups were taken or batches were of another size
        self._size = 0
        self._interrupted = False  # something else was done since the last step began than that step
        self._taking: _Taking | None = None  # the last time that more were taken, until it is seen whether that helped
        self._began = time.perf_counter()
        self._waited = self._busy = 0.0  # seconds since then that the device waited for updates, and that those took
        streams.attach(self._note, ("update", "wait"))

    def begin(self, spare: int, size: int) -> int:
        """A training step begins: take what is wanted, which is more if the step before waited for updates.

        Args:
            spare: device bytes that may be taken.
            size: of the last batch, in any unit.

        Returns:
            Bytes that are taken beyond those of the step before; less than 0 if groups went home.
        """
        self.begin_backward()  # gradients of the last step are used
        step, waited, busy = self._last_step()
        if size != self._size:  # seconds are compared with those of equal batches
            self._size, self._fastest = size, float("inf")
            if self._taking is not None:
                self._taking = replace(self._taking, step=float("inf"))
        if not self._interrupted and self._steps > 1:  # the first step had no update before it to wait for
            self._fastest = min(self._fastest, step)
        grown = 0
        if self._due <= self._steps < _LAST and not self._interrupted:
            self._due = self._steps + _EVERY
            grown = self._judge(_Taking(self._fastest, waited, len(self._wanted)), busy, spare)
        self._steps += 1
        self._interrupted = self._take_wanted()
        return grown

    def interrupt(self) -> None:
        """Until the next training step begins, something else is done: the seconds of this one will say nothing."""
        self._interrupted = True

    def _judge(self, now: _Taking, busy: float, spare: int) -> int:
        before, self._taking = self._taking, None
        if before is not None and now.step > _SLOWER * before.step:
            # What waits no more makes up for less than the kept graphs that had to go.
            return -self.give_up(before.groups)
        if before is not None and now.waited > _HELPED * before.waited:
            self._steps = _LAST  # what is waited for is something else
            return 0
        if now.waited <= WORTH * now.step or busy <= 0:
            return 0
        grown = self._grow(min(1.0, now.waited / busy), spare)
        if grown:
            self._taking, self._fastest = now, float("inf")
        return grown

    def give_up(self, groups: int) -> int:
        """Between steps: bring all but the first ``groups`` home, for good; device bytes that are free then."""
        self._steps = _LAST
        last, self._wanted = self._wanted[groups:], self._wanted[:groups]
        self._bring_home([self.held[index] for index in last if index in self.held])
        return sum(self.cost(self._store.groups[index]) for index in last)

    def _last_step(self) -> tuple[float, float, float]:
        """Seconds of the last step, of the device's waiting for the host's updates in it, and of those updates."""
        self._streams.collect()
        self._streams.set_clock()
        now = time.perf_counter()
        found = now - self._began, self._waited, self._busy
        self._began, self._waited, self._busy = now, 0.0, 0.0
        if self._steps >= _LAST:
            self._streams.detach(self._note)
        return found

    def _note(self, span: Span) -> None:
        if span.lane == "update":
            self._busy += span.seconds
        elif span.lane == "wait" and span.verb in _CAUSES:
            self._waited += span.seconds

    def cost(self, group: Group) -> int:
        """Device bytes that holding a group takes."""
        layout = group.layout
        wire = 0 if group.resident else layout.numel * 2
        moments = layout.trainable_numel * sum(flat.itemsize for flat in self._updates.moments.flat(group.index))
        return wire + layout.numel * 2 + moments + layout.trainable_numel * 2

    def _grow(self, excess: float, spare: int) -> int:
        # Residents first, for their weights are there already and, where updates run in the backward, theirs is the
        # last to begin; then units in forward order, whose new weights are needed first.
        order = sorted(self._store.groups, key=lambda g: not g.resident)
        free = [g for g in order if g.index not in self._wanted and self._updates.may_hold(g)]
        left = excess * RESERVE * sum(g.layout.trainable_numel for g in free)
        taken = 0
        for group in free:
            if left <= 0:
                break
            if taken + self.cost(group) > spare:
                continue
            self._wanted.append(group.index)
            taken += self.cost(group)
            left -= group.layout.trainable_numel
        return taken

    def _take_wanted(self) -> bool:
        """Bring what is to be held and is not, and say if there was anything. What finds no room the host keeps."""
        groups = [self._store.groups[index] for index in self._wanted if index not in self.held]
        missing = [group for group in groups if self._updates.may_hold(group)]  # or its state was cleared
        if not missing:
            return False
        staging = Staging(self._streams)
        try:
            for group in missing:
                self._take(group, staging)
        except torch.OutOfMemoryError:
            self._wanted = list(self.held)
            self._steps = _LAST
        finally:
            staging.close()
        return True

    def _take(self, group: Group, staging: Staging) -> None:
        self._updates.wait_updated(group.index)
        self._updates.gather_moments(group)
        home = self._host(group)
        flat = self._residents.flat(group) if group.resident else self._empty(home.wire)
        # In the backward there would be no way out if it did not fit. Zeros, for the padding between parameters.
        gradient = self._empty(flat[: group.layout.trainable_numel]).zero_()
        held = Held(group, GroupMemory(flat, *(self._empty(tensor) for tensor in home[1:])), gradient)
        with self._streams.span("fetch", f"take {group.name}", sum(t.nbytes for t in home)):
            staging.to_device(held.memory, home)
        if group.resident:
            views = self._residents.views(group)
        else:
            slot = self.slots[group.index] = Slot(flat, group.index, filled=Copy(flat, home.wire, Event()))
            views = slot.views_of(group)
        self.held[group.index] = held
        self._store.lent[group.index] = views
        self._store.show(group)

    def pack(self, group: Group, gradients: Sequence[Tensor | None]) -> Tensor:
        """Gradients of all parameters of a held group, zeros for None, as one flat tensor: ``[trainable_numel]``."""
        flat = self.held[group.index].gradient
        fill(group.layout.views(flat), gradients)
        return flat

    def collect(self, group: Group, packed: Tensor, last: bool) -> Tensor:
        """Gradients of all uses of a held group so far.

        Args:
            group: the group.
            packed: of this use, ``[trainable_numel]``, in memory that another group's will take next.
            last: no more follow in this backward.
        """
        held = self.held[group.index]
        if last and not held.filled and self._at_once:
            return packed  # used at once
        flat = held.gradient
        if held.filled:
            flat.add_(packed)  # in fp32, rounded once, as the host adds
        else:
            flat.copy_(packed)
        held.filled = True
        return flat

    def begin_backward(self) -> None:
        """Gradients of an earlier backward count no more."""
        for held in self.held.values():
            held.filled = False

    def close(self) -> None:
        """Bring everything home, and look at steps no more."""
        self.recall()
        self._streams.detach(self._note)

    def recall(self, groups: Collection[int] | None = None) -> None:
        """Bring groups home, or everything: the host's bytes are the true ones, until the next :meth:`begin`."""
        self.interrupt()
        self._bring_home([held for index, held in self.held.items() if groups is None or index in groups])

    def give_back(self) -> int:
        """In a step whose memory ran out: bring home units that are neither bound nor have gradients, for good.

        Returns:
            Device bytes that are free again.
        """
        idle = [self.held[i] for i, slot in self.slots.items() if not self.held[i].filled and not slot.users]
        if idle:
            self._steps = _LAST
            self._bring_home(idle)
            self._wanted = list(self.held)
        return sum(self.cost(held.group) for held in idle)

    def _bring_home(self, groups: Sequence[Held]) -> None:
        if not groups:
            return
        staging = Staging(self._streams)
        try:
            for held in groups:
                group = held.group
                self._updates.before_update(group.index)
                with self._streams.span("push", f"recall {group.name}", sum(t.nbytes for t in held.memory)):
                    staging.to_host(self._host(group), held.memory)
                del self.held[group.index], self._store.lent[group.index]
                self.slots.pop(group.index, None)
                self._store.show(group)
        finally:
            staging.close()

    def _host(self, group: Group) -> GroupMemory:
        return GroupMemory(
            self._store.wire(group.index), self._store.low(group.index), *self._updates.moments.flat(group.index)
        )

    def _empty(self, like: Tensor) -> Tensor:
        with torch.inference_mode(False):
            return torch.empty(like.shape, dtype=like.dtype, device=self._streams.device)
