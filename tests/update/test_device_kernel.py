"""The device's update: its CUDA source, compiled for the CPU, and its torch path give the host reference's bits."""

import ctypes
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_adam_kernel import HYPERS, _assert_same_bits, _state, _values
from torch import Tensor

from lightning_megatrain.memory.split import join_master, join_whole, split_master, split_whole_
from lightning_megatrain.update import device
from lightning_megatrain.update.adam import AdamScalars
from lightning_megatrain.update.device import SOURCE, adam_device_, scalars
from lightning_megatrain.update.kernel import Store
from lightning_megatrain.update.reference import AdamCoefficients, adam_on_device, adam_split_reference

# What CUDA brings along, for one thread.
SHIM = """
#include <math.h>
#include <string.h>
#define __global__ __attribute__((visibility("default")))
struct index { unsigned int x; };
static const struct index blockIdx = {0}, threadIdx = {0}, blockDim = {1}, gridDim = {1};
static float __uint_as_float(unsigned int b) { float x; memcpy(&x, &b, 4); return x; }
static float __int_as_float(int b) { float x; memcpy(&x, &b, 4); return x; }
static unsigned int __float_as_uint(float x) { unsigned int b; memcpy(&b, &x, 4); return b; }
"""

Run = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, AdamCoefficients], None]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("kernel")
    source, library = folder / "adam.cpp", folder / "adam.so"
    source.write_text(SHIM + SOURCE.read_text())
    compiler = next(found for name in ("c++", "g++", "clang++") if (found := shutil.which(name)))
    flags = shlex.split("-O2 -ffp-contract=off -fvisibility=hidden -fPIC -shared")
    subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
    compiled = ctypes.CDLL(str(library)).adam_split
    compiled.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int] * 12

    def run(*tensors_and_coefficients: Tensor | AdamCoefficients) -> None:
        *tensors, c = tensors_and_coefficients
        compiled(*(t.data_ptr() for t in tensors), tensors[-1].numel(), *scalars(c))

    return run


@pytest.mark.parametrize("path", ["cuda source", "torch"])
@pytest.mark.parametrize("hyper", HYPERS.values(), ids=HYPERS)
def test_bits_of_the_host_reference(path: str, hyper: AdamScalars, on_cpu: Run) -> None:
    run = on_cpu if path == "cuda source" else adam_on_device
    state = _state(Store.SPLIT, torch.float32, 70_001, seed=1)
    expected = [t.clone() for t in state]
    for step, scale in ((1, 1.0), (2, 0.37), (1000, 1.0)):
        grad = _values(70_001, seed=step + 10).bfloat16()
        run(*state, grad, hyper.at(step, scale))
        adam_split_reference(*expected, grad, hyper.at(step, scale))
        for actual, wanted in zip(state[2:], expected[2:], strict=True):
            _assert_same_bits(actual, wanted)
        _assert_same_bits(join_master(*state[:2]), join_master(*expected[:2]))


def test_moments_in_bf16() -> None:
    state = _state(Store.SPLIT, torch.bfloat16, 5000, seed=1)
    expected = [t.clone() for t in state]
    grad, hyper = _values(5000, seed=2).bfloat16(), AdamScalars(weight_decay=0.1)
    adam_device_(*state, grad, hyper, 3, 0.5)
    adam_split_reference(*expected, grad, hyper.at(3, 0.5))
    for actual, wanted in zip(state, expected, strict=True):
        _assert_same_bits(actual, wanted)


def patterns() -> Tensor:
    """fp32 patterns around every place where rounding the upper half could go wrong, and many others."""
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32).repeat_interleave(6) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32).repeat(2**16)
    return (upper | lower).view(torch.float32)


def test_split_and_join_of_every_kind_of_pattern() -> None:
    master = patterns()
    high, low = split_master(master)
    mine = torch.empty_like(high), torch.empty_like(low)
    split_whole_(master, *mine)
    assert torch.equal(mine[0].view(torch.int16), high.view(torch.int16))
    assert torch.equal(mine[1], low)
    assert torch.equal(join_whole(high, low).view(torch.int32), join_master(high, low).view(torch.int32))
    stale = torch.zeros_like(high), torch.full_like(low, -3)  # a zero that somebody wrote to the upper half alone
    assert not join_whole(*stale).any()


def test_a_kernel_that_cannot_be_compiled_is_replaced_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise AttributeError("no compiler library\nand more")

    monkeypatch.setattr(device, "_compile", refuse)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    with pytest.warns(RuntimeWarning, match=r"could not be used \(no compiler library\).*use a release of torch"):
        assert device._kernel_for.__wrapped__(torch.device("cuda")) is None


@pytest.mark.parametrize("wrong", [0, 1, 2, 3])
def test_a_kernel_with_another_bit_is_refused(wrong: int, on_cpu: Run) -> None:
    device._check(on_cpu, torch.device("cpu"))

    def off(*arguments: Tensor) -> None:
        on_cpu(*arguments)
        whole = arguments[wrong].view(torch.int16)
        whole[-2:] = whole[-2:] ^ 1

    with pytest.raises(RuntimeError, match="reference's bits"):
        device._check(off, torch.device("cpu"))


def test_the_source_is_installed() -> None:
    assert Path(device.__file__).parent in SOURCE.parents
    assert SOURCE.is_file()
