import pytest
import torch
from torch.nn import Parameter

from lightning_megatrain.memory.layout import Group
from lightning_megatrain.memory.store import Moments, Store, StoreFormat


def make(store_format: StoreFormat) -> tuple[Store, list[Parameter], list[torch.Tensor]]:
    torch.manual_seed(0)
    parameters = [Parameter(torch.randn(7, 9)), Parameter(torch.randn(300)), Parameter(torch.randn(2, 2))]
    parameters[1].requires_grad_(False)
    values = [p.detach().clone() for p in parameters]
    groups = [
        Group.of(0, "a", [("x", parameters[0]), ("y", parameters[1])], resident=False),
        Group.of(1, "b", [("z", parameters[2])], resident=True),
    ]
    store = Store(groups, store_format, pin=False)
    store.adopt()
    return store, parameters, values


@pytest.mark.parametrize("store_format", StoreFormat)
def test_adopt_and_release_keep_values_and_identity(store_format: StoreFormat) -> None:
    store, parameters, values = make(store_format)
    for parameter, value in zip(parameters, values, strict=True):
        assert parameter.shape == value.shape
        assert parameter.dtype == store_format.wire_dtype
        assert isinstance(parameter, Parameter)
    store.release()
    assert store.nbytes == 0
    for parameter, value in zip(parameters, values, strict=True):
        expected = value.bfloat16().float() if store_format is StoreFormat.BF16 else value
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, expected)


def test_split_wire_is_the_rounded_master() -> None:
    store, parameters, values = make(StoreFormat.SPLIT)
    for parameter, value in zip(parameters, values, strict=True):
        assert torch.equal(parameter, value.bfloat16()) or (parameter.float() - value).abs().max() < 2**-7
    assert torch.equal(store.master(0, 0), values[0])
    new = torch.randn(7, 9)
    version = store.versions[0]
    store.write_master(0, 0, new)
    assert torch.equal(store.master(0, 0), new)
    assert torch.equal(parameters[0], store.host_views(0)[0])
    assert store.versions[0] > version


def test_bytes_per_parameter() -> None:
    for store_format, size in ((StoreFormat.FP32, 4), (StoreFormat.SPLIT, 4), (StoreFormat.BF16, 2)):
        store, _, _ = make(store_format)
        assert store.nbytes == (128 + 384 + 128) * size
        assert store.format.weight_bytes == size


def test_moments_know_trainable_parameters_only() -> None:
    store, _, _ = make(StoreFormat.SPLIT)
    moments = Moments(store.groups)
    assert moments.nbytes == (128 + 128) * 8
    first, second = moments.views(0, 0)
    first.fill_(2.0)
    assert moments.flat(0)[0].sum() == 126
    assert second.shape == (7, 9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_parameters_get_a_wide_master(dtype: torch.dtype) -> None:
    parameter = Parameter(torch.randn(5).to(dtype))
    value = parameter.detach().float()
    store = Store([Group.of(0, "a", [("x", parameter)], resident=False)], StoreFormat.FP32, pin=False)
    store.adopt()
    assert parameter.dtype == torch.float32
    assert torch.equal(parameter, value)


@pytest.mark.parametrize("store_format", StoreFormat)
@pytest.mark.parametrize("fails_at", range(3))
def test_a_failure_while_adopting_loses_nothing(
    fails_at: int, store_format: StoreFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = Store.write_master, iter(range(10))

    def failing(self: Store, *args: object) -> None:
        if next(calls) == fails_at:
            raise MemoryError("planted")
        write(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "write_master", failing)
    torch.manual_seed(0)
    parameters = [Parameter(torch.randn(7, 9)), Parameter(torch.randn(300)), Parameter(torch.randn(2, 2))]
    values = [p.detach().clone() for p in parameters]
    groups = [
        Group.of(0, "a", [("x", parameters[0]), ("y", parameters[1])], resident=False),
        Group.of(1, "b", [("z", parameters[2])], resident=True),
    ]
    store = Store(groups, store_format, pin=False)
    with pytest.raises(MemoryError, match="planted"):
        store.adopt()
    assert store.nbytes == 0
    for parameter, value in zip(parameters, values, strict=True):
        assert parameter.dtype == torch.float32
        exact = store_format is not StoreFormat.BF16
        assert torch.equal(parameter, value) or (not exact and torch.equal(parameter, value.bfloat16().float()))
