"""Lazy tensors are tensors: any operation gives what the ordinary tensor gives, and the usual ones read in parts."""

import copy
import io
import pickle
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

from lightning_megatrain.checkpoint import lazy as lazy_module
from lightning_megatrain.checkpoint.lazy import LazyTensor, SplitSource, TensorSource, hollow
from lightning_megatrain.checkpoint.single import read_single, write_single
from lightning_megatrain.memory.split import split_master


class Counting(TensorSource):
    """Notes the rows of every read."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.reads: list[tuple[int, int]] = []

    def read(self, start: int, stop: int) -> Tensor:
        self.reads.append((start, stop))
        return super().read(start, stop)


SHAPES = [(7, 5), (40, 3, 2), (6,), (), (0, 4), (1,)]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_module, "PART_BYTES", 64)


@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_form(shape: tuple[int, ...]) -> None:
    value = torch.randn(shape)
    source = Counting(value)
    lazy = LazyTensor(source)
    assert isinstance(lazy, Tensor)
    form: list[Any] = [
        (t.shape, t.dtype, t.device, t.numel(), t.dim(), t.size(), t.stride(), t.nbytes, t.element_size(), t.is_leaf)
        for t in (lazy, value)
    ]
    assert form[0] == form[1]
    assert lazy.detach() is lazy
    assert source.reads == []
    assert torch.equal(lazy, value)
    assert torch.equal(lazy.half(), value.half())
    assert type(lazy * 2) is Tensor
    assert np.array_equal(lazy.numpy(), value.numpy())
    assert "LazyTensor" in repr(lazy)


@pytest.mark.parametrize("shape", SHAPES)
def test_copies_read_in_parts(shape: tuple[int, ...]) -> None:
    source = Counting(torch.randn(shape))
    target = torch.empty(shape, dtype=torch.float64)
    target.copy_(LazyTensor(source))
    assert torch.equal(target, source._tensor.double())
    row = max(1, target.numel() // max(1, len(target) if shape else 1)) * 4
    assert all((stop - start) * row <= 64 or stop - start == 1 for start, stop in source.reads)
    torch.empty(shape, device="meta").copy_(LazyTensor(Counting(target)))  # reads nothing, and does not fail


@pytest.mark.parametrize("shape", SHAPES)
def test_split_masters_come_back_exactly(shape: tuple[int, ...]) -> None:
    value = torch.randn(shape)
    high, low = split_master(value.reshape(-1))
    assert torch.equal(LazyTensor(SplitSource(high.view(shape), low)), value)


def test_copies_and_pickles_are_ordinary_tensors() -> None:
    value = torch.randn(30, 3)
    lazy = LazyTensor(TensorSource(value))
    saved = io.BytesIO()
    torch.save({"x": lazy}, saved)
    saved.seek(0)
    for made in (copy.deepcopy(lazy), pickle.loads(pickle.dumps(lazy)), torch.load(saved, weights_only=True)["x"]):
        assert type(made) is Tensor
        assert torch.equal(made, value)


def test_the_single_file_is_what_torch_writes(tmp_path: Any) -> None:
    """Ties, views, nested places and values of other kinds included; lazy tensors are read once each."""
    value = torch.randn(30, 3)
    source = Counting(value)
    shared = LazyTensor(source)
    tree = {"a": shared, "b": [shared, {"c": value[3:5], "d": (1, "x", None)}], "e": LazyTensor(Counting(value[:0]))}
    write_single(tree, tmp_path / "lazy.ckpt")
    assert len(source.reads) == len({start for start, _ in source.reads})
    loaded = read_single(tmp_path / "lazy.ckpt", weights_only=True)
    assert torch.equal(loaded["a"], value)
    assert loaded["b"][0].data_ptr() == loaded["a"].data_ptr()
    assert torch.equal(loaded["b"][1]["c"], value[3:5])
    assert loaded["b"][1]["d"] == (1, "x", None)
    assert loaded["e"].shape == (0, 3)


def test_what_cannot_work_says_what_to_do() -> None:
    """A write would be lost with the tensor read for it, and so would its memory."""
    lazy = LazyTensor(TensorSource(torch.randn(30, 3)))
    writes: list[Any] = [
        lambda: lazy.zero_(),
        lambda: lazy.mul_(2),
        lambda: lazy.__setitem__(0, 1.0),
        lambda: torch.add(lazy, 1, out=lazy),
        lambda: torch.nn.init.ones_(lazy),
        lambda: lazy.copy_(torch.zeros(30, 3)),
        lambda: torch.nn.Parameter(lazy),
    ]
    for write in writes:
        with pytest.raises(RuntimeError, match=r"clone\(\) it and put the clone in its place"):
            write()
    for ask in (lazy.data_ptr, lazy.untyped_storage):
        with pytest.raises(RuntimeError, match=r"clone\(\) it"):
            ask()
    target = torch.zeros(30, 3)
    target.copy_(other=lazy)
    assert torch.equal(target, lazy.clone())
    assert torch.nn.Parameter(lazy.clone()).requires_grad


def test_hollow_tensors_take_no_memory() -> None:
    before = psutil.Process().memory_info().rss
    tensors = [hollow(torch.Size((2**28,)), torch.float32) for _ in range(64)]  # 64 GiB of addresses
    assert psutil.Process().memory_info().rss - before < 2**24
    assert len({t.data_ptr() for t in tensors}) == 64
