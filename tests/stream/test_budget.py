"""Spare device memory is spent on kept graphs, never beyond its limit, and given back when it runs out."""

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
import zoo
from fitting import MegaTrainStrategy, assert_same_bits, fit
from torch import Tensor, nn

import lightning_megatrain.session
from lightning_megatrain.memory.device import SPENDABLE, DeviceMemory
from lightning_megatrain.stream.budget import Budget
from lightning_megatrain.stream.kept import KeptGraph

UNITS = 6


class Simulated(DeviceMemory):
    """An allocator that is told what is taken."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.now = self.most = 0

    def take(self, count: int) -> None:
        self.now += count
        self.most = max(self.most, self.now)

    def allocated(self) -> int:
        return self.now

    def peak(self) -> int:
        return self.most

    def reset_peak(self) -> None:
        self.most = self.now


def batch(budget: Budget, memory: Simulated, *, rows: int, graph: int, loss: int) -> int:
    """One batch: every unit makes a graph that is dropped or kept, then the loss takes its part. Graphs kept."""
    budget.begin()
    held = kept = 0
    for _ in range(UNITS):
        keeps = budget.keeps((torch.empty(rows, 4),))
        with budget.making():
            memory.take(graph * rows)
        if keeps:
            held, kept = held + graph * rows, kept + 1
        else:
            memory.take(-graph * rows)
    memory.take(loss * rows)
    memory.take(-loss * rows - held)
    return kept


@pytest.mark.parametrize(("spare", "expected"), [(0.5, 0), (1.5, 1), (4.2, 4), (5.9, 5), (60, UNITS)])
def test_as_many_graphs_as_fit(spare: float, expected: int) -> None:
    graph, loss, static, rows = 100, 250, 1000, 10
    memory = Simulated(int((static + loss * rows + spare * graph * rows) / SPENDABLE) + 1)
    memory.take(static)
    budget = Budget("auto", memory)
    kept = [batch(budget, memory, rows=rows, graph=graph, loss=loss) for _ in range(5)]
    assert kept == [0, *[expected] * 4]
    assert memory.most <= memory.limit * SPENDABLE


def test_a_peak_inside_a_block_is_seen_to_be_shared() -> None:
    """Where the first batch's peak was a block's own, keeping graphs takes less than was feared, which is noticed."""
    memory = Simulated(int(4000 / SPENDABLE) + 1)
    budget = Budget("auto", memory)
    kept = [batch(budget, memory, rows=1, graph=1000, loss=0) for _ in range(4)]
    assert kept == [0, 3, 4, 4]
    assert memory.most <= memory.limit * SPENDABLE


@pytest.mark.parametrize("spare", [60, 110, 175, 240, 290])
def test_fewer_graphs_than_were_seen_take_off_no_more_than_was_seen(spare: int) -> None:
    """Graphs of which half is gone when the peak comes: without some of them it is no full graphs' lower."""
    memory, reserved = Simulated(int(2000 / SPENDABLE) + 1), 2000 - 1000 - spare
    budget = Budget("auto", memory)
    for index in range(5):
        if index == 3:
            memory.take(reserved)
            budget.reserve(reserved)
        budget.begin()
        kept = 0
        for _ in range(UNITS):
            keeps = budget.keeps((torch.empty(1, 4),))
            with budget.making():
                memory.take(100)
            memory.take(-50 if keeps else -100)
            kept += keeps
        memory.take(1000)
        memory.take(-1000 - 50 * kept)
        budget.end()
        assert kept == (0 if index == 0 else UNITS if index < 3 else min(UNITS, spare // 50))
    assert memory.most <= memory.limit * SPENDABLE


def test_larger_batches_keep_fewer_and_smaller_ones_more() -> None:
    memory = Simulated(int(1000 * 10 / SPENDABLE) + 1)
    budget = Budget("auto", memory)
    sizes = [4, 4, 8, 8, 4, 2, 8]
    kept = [batch(budget, memory, rows=rows, graph=300, loss=500) for rows in sizes]
    assert kept == [0, 6, 2, 2, 6, 6, 2]
    assert memory.most <= memory.limit * SPENDABLE


def test_without_a_known_memory_nothing_is_kept() -> None:
    budget = Budget("auto", None)
    budget.begin()
    assert not budget.keeps((torch.empty(1),))


def test_relief_drops_graphs_and_lowers_the_number() -> None:
    memory = Simulated(10**9)
    budget = Budget("auto", memory)
    batch(budget, memory, rows=1, graph=10, loss=0)
    budget.begin()
    graphs = []
    for _ in range(4):
        assert budget.keeps((torch.empty(1, 4),)) == (len(graphs) < UNITS)
        graphs.append(KeptGraph("unit"))
        graphs[-1].add([], [], [])
        budget.hold(graphs[-1])
    with pytest.warns(RuntimeWarning, match="graphs of 4 units kept.* at most 3 are kept"):
        assert budget.relieve()
    assert not any(graph.left for graph in graphs)
    assert not budget.relieve()
    assert batch(budget, memory, rows=1, graph=10, loss=0) == 3


def unlike(budget: Budget, memory: Simulated, graphs: list[int], loss: int) -> int:
    """One batch of units of different sizes, recomputed where no graph is kept; the most that was taken."""
    budget.begin()
    held = []
    for unit, graph in enumerate(graphs):
        keeps = budget.keeps((torch.empty(1, 4),))
        with budget.making():
            memory.take(graph)
        if keeps:
            held.append(unit)
        else:
            memory.take(-graph)
    memory.take(loss)
    top = memory.now
    memory.take(-loss)
    for unit in reversed(range(len(graphs))):
        memory.take(0 if unit in held else graphs[unit])
        top = max(top, memory.now)
        memory.take(-graphs[unit])
    return top


@pytest.mark.parametrize(("graphs", "loss"), [([1000] * 6, 100), ([1500, *[300] * 5], 200), ([300] * 6, 900)])
def test_what_is_said_to_be_spare_may_be_taken(graphs: list[int], loss: int) -> None:
    memory = Simulated(6000)
    memory.take(1000)
    budget = Budget("auto", memory)
    tops, spare = [], 0
    for step in range(8):
        if step == 3:
            budget.begin()
            spare = budget.spare
            budget.reserve(spare)
            memory.take(spare)
        tops.append(unlike(budget, memory, graphs, loss))
    assert spare > 0
    assert max(tops) <= 6000 * SPENDABLE


@pytest.mark.parametrize(("rows", "expected"), [(15, 2), (20, 0), (24, 3), (30, 2)])
def test_what_others_took_goes_back_before_a_batch_that_would_not_fit(rows: int, expected: int) -> None:
    memory = Simulated(int(10_000 / SPENDABLE) + 1)
    memory.take(1000)
    budget = Budget("auto", memory)
    for _ in range(2):
        batch(budget, memory, rows=10, graph=50, loss=200)
    budget.end()
    taken, back = 4500, []
    budget.reserve(taken)
    memory.take(taken)
    assert batch(budget, memory, rows=10, graph=50, loss=200) >= 3

    def give_back() -> int:
        back.append(1)
        memory.take(-taken)
        return taken

    budget.give_back = give_back
    assert [batch(budget, memory, rows=rows, graph=50, loss=200) for _ in range(3)] == [expected] * 3
    assert len(back) == (rows > 22)
    assert memory.most <= memory.limit * SPENDABLE


@pytest.mark.parametrize("others", [0, 3000])
@pytest.mark.parametrize("rows", [10, 12])
def test_after_memory_ran_out_graphs_are_kept_again(rows: int, others: int) -> None:
    """The peak of a batch in which something was given back says nothing of those that follow."""
    memory = Simulated(10_000)
    memory.take(1000)
    budget = Budget("auto", memory)
    for _ in range(2):
        batch(budget, memory, rows=10, graph=50, loss=200)
    budget.end()
    budget.reserve(others)
    memory.take(others)
    budget.give_back = lambda: others
    graphs = []
    budget.begin()
    for _ in range(UNITS):
        if budget.keeps((torch.empty(rows, 4),)) and not others:
            graphs.append(KeptGraph("unit"))
            graphs[-1].add([], [], [])
            budget.hold(graphs[-1])
    memory.take(memory.limit - memory.now)  # whatever it was
    expected = pytest.warns(RuntimeWarning, match="at most 4 are kept") if graphs else contextlib.nullcontext()
    with expected:
        assert budget.relieve()
    memory.take(1000 - memory.now)
    budget.end()
    assert [batch(budget, memory, rows=rows, graph=50, loss=200) for _ in range(4)] == [4 if graphs else UNITS] * 4


def test_a_loss_that_grows_later_is_noticed() -> None:
    """As where its size is that of the answers, and not of the inputs."""
    memory = Simulated(int(10_000 / SPENDABLE) + 1)
    budget = Budget("auto", memory)
    kept = [batch(budget, memory, rows=1, graph=1000, loss=loss) for loss in (3000,) * 8 + (3600,) * 4]
    assert kept[7] == 6
    assert kept[-1] == 6  # 6 x 1000 + 3600
    kept = [batch(budget, memory, rows=1, graph=1000, loss=loss) for loss in (4500, 4500, 4500)]
    assert kept[-1] == 5


def test_peaks_of_the_past_do_not_count() -> None:
    memory = Simulated(int(5000 / SPENDABLE) + 1)
    memory.take(4900)  # another fit
    memory.take(-4900)
    budget = Budget("auto", memory)
    assert [batch(budget, memory, rows=1, graph=500, loss=500) for _ in range(3)] == [0, 6, 6]


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_peak_that_somebody_else_resets_is_no_small_peak(first: int, every: int) -> None:
    """As a callback does that measures batches of its own."""
    memory = Simulated(int(8000 / SPENDABLE) + 1)
    budget = Budget("auto", memory)
    kept = []
    for index in range(12):
        kept.append(batch(budget, memory, rows=1, graph=500, loss=6000))
        budget.end()
        if index >= first and (index - first) % every == 0:
            memory.reset_peak()
    assert kept == [0, *[4] * 11]
    assert memory.most <= memory.limit


class Growing(Simulated):
    """Every look finds a hundred bytes more."""

    def allocated(self) -> int:
        self.now += 100
        return self.now

    def peak(self) -> int:
        return 100_000


class Counting(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.dropout, self.norm = nn.Linear(32, 32), nn.Dropout(0.2), nn.BatchNorm1d(7)

    def forward(self, x: Tensor) -> Tensor:
        Counting.calls += 1
        return x + self.dropout(torch.relu(self.norm(self.inner(x))))


class Plain(zoo.Zoo):
    def __init__(self, **kw: Any) -> None:
        super().__init__(**{"log_norm": False, **kw})
        self.embed, self.head = nn.Embedding(zoo.VOCAB, 32), nn.Linear(32, zoo.VOCAB)
        self.blocks = nn.ModuleList(Counting() for _ in range(UNITS))

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return zoo.token_loss(self.head(x), batch)


def simulate(monkeypatch: pytest.MonkeyPatch, spare: int) -> None:
    limit = int((100_000 + spare * 100) / SPENDABLE) + 1
    monkeypatch.setattr(lightning_megatrain.session, "device_memory", lambda *_: Growing(limit))


def test_a_fit_keeps_graphs_from_its_second_batch_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = fit(Plain, MegaTrainStrategy(recompute="always"), max_steps=4)
    simulate(monkeypatch, 4)
    Counting.calls = 0
    kept, _ = fit(Plain, MegaTrainStrategy(), max_steps=4)
    # The second batch's peak is no higher for its four graphs, so the third keeps all.
    assert Counting.calls == 2 * UNITS + (2 * UNITS - 4) + 2 * UNITS
    assert_same_bits(plain, kept)


class Crowded(Plain):
    """Memory runs out in one forward or one backward of a unit, once, when other graphs are held."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.passes = at, 0
        for block in self.blocks:
            inner = block.inner.forward

            def forward(x: Tensor, inner: Any = inner) -> Tensor:
                out = inner(x)
                if out.requires_grad:
                    out.register_hook(self.check)
                self.check(out)
                return out

            block.inner.forward = forward

    def check(self, value: Tensor) -> Tensor:
        self.passes += 1
        if self.passes == self.at:
            raise torch.OutOfMemoryError("planted")
        return value


@pytest.mark.parametrize(("microbatch", "slices"), [(None, 1), (2, 2)])
@pytest.mark.parametrize("at", [4, 8, 11])  # of the 12 passes of the second batch, whose first 6 are forward
def test_running_out_of_memory_changes_no_bit(
    at: int, microbatch: int | None, slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"microbatch": microbatch}
    plain, _ = fit(partial(Crowded, -1), MegaTrainStrategy(recompute="always", **settings), max_steps=3)
    simulate(monkeypatch, 100)
    with pytest.warns(RuntimeWarning, match="Device memory ran out"):
        crowded, _ = fit(
            partial(Crowded, (3 * UNITS + at) * slices),  # the first batch recomputes
            MegaTrainStrategy(**settings),
            max_steps=3,
        )
    assert_same_bits(plain, crowded)


def test_memory_that_cannot_be_found_is_the_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch, 100)
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        fit(partial(Crowded, 3), MegaTrainStrategy(), max_steps=3)
