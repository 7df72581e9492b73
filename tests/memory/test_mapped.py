"""Parameters that are mapped from files, and their way into the store part by part."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Parameter

from lightning_megatrain.memory import store as store_module
from lightning_megatrain.memory.layout import Group
from lightning_megatrain.memory.mapped import FileMappings, give_pages_back
from lightning_megatrain.memory.store import Store, StoreFormat

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def values_of(dtype: torch.dtype) -> dict[str, Tensor]:
    """Several pages and parts, and some that end within one; a NaN and infinities in each."""
    generator = torch.Generator().manual_seed(2)
    values = {
        "wide": torch.randn(37, 1001, generator=generator),
        "flat": torch.randn(4097, generator=generator),
        "one": torch.randn((), generator=generator),
        "none": torch.empty(0, 3),
    }
    for value in values.values():
        if value.numel() > 9:
            value.view(-1)[5:8] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    return {name: value.to(dtype) for name, value in values.items()}


@pytest.fixture
def files() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def mapped(values: dict[str, Tensor], path: Path, files: ExitStack) -> dict[str, Tensor]:
    save_file(values, path)
    file = files.enter_context(safe_open(path, framework="pt"))
    return {name: file.get_tensor(name) for name in values}


def adopted(tensors: dict[str, Tensor], store_format: StoreFormat) -> Store:
    named = [(name, Parameter(tensor)) for name, tensor in tensors.items()]
    groups = [Group.of(0, "a", named[:1], resident=False), Group.of(1, "b", named[1:], resident=True)]
    store = Store(groups, store_format, pin=False)
    store.adopt()
    return store


def masters(store: Store) -> list[Tensor]:
    return [store.master(g.index, i) for g in store.groups for i in range(len(g.parameters))]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32)


@pytest.mark.parametrize("part", [1000, 4 << 20])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("store_format", StoreFormat)
def test_the_store_takes_the_same_bits_from_a_file_as_from_memory(
    tmp_path: Path,
    files: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
    store_format: StoreFormat,
    dtype: torch.dtype,
    part: int,
) -> None:
    monkeypatch.setattr(store_module, "PART", part)
    expected = masters(adopted(values_of(dtype), store_format))
    views = mapped(values_of(dtype), tmp_path / "a.safetensors", files)
    held = [FileMappings().hold(view) for view in views.values() if view.numel()]
    assert all(held)
    found = masters(adopted(views, store_format))
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(bits(a), bits(b))
    if store_format is not StoreFormat.BF16:
        for master, value in zip(found, values_of(dtype).values(), strict=True):
            assert torch.equal(master.nan_to_num(), value.float().nan_to_num())


def test_turned_tensors_are_taken_as_they_are_seen(tmp_path: Path, files: ExitStack) -> None:
    wide = mapped(values_of(torch.bfloat16), tmp_path / "a.safetensors", files)["wide"].t()
    assert not FileMappings().hold(wide)
    [master] = masters(adopted({"turned": wide}, StoreFormat.SPLIT))
    assert torch.equal(bits(master), bits(wide.float()))


def test_pages_given_back_are_read_again(tmp_path: Path, files: ExitStack) -> None:
    values = values_of(torch.float32)
    view = mapped(values, tmp_path / "a.safetensors", files)["wide"]
    for _ in range(2):
        assert torch.equal(bits(view), bits(values["wide"]))
        give_pages_back(view)


def test_a_file_of_which_somebody_changed_a_value_is_left_alone(tmp_path: Path, files: ExitStack) -> None:
    """The change is in memory only, and giving pages back would lose it."""
    path = tmp_path / "a.safetensors"
    views = mapped(values_of(torch.float32), path, files)
    before = path.read_bytes()
    views["wide"][3, 4] = 77.0
    assert not FileMappings().hold(views["flat"])
    found = masters(adopted(views, StoreFormat.SPLIT))
    assert found[0][3, 4] == 77.0
    assert path.read_bytes() == before


def test_ordinary_memory_is_no_file() -> None:
    mappings = FileMappings()
    assert not mappings.hold(torch.randn(1 << 20))
    assert not mappings.hold(torch.randn(4))
