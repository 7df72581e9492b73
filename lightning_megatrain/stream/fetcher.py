"""Weights of units in device slots: fetched ahead, bound while they are used, and released."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from lightning_megatrain.memory.slots import Slot, SlotRing
from lightning_megatrain.memory.store import Store
from lightning_megatrain.stream.sink import GradientSink
from lightning_megatrain.stream.streams import Streams
from lightning_megatrain.stream.unit import Unit


class Fetcher:
    """Brings units' weights into a ring of slots.

    Args:
        units: the units, in the order of their groups.
        store: the adopted store.
        streams: the lanes of the device.
        sink: knows which groups are being updated; None for a run without training.
        prefetch: units fetched ahead of the one being used; the ring has one slot more.
        held: slots of groups that are on the device to stay.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        store: Store,
        streams: Streams,
        sink: GradientSink | None,
        *,
        prefetch: int,
        held: Mapping[int, Slot],
    ) -> None:
        self.prefetch = prefetch
        self.bound_count = 0
        self.in_step = False
        """Outside a step nobody says when the host's weights change, so a slot's bytes are used once, and at once."""
        self._units = units
        self._store = store
        self._streams = streams
        self._sink = sink
        self._held = held
        self._used: set[int] = set()  # groups, without gradients
        largest = max(u.group.layout.numel for u in units)
        self.ring = SlotRing(min(prefetch + 1, len(units)), largest, store.format.wire_dtype, streams.device)
        for slot in self.ring.slots:
            slot.released = streams.record()  # what had this memory before is done with it

    def used(self, group: int, borrow: Callable[[int], bool]) -> None:
        """A group was used without gradients, in a step. The second time, its weights stay on the device.

        So the steps of an evaluation, and each token of a text that is generated in one, find them there. What stays
        does not change: of units that are used in turn, the least recently used is the next one.

        Args:
            group: the group.
            borrow: asked whether so many bytes may be taken until :meth:`let_go`.
        """
        if group in self._held:
            return
        if group not in self._used:
            self._used.add(group)
            return
        slot = self._find(group)
        if slot is not None and not slot.kept and borrow(slot.buffer.nbytes):
            other = self.ring.keep(slot)
            # Only now: the device may still work on what had this memory, and fills new memory in deterministic mode.
            other.released = self._streams.record()

    def let_go(self) -> int:
        """Weights that :meth:`used` let stay need not any longer; bytes that are free then.

        They were waited for before they were used, so the device is done with them before what takes their memory.
        """
        self._used.clear()
        return self.ring.let_go()

    @contextlib.contextmanager
    def bound(self, unit: Unit, expected: Sequence[int]) -> Iterator[Slot]:
        """The unit's parameters are views of a slot inside this context; the units expected next are being fetched.

        Args:
            unit: the unit.
            expected: groups of the units that are likely to follow, next first.
        """
        group = unit.group.index
        slot = self._find(group) or self._fetch(group)
        assert slot is not None, "every slot is bound: a unit was used inside another"
        self.ring.touch(slot)
        slot.users += 1
        for following in expected[: self.prefetch]:
            held = self._find(following)
            if held is not None:
                self.ring.touch(held)
            elif self._may_fetch_ahead(following):
                self._fetch(following)
        self._streams.compute_after(slot.filled.done)
        unit.bind(slot.views_of(unit.group))
        self.bound_count += 1
        try:
            yield slot
        finally:
            self.bound_count -= 1
            unit.unbind()
            slot.released = self._streams.record()
            slot.users -= 1
            if not self.in_step and group not in self._held:
                slot.group = None

    def _find(self, group: int) -> Slot | None:
        found = self.ring.find(group, self._store.versions[group]) if self.in_step else None
        return self._held.get(group, found)

    def _may_fetch_ahead(self, group: int) -> bool:
        # Outside a step it may be written to before it is used. The launch thread waits for updates that are needed
        # now, and for no others.
        return self.in_step and (self._sink is None or self._sink.updated(group))

    def _fetch(self, group: int) -> Slot | None:
        if self._sink is not None:
            self._sink.wait_updated(group)
        slot = self.ring.take(group, self._store.versions[group])
        if slot is None:
            return None
        wire = self._store.wire(group)
        with self._streams.span("fetch", f"fetch {self._units[group].name}", wire.nbytes):
            slot.filled = self._streams.copy("fetch", slot.buffer[: wire.numel()], wire, after=[slot.released])
        return slot
