"""Text from the standard library: split, windows and order."""

import os

import pytest
import torch

from lightning_megatrain.recipes.bytes_data import (
    SeededOrder,
    StdlibBytes,
    Windows,
    is_validation,
    stdlib_root,
    stdlib_sources,
)


def test_sources_are_code_with_both_sides_of_the_split():
    files = stdlib_sources()
    assert all(path.suffix == ".py" and (stdlib_root() / path).is_file() for path in files)
    assert not [path for path in files if "site-packages" in path.parts]
    share = sum(map(is_validation, files)) / len(files)
    assert 0.01 < share < 0.15


def test_order_does_not_depend_on_the_file_system(tmp_path, monkeypatch):
    for name in ("b/x.py", "a/y.py", "z.py", "tests/left_out.py", "a/data.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    expected = stdlib_sources(tmp_path)
    walk = os.walk

    def reversed_walk(top):
        for folder, subfolders, names in walk(top):
            subfolders.sort(reverse=True)
            yield folder, subfolders, sorted(names, reverse=True)

    monkeypatch.setattr(os, "walk", reversed_walk)
    assert stdlib_sources(tmp_path) == expected
    assert len(expected) == 3


def test_a_folder_without_sources_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match=r"data\.root"):
        stdlib_sources(tmp_path)


def test_batches_are_windows_of_bytes_and_repeat():
    def first_batches(seed):
        data = StdlibBytes(
            seq_len=32, batch_size=4, max_train_bytes=1 << 14, val_windows=6, val_batch_size=4, seed=seed
        )
        data.setup("fit")
        train = [batch["input_ids"] for batch in data.train_dataloader()]
        return train, [batch["input_ids"] for batch in data.val_dataloader()]

    train, val = first_batches(seed=3)
    assert len(train) == (1 << 14) // 32 // 4
    assert train[0].shape == (4, 32)
    assert train[0].dtype == torch.int64
    assert [len(batch) for batch in val] == [4, 2]
    assert max(int(batch.max()) for batch in train) < 256
    again, _ = first_batches(seed=3)
    assert all(torch.equal(a, b) for a, b in zip(train, again, strict=True))
    other, same_val = first_batches(seed=4)
    assert not all(torch.equal(a, b) for a, b in zip(train, other, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(val, same_val, strict=True))


def test_windows_do_not_overlap_and_spread_evenly():
    windows = Windows.cut(bytes(range(100)), 10)
    assert len(windows) == 10
    assert windows[3]["input_ids"].tolist() == list(range(30, 40))
    assert windows.spread(5).data[:, 0].tolist() == [0, 20, 40, 60, 80]
    assert windows.spread(50) is windows


def test_each_epoch_has_its_own_order():
    order = SeededOrder(50, seed=1)
    first = list(order)
    order.set_epoch(1)
    second = list(order)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    order.set_epoch(0)
    assert list(order) == first


def test_text_survives_encoding():
    assert StdlibBytes.decode(StdlibBytes.encode("def é():")) == "def é():"
    assert StdlibBytes.decode(torch.tensor([97, 151935, 98])) == "a\ufffdb"


@pytest.mark.parametrize("wrong", [{"seq_len": 1}, {"vocab_size": 300}, {"batch_size": 0}, {"max_train_bytes": 10}])
def test_sizes_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        StdlibBytes(**wrong)
