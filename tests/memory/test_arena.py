import gc
import os
import pickle

import psutil
import torch

from lightning_megatrain.memory.arena import Arena
from lightning_megatrain.memory.gradients import GradientArena, SlabRing
from lightning_megatrain.memory.layout import Group


def rss() -> int:
    return psutil.Process().memory_info().rss


def test_memory_is_exact_zeroed_and_given_back() -> None:
    size = 200 * 2**20 + 4096
    before = rss()
    arena = Arena(size)
    assert abs(rss() - before - size) < 8 * 2**20
    view = arena.view(torch.float32, size // 4)
    assert view.count_nonzero() == 0
    arena.close()
    view[:4] = 1.0  # a view outlives its arena
    assert view[:5].sum() == 4
    del view, arena
    gc.collect()
    assert rss() - before < 8 * 2**20


def test_views_share_memory_and_have_storages_of_their_own() -> None:
    arena = Arena(4096)
    whole, part = arena.view(torch.float32, 1024), arena.view(torch.float32, 16, offset=64)
    part.fill_(3.0)
    assert whole[16:32].sum() == 48
    assert part.untyped_storage().nbytes() == 64
    assert len(pickle.dumps(part)) < 1000


def test_empty_arena() -> None:
    arena = Arena(0, pin=False)
    assert arena.view(torch.float32, 0).numel() == 0
    arena.close()


def test_a_fork_does_not_copy_the_arena() -> None:
    """Written after a fork, inherited pages would be copied one by one: the arena must not be inherited."""
    size = 256 * 2**20
    arena = Arena(size)
    view = arena.view(torch.uint8, size)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    before = psutil.virtual_memory().available
    view.fill_(1)
    used = before - psutil.virtual_memory().available
    os.write(write_end, b"x")
    os.waitpid(child, 0)
    assert used < size // 2


def test_slabs_are_recycled_and_waited_for() -> None:
    ring = SlabRing(2, 8, torch.float32, pin=False)
    first, second = ring.take(), ring.take()
    assert first is not None
    assert second is not None
    assert ring.take(timeout=0.01) is None
    ring.give(second)
    assert ring.take() is second


def test_gradient_arena_allocates_on_need() -> None:
    parameter = torch.nn.Parameter(torch.ones(5, 7))
    groups = [Group.of(i, str(i), [("p", parameter)], resident=False) for i in range(2)]
    arena = GradientArena(groups, torch.bfloat16, pin=False)
    assert arena.nbytes == 0
    arena.views(1)[0].fill_(2.0)
    assert arena.flat(1).sum() == 70
    assert arena.nbytes == 128 * 2
    assert not arena.holds(0)
