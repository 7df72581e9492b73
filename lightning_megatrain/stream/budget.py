"""What the device's spare memory is spent on: how many graphs are kept from forward to backward."""

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from lightning_megatrain.memory.device import SPENDABLE, DeviceMemory
from lightning_megatrain.stream.kept import KeptGraph

Recompute = Literal["auto", "always", "never"]

_MEASURED = 5
"""Batches whose memory is looked at, and after them every one that is larger than all before."""


@dataclass(frozen=True)
class _Measured:
    """What batches of the largest size so far take.

    Attributes:
        elements: of such a batch: of the first use's first floating-point tensor.
        base: bytes it would take with no graph kept, by a batch in which ``kept`` were.
        graph: bytes of a graph.
        kept: graphs that were kept in that batch.
        none: bytes when none was.
    """

    elements: int
    base: float
    graph: float
    kept: int
    none: float

    def beside(self, nbytes: int) -> "_Measured":
        """The same, with so many bytes taken in addition all the time."""
        return replace(self, base=self.base + nbytes, none=self.none + nbytes)


class Budget:
    """Decides of which uses of units the graph is kept, from what the batches before took.

    The graphs of the last uses are kept: they live shortest, so the same bytes serve them best. The first batch keeps
    none and is measured; from then on as many are kept as fit beside its peak. A batch of another size is expected to
    take memory in proportion, beyond what the engine holds all the time. Nothing here waits for the device.

    When memory runs out all the same, :meth:`relieve` lets every kept graph go: their uses are recomputed, and
    fewer are kept from then on. If there is none, what was borrowed is returned, and if there is nothing of that or a
    batch is larger than all before and will not fit even without, what others took is taken back.

    Args:
        recompute: ``"always"`` keeps none, ``"never"`` all as long as they fit, ``"auto"`` as many as fit.
        memory: the device's; None where it is not known, then ``"auto"`` keeps none.
    """

    def __init__(self, recompute: Recompute = "always", memory: DeviceMemory | None = None) -> None:
        self._recompute = recompute
        self._memory = memory
        self.give_back: Callable[[], int] = lambda: 0
        """Frees what was taken with :meth:`reserve`; returns how many bytes."""
        self.let_go: Callable[[], int] = lambda: 0
        """Frees what was taken with :meth:`borrow`; returns how many bytes."""
        self._borrowed = 0
        self._lends = True
        self._evaluates = False  # since the last batch
        self._live: weakref.WeakSet[KeptGraph] = weakref.WeakSet()
        self._target = 0
        self._most: int | None = None  # after memory ran out
        self._uses = self._uses_before = 0
        self._kept = 0  # in this batch
        self._elements = 0  # of this batch: of the first use's first floating-point tensor
        self._graph = self._graph_of_use = 0  # bytes of this batch's largest graph, and of the one being made
        self._batches = 0
        self._open = False  # a batch has begun whose memory was not looked at
        self._ran_out = False  # in the last batch
        self._largest: _Measured | None = None
        self._static = 0
        self._peak = 0  # when the last batch ended
        self._bare = 0  # the most that was taken with no graph kept, or could have been

    @property
    def kept(self) -> int:
        """Graphs that were kept in the last batch or, while one runs, so far in it."""
        return self._kept

    def begin(self) -> None:
        """A batch starts."""
        self.end()
        if self._ran_out:
            self._ran_out = False
            self._forget_peak()
            self._uses = max(self._uses, self._uses_before)  # it may have been given up half-way
        self._open = True
        self._uses_before, self._uses, self._kept, self._graph = self._uses or self._uses_before, 0, 0, 0
        if self._memory is not None and (self._largest is None or self._evaluates):
            self._see_bare()
            self._evaluates = False
            self._memory.reset_peak()
            if self._largest is None:
                self._static = self._memory.allocated()

    @property
    def spare(self) -> int:
        """Bytes that a step leaves, those of graphs that are kept because there is room included; 0 if not known."""
        if self._memory is None or self._largest is None:
            return 0
        return max(0, int(self._memory.limit * SPENDABLE - self._bare))

    @property
    def size(self) -> int:
        """Of the last batch: elements of the first floating-point tensor that its first use was given."""
        return self._elements

    def reserve(self, nbytes: int) -> None:
        """From now on ``nbytes`` more (or less, if negative) are taken all the time, by somebody else."""
        self._static += nbytes
        if self._largest is not None:
            self._largest = self._largest.beside(nbytes)
            self._bare += nbytes

    def borrow(self, nbytes: int) -> bool:
        """Whether ``nbytes`` may be taken until :meth:`returned`, beside all that was taken so far; then they are.

        No more than half of what is left is lent: what follows, such as the cache of a text that grows, was not seen.
        Nothing is while a batch's graphs are being made, which make better use of it.
        """
        if self._memory is None or not self._lends or (self._open and self._uses):
            return False
        self._see_bare()
        left = self._memory.limit * SPENDABLE - max(self._bare, self._memory.allocated() - self._borrowed)
        lent = self._borrowed + nbytes <= left / 2
        self._borrowed += nbytes if lent else 0
        return lent

    def evaluate(self) -> None:
        """What follows is no batch of the training, and may take more than one."""
        if self._memory is not None and not self._evaluates:
            self._see_bare()
            self._evaluates = True
            self._memory.reset_peak()

    def returned(self) -> None:
        """All that was borrowed is free again."""
        if self._memory is not None and self._borrowed:
            self._see_bare()
            if self._largest is None or self._evaluates:
                self._memory.reset_peak()
            self._peak = self._memory.peak()  # a rise that tells nothing of batches
            self._borrowed = 0

    def _see_bare(self) -> None:
        """What else took so far than batches: theirs is not the most that is taken if that took more."""
        if self._memory is not None and (self._largest is None or self._evaluates):
            self._bare = max(self._bare, self._memory.peak() - self._borrowed)

    def keeps(self, tensors: Sequence[Tensor]) -> bool:
        """Whether to keep the graph of the use that begins with these tensors."""
        index, self._uses = self._uses, self._uses + 1
        self._graph_of_use = 0
        if index == 0:
            self._elements = next((t.numel() for t in tensors if t.is_floating_point()), 0)
            self._target = self._affordable()
        if self._recompute == "never":
            keeps = self._most is None or index >= self._uses_before - self._most
        else:
            last = self._target > self._kept and index >= self._uses_before - self._target
            keeps = self._recompute == "auto" and last
        self._kept += keeps
        return keeps

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """Around the forward of one slice of the use that :meth:`keeps` was asked for, which makes its graph."""
        before = self._memory.allocated() if self._memory is not None and self._looks else None
        yield
        if self._memory is not None and before is not None:
            self._graph_of_use += self._memory.allocated() - before
            self._graph = max(self._graph, self._graph_of_use)

    def hold(self, kept: KeptGraph) -> None:
        """A graph is kept that :meth:`relieve` may drop."""
        self._live.add(kept)

    def relieve(self) -> bool:
        """Memory ran out: free what it was spent on, kept graphs first. Whether there was anything."""
        self._graph_of_use = 0  # it will be made again
        self._open, self._ran_out = False, True  # what this batch takes tells nothing of others
        live = [kept for kept in self._live if kept.left]
        for kept in live:
            kept.drop()
        if live:
            self._kept = max(0, self._kept - len(live))
            self._most = len(live) * 3 // 4
            warnings.warn(
                f"Device memory ran out with the graphs of {len(live)} units kept; they are computed again in this "
                f"step, and at most {self._most} are kept from now on; set a smaller device_memory to "
                "keep fewer at once.",
                RuntimeWarning,
                stacklevel=2,
            )
        return bool(live) or self.lend_no_more() or self._take_back()

    def lend_no_more(self) -> bool:
        """There was no room for what was borrowed: from now on nothing is. Whether anything was."""
        self._lends = False
        freed = self.let_go()
        self.returned()
        return freed > 0

    def _take_back(self) -> bool:
        freed = self.give_back()
        self.reserve(-freed)
        return freed > 0

    def _forget_peak(self) -> None:
        if self._memory is not None:
            self._memory.reset_peak()
            self._peak = 0

    @property
    def _looks(self) -> bool:
        return self._batches < _MEASURED or self._largest is None or self._elements > self._largest.elements

    def _affordable(self) -> int:
        if self._memory is None or self._largest is None or not self._elements:
            return 0
        ratio = self._elements / self._largest.elements
        if self._room(ratio, self._largest.base) < 0 and ratio > 1 and self._take_back():
            self._forget_peak()
        most = self._largest
        count = self._room(ratio, most.base) / max(1.0, most.graph * ratio)
        if 0 < count < most.kept:
            # Fewer than were measured: what they take off the peak may be less than a graph each, but no less than by a
            # straight line to where none was kept, for a peak is the largest of sums that grow with their number.
            slope = max(1.0, (most.base + most.kept * most.graph - most.none) / most.kept * ratio)
            count = min(count, self._room(ratio, most.none) / slope)
        count = max(0, int(count))
        return count if self._most is None else min(count, self._most)

    def _room(self, ratio: float, taken: float) -> float:
        """Bytes beside a batch that is so many times as large as one that took ``taken``."""
        assert self._memory is not None
        return self._memory.limit * SPENDABLE - self._static - (taken - self._static) * ratio

    def end(self) -> None:
        """The batch's backward is over, and what it took is known; does nothing the second time.

        At once, for whoever makes peaks count anew between two batches must not hide this one's.
        """
        if not self._open or self._memory is None or not self._uses:
            return
        self._open = False
        peak, before = self._memory.peak(), self._peak
        self._peak = peak
        if not self._looks:
            self._notice(peak, before)
            return
        self._batches += 1
        base = peak - self._kept * self._graph
        if self._largest is None or self._elements > self._largest.elements:
            none = float(peak)
            if self._largest is not None and self._largest.elements and self._kept:
                ratio = self._elements / self._largest.elements
                none = min(none, self._static + (self._largest.none - self._static) * ratio)
            self._largest = _Measured(self._elements, base, self._graph, self._kept, none)
            # With graphs kept that is too much, but `base` would be too little: where the peak was a block's own, or
            # the graphs are of different sizes, dropping them frees less.
            self._bare = max(self._bare, peak)
        elif self._elements == self._largest.elements:
            # A peak of this batch's own is what so many graphs take: a higher one, or a lower one because somebody made
            # it count anew. An earlier one's is a bound.
            self._largest = replace(self._largest, graph=self._graph)
            if peak != before or base < self._largest.base:
                none = self._largest.none if self._kept else float(peak)
                self._largest = replace(self._largest, base=base, kept=self._kept, none=none)

    def _notice(self, peak: int, before: int) -> None:
        """A peak that rose although the batch was no larger: what is outside the units took more than it did."""
        assert self._largest is not None
        most = self._largest
        excess = int(peak - self._kept * most.graph * self._elements / most.elements - most.base)
        if peak > before and excess > 0:
            self._largest = most.beside(excess)
            self._bare += excess
