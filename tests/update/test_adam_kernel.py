"""The compiled kernel equals its torch reference bit for bit, on every instruction set this machine has.

Without a compiler the kernel's own tests are skipped; the reference is always tested, against ``torch.optim``.
"""

import itertools
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_megatrain.memory.split import join_master, split_master
from lightning_megatrain.update import adam, build, kernel, reference
from lightning_megatrain.update.adam import (
    AdamScalars,
    accumulate_,
    adam_bf16_,
    adam_fp32_,
    adam_split_,
    sum_of_squares,
)
from lightning_megatrain.update.kernel import Kernel, Store
from lightning_megatrain.update.threads import plan_threads

HALF_AND_FULL = (torch.bfloat16, torch.float32)
HYPERS = {
    "adamw": AdamScalars(lr=3e-3, weight_decay=0.1),
    "adamw_no_decay": AdamScalars(lr=3e-3),
    "adam_l2": AdamScalars(lr=3e-3, weight_decay=0.1, decoupled=False),
    "adam": AdamScalars(lr=3e-3, decoupled=False),
    "maximize": AdamScalars(lr=3e-3, weight_decay=0.1, maximize=True),
    "low_betas": AdamScalars(lr=3e-3, beta1=0.2, beta2=0.5, weight_decay=0.1),
    "zero_betas": AdamScalars(lr=3e-3, beta1=0.0, beta2=0.0, eps=1e-4),
}
ISAS = kernel.available_isas()
needs_kernel = pytest.mark.skipif(not ISAS, reason=f"no compiled kernel; run `{kernel.BUILD_COMMAND}`")


@pytest.fixture(params=ISAS)
def compiled(request: pytest.FixtureRequest) -> Kernel:
    return kernel.open_kernel(request.param)


def _values(numel: int, seed: int, offset: int = 0) -> Tensor:
    """fp32 values of every kind: ordinary, subnormal, huge, zeros of both signs, infinities; starting off alignment."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel + offset, generator=generator)
    x *= torch.exp2(torch.randint(-20, 20, x.shape, generator=generator).float())
    kind = torch.randint(40, x.shape, generator=generator)
    x[kind == 0] *= 1e-42
    x[kind == 1] *= 1e32
    x[kind == 2] = 0.0
    x[kind == 3] = -0.0
    x[(kind == 4) & (x > 3e5)] = float("inf")
    x[(kind == 4) & (x < -3e5)] = -float("inf")
    return x[offset:]


def _off(x: Tensor, offset: int) -> Tensor:
    """The same values ``offset`` elements into a new allocation."""
    out = torch.empty(x.numel() + offset, dtype=x.dtype)[offset:]
    return out.copy_(x)


def _state(store: Store, moments: torch.dtype, numel: int, seed: int, offset: int = 0) -> list[Tensor]:
    """Parameter halves or parameter, then the two moments."""
    master = _values(numel, seed)
    if store is Store.SPLIT:
        params = list(split_master(master))
    else:
        params = [master if store is Store.FP32 else master.bfloat16()]
    m, v = _values(numel, seed + 1).to(moments), _values(numel, seed + 2).abs().to(moments)
    return [_off(t, offset) for t in (*params, m, v)]


def _assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Bit for bit, but any NaN equals any NaN: payloads depend on the order of operands."""
    if actual.is_floating_point():
        assert torch.equal(actual.isnan(), expected.isnan())
        keep = ~expected.isnan()
        actual, expected = actual[keep], expected[keep]
    as_int = torch.int16 if actual.element_size() == 2 else torch.int32
    assert torch.equal(actual.view(as_int), expected.view(as_int))


def _run_kernel(
    compiled: Kernel, store: Store, state: list[Tensor], grad: Tensor, *args: object, **kwargs: object
) -> None:
    low = state[1] if store is Store.SPLIT else None
    compiled.adam(store, state[0], low, *state[-2:], grad, *args, **kwargs)  # type: ignore[arg-type]


def _run_reference(
    store: Store, state: list[Tensor], grad: Tensor, c: adam.AdamCoefficients, keys: tuple[int, int], offset: int
) -> None:
    if store is Store.SPLIT:
        reference.adam_split_reference(*state, grad, c)
    elif store is Store.FP32:
        reference.adam_fp32_reference(*state, grad, c)
    else:
        reference.adam_bf16_reference(*state, grad, c, keys if store is Store.BF16_STOCHASTIC else None, offset)


@pytest.mark.parametrize("grads", HALF_AND_FULL, ids=str)
@pytest.mark.parametrize("moments", HALF_AND_FULL, ids=str)
@pytest.mark.parametrize("store", Store)
@pytest.mark.parametrize("hyper", HYPERS.values(), ids=HYPERS)
def test_kernel_is_the_reference(
    compiled: Kernel, hyper: AdamScalars, store: Store, moments: torch.dtype, grads: torch.dtype
) -> None:
    numel, threads, offset = 70_001, 3, 2**32 - 1000
    state = _state(store, moments, numel, seed=1)
    expected = [t.clone() for t in state]
    for step, scale in ((1, 1.0), (2, 0.37), (1000, 1.0)):
        grad = _values(numel, seed=step + 10).to(grads)
        c, keys = hyper.at(step, scale), reference.stochastic_keys(5, step)
        _run_kernel(compiled, store, state, grad, c, keys, offset, threads)
        _run_reference(store, expected, grad, c, keys, offset)
        for actual, wanted in zip(state, expected, strict=True):
            _assert_same_bits(actual, wanted)
        if store is Store.SPLIT:  # the halves of a NaN may differ between stores, the NaN may not
            _assert_same_bits(join_master(*state[:2]), join_master(*expected[:2]))


@pytest.mark.parametrize("store", Store)
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_odd_lengths_and_offsets(compiled: Kernel, store: Store, offset: int) -> None:
    hyper = HYPERS["adamw"]
    for numel in (0, 1, 2, 15, 16, 17, 31, 33, 63, 65, 127, 1023):
        state = _state(store, torch.float32, numel, seed=numel, offset=offset)
        expected = [t.clone() for t in state]
        grad = _off(_values(numel, seed=7).bfloat16(), offset)
        c, keys = hyper.at(4), reference.stochastic_keys(0, 4)
        _run_kernel(compiled, store, state, grad, c, keys, 11)
        _run_reference(store, expected, grad, c, keys, 11)
        for actual, wanted in zip(state, expected, strict=True):
            _assert_same_bits(actual, wanted)


def test_neighbours_are_not_touched(compiled: Kernel) -> None:
    whole = [torch.full((101,), 7, dtype=d) for d in (torch.bfloat16, torch.int16, torch.float32, torch.float32)]
    part = [t[10:77] for t in whole]
    compiled.adam(Store.SPLIT, *part, torch.ones(67), HYPERS["adamw"].at(1))
    for t in whole:
        assert (t[:10] == 7).all()
        assert (t[77:] == 7).all()


def test_kernel_keeps_nans(compiled: Kernel) -> None:
    """Also those whose payload sits in the lower half, which rounding alone would turn into infinity or zero."""
    bits = torch.tensor([0x7F800001, 0x7F807FFF, 0x7F808000, 0x7FFFFFFF, 0x7FC00000, -1, -0x7FFFFF], dtype=torch.int32)
    nans = bits.repeat(9).view(torch.float32)
    n = nans.numel()
    for grads in HALF_AND_FULL:
        grad = torch.zeros(n, dtype=grads)
        high, low = split_master(nans)
        compiled.adam(Store.SPLIT, high, low, torch.zeros(n), torch.zeros(n), grad, HYPERS["adamw"].at(1))
        assert high.isnan().all()
        assert join_master(high, low).isnan().all()
    high, low = split_master(torch.ones(n))
    m, v = torch.zeros(n).bfloat16(), torch.zeros(n).bfloat16()
    compiled.adam(Store.SPLIT, high, low, m, v, nans, HYPERS["adamw"].at(1))
    for t in (high, join_master(high, low), m, v):
        assert t.isnan().all()


def test_threads_do_not_change_a_bit(compiled: Kernel) -> None:
    numel = 300_000
    plans = [1, 2, 5, 64, plan_threads(1, bind=True), None]
    results = []
    for threads in plans:
        state = _state(Store.BF16_STOCHASTIC, torch.float32, numel, seed=3)
        grad = _values(numel, seed=4).bfloat16()
        keys = reference.stochastic_keys(1, 1)
        compiled.adam(Store.BF16_STOCHASTIC, state[0], None, *state[1:], grad, HYPERS["adamw"].at(1), keys, 0, threads)
        results.append((*state, torch.tensor(compiled.sum_of_squares(state[0].nan_to_num(0, 0, 0), threads))))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            _assert_same_bits(a.float(), b.float())


def test_bound_threads_leave_the_callers_affinity_alone(compiled: Kernel) -> None:
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("no affinity here")
    before = os.sched_getaffinity(0)
    compiled.scale(torch.ones(1 << 20), 1.0, plan_threads(len(plan_threads().cpus), bind=True))
    assert os.sched_getaffinity(0) == before


@needs_kernel
def test_gil_is_released_and_calls_may_overlap() -> None:
    compiled = kernel.open_kernel()
    states = [_state(Store.SPLIT, torch.float32, 1 << 20, seed=1) for _ in range(4)]
    grad = _values(1 << 20, seed=2).bfloat16()
    workers = [
        threading.Thread(target=_run_kernel, args=(compiled, Store.SPLIT, s, grad, HYPERS["adamw"].at(1)))
        for s in states
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for state in states[1:]:
        for a, b in zip(states[0], state, strict=True):
            _assert_same_bits(a, b)


# ------------------------------------------------------------------ against torch.optim


def _ulps(actual: Tensor, expected: Tensor, scale: Tensor) -> Tensor:
    """Differences in units in the last place of ``scale``."""
    unit = torch.exp2(torch.floor(torch.log2(scale.double().abs().clamp(min=2.0**-126))) - 23)
    return (actual.double() - expected.double()).abs() / unit


@pytest.fixture(params=["reference", *ISAS])
def forced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The public functions on one instruction set, or on the reference."""
    monkeypatch.setenv(kernel.ISA_VARIABLE, request.param)
    kernel._first_kernel.cache_clear()
    yield request.param
    kernel._first_kernel.cache_clear()


@pytest.mark.parametrize("name", HYPERS)
def test_one_step_is_within_an_ulp_of_torch(forced: str, name: str) -> None:
    hyper, numel = HYPERS[name], 100_003
    kind = torch.optim.AdamW if hyper.decoupled else torch.optim.Adam
    torch.manual_seed(0)
    param = torch.randn(numel).requires_grad_()
    optimizer = kind(
        [param],
        lr=hyper.lr,
        betas=(hyper.beta1, hyper.beta2),
        eps=hyper.eps,
        weight_decay=hyper.weight_decay,
        maximize=hyper.maximize,
        foreach=False,
    )
    param.grad = torch.zeros(numel)
    for step in range(1, 30):
        state = optimizer.state[param]
        before = param.detach().clone()
        m = state["exp_avg"].clone() if state else torch.zeros(numel)
        v = state["exp_avg_sq"].clone() if state else torch.zeros(numel)
        old_m = m.clone()
        grad = torch.randn(numel) * 10 ** (step % 5 - 3)
        param.grad.copy_(grad)
        optimizer.step()

        ours = before.clone()
        high, low = split_master(before)
        m_split, v_split = m.clone(), v.clone()
        adam_fp32_(ours, m, v, grad, hyper, step)
        adam_split_(high, low, m_split, v_split, grad, hyper, step)
        for actual, wanted in ((join_master(high, low), ours), (m_split, m), (v_split, v)):
            _assert_same_bits(actual, wanted)

        # torch fuses some multiply-adds and takes MKL's square root; we round each operation. Where terms cancel, the
        # difference is an ulp of the terms, not of what is left of them, and it goes on into the update.
        c, after = hyper.at(step), param.detach()
        terms = torch.maximum(old_m.abs(), grad.abs() + (c.l2 * before).abs())
        squares = state["exp_avg_sq"]
        if c.coupled:
            squares = torch.maximum(squares, 8 * c.grad_sq_weight * terms**2)
        reach = 16 * (c.step_size * terms).abs() / (v.sqrt() / c.bias2_sqrt + c.eps)
        size = torch.maximum(before.abs(), after.abs())
        assert _ulps(m, state["exp_avg"], terms).max() <= 1
        assert _ulps(v, state["exp_avg_sq"], squares).max() <= 1
        assert _ulps(ours, after, torch.maximum(size, reach)).max() <= 1
        # Hardly ever does that matter: all but a few are within an ulp of the parameter itself.
        assert (_ulps(ours, after, size) > 1).double().mean() < 2e-3


def test_scale_is_applied_to_the_gradient(forced: str) -> None:
    param, other = torch.ones(100), torch.ones(100)
    state = [torch.zeros(100) for _ in range(4)]
    grad = torch.randn(100)
    adam_fp32_(param, *state[:2], grad, HYPERS["adamw"], 1, scale=0.25)
    adam_fp32_(other, *state[2:], grad * 0.25, HYPERS["adamw"], 1)
    assert torch.equal(param, other)
    assert torch.equal(state[0], state[2])


# ------------------------------------------------------------------ stochastic rounding


def test_stochastic_rounding_is_unbiased_and_reproducible(forced: str) -> None:
    """lr is so small that rounding to nearest would lose every update."""
    numel, hyper = 200_000, AdamScalars(lr=2**-12)
    grad = torch.ones(numel)

    def step(seed: int, stochastic: bool = True, number: int = 1) -> Tensor:
        param = torch.ones(numel).bfloat16()
        adam_bf16_(param, torch.zeros(numel), torch.zeros(numel), grad, hyper, number, stochastic=stochastic, seed=seed)
        return param

    assert (step(0, stochastic=False) == 1).all()
    first = step(0)
    assert torch.equal(first, step(0))
    assert not torch.equal(first, step(1))
    # The gap below 1 is 2**-8, so one in 16 is rounded away. Five standard deviations of the mean.
    moved = (first != 1).double().mean().item()
    assert abs(moved - 1 / 16) < 5 * (1 / 16 * 15 / 16 / numel) ** 0.5


def test_stochastic_draws_depend_on_the_index_only(forced: str) -> None:
    numel, cut = 10_000, 3_333
    hyper = AdamScalars(lr=2**-12)

    def run(parts: list[slice]) -> Tensor:
        param, grad = torch.ones(numel).bfloat16(), torch.ones(numel)
        m, v = torch.zeros(numel), torch.zeros(numel)
        for p in parts:
            adam_bf16_(param[p], m[p], v[p], grad[p], hyper, 1, stochastic=True, seed=9, offset=p.start)
        return param

    assert torch.equal(run([slice(0, numel)]), run([slice(cut, numel), slice(0, cut)]))


def test_random_bits_are_uniform() -> None:
    bits = reference.random16(torch.arange(1 << 20), reference.stochastic_keys(1, 2))
    for bit in range(16):
        assert abs(((bits >> bit) & 1).double().mean().item() - 0.5) < 0.003
    next_step = reference.random16(torch.arange(1 << 20), reference.stochastic_keys(1, 3))
    assert abs(torch.corrcoef(torch.stack([bits.double(), next_step.double()]))[0, 1].item()) < 0.005


# ------------------------------------------------------------------ sum of squares, accumulate


@pytest.mark.parametrize("dtype", HALF_AND_FULL, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 17, 16_384, 16_385, 2_200_001])
def test_sum_of_squares(compiled: Kernel, numel: int, dtype: torch.dtype) -> None:
    x = torch.randn(numel + 1).to(dtype)[1:]
    wanted = reference.sum_of_squares_reference(x)
    for threads in (1, 2, 7):
        assert compiled.sum_of_squares(x, threads) == wanted
    assert wanted == pytest.approx(x.double().square().sum().item(), rel=1e-12)


def test_sum_of_squares_carries_what_is_not_finite(forced: str) -> None:
    x = torch.ones(50_000)
    x[40_000] = float("inf")
    assert sum_of_squares(x) == float("inf")
    x[3] = float("nan")
    assert sum_of_squares(x) != sum_of_squares(x)


def test_sum_of_squares_does_not_overflow(forced: str) -> None:
    assert sum_of_squares(torch.full((4,), 1e30)) == pytest.approx(4e60)


@pytest.mark.parametrize(("dst_type", "src_type"), list(itertools.product(HALF_AND_FULL, HALF_AND_FULL)), ids=str)
def test_accumulate(compiled: Kernel, dst_type: torch.dtype, src_type: torch.dtype) -> None:
    for numel in (0, 1, 33, 200_001):
        dst, src = _values(numel, 1, offset=1).to(dst_type), _values(numel, 2, offset=1).to(src_type)
        expected = dst.clone()
        reference.accumulate_reference(expected, src)
        compiled.accumulate(dst, src, threads=3)
        _assert_same_bits(dst, expected)


# ------------------------------------------------------------------ what the functions refuse


def _good() -> dict[str, Tensor]:
    return {
        "high": torch.zeros(8).bfloat16(),
        "low": torch.zeros(8, dtype=torch.int16),
        "exp_avg": torch.zeros(8),
        "exp_avg_sq": torch.zeros(8),
        "grad": torch.zeros(8),
    }


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("high", torch.zeros(8)),
        ("low", torch.zeros(8, dtype=torch.int32)),
        ("exp_avg", torch.zeros(8).half()),
        ("exp_avg_sq", torch.zeros(8).bfloat16()),
        ("exp_avg_sq", torch.zeros(7)),
        ("grad", torch.zeros(16)[::2]),
        ("grad", torch.zeros(2, 4)),
        ("grad", torch.zeros(8, device="meta")),
    ],
)
def test_wrong_tensors_are_refused(name: str, bad: Tensor) -> None:
    expected = "param" if name == "high" else name
    with pytest.raises(ValueError, match=f"`{expected}`"):
        adam_split_(**{**_good(), name: bad}, hyper=AdamScalars(), step=1)


def test_accumulate_and_sum_refuse_wrong_tensors() -> None:
    with pytest.raises(ValueError, match="`dst`"):
        accumulate_(torch.zeros(3), torch.zeros(4))
    with pytest.raises(ValueError, match="float64"):
        sum_of_squares(torch.zeros(3, dtype=torch.float64))


def test_steps_count_from_one() -> None:
    with pytest.raises(ValueError, match="from 1"):
        adam_split_(**_good(), hyper=AdamScalars(), step=0)


# ------------------------------------------------------------------ finding the library


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a new process that was told nothing."""
    monkeypatch.delenv(kernel.ISA_VARIABLE, raising=False)
    kernel._first_kernel.cache_clear()
    yield
    kernel._first_kernel.cache_clear()


def _assert_one_warning(match: str) -> None:
    with pytest.warns(RuntimeWarning, match=match) as caught:
        results = [kernel.get_kernel() for _ in range(3)]
    assert results == [None, None, None]
    assert len(caught) == 1
    assert kernel.BUILD_COMMAND in str(caught[0].message)
    assert kernel.describe() == "torch reference"
    accumulate_(torch.zeros(3), torch.ones(3))


@pytest.mark.usefixtures("fresh")
def test_no_library_warns_once_and_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "FOLDER", tmp_path)
    _assert_one_warning("no compiled library")


@pytest.mark.usefixtures("fresh")
def test_broken_library_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_adam.so").write_bytes(b"not a library")
    monkeypatch.setattr(kernel, "FOLDER", tmp_path)
    _assert_one_warning("cannot be opened")


@needs_kernel
@pytest.mark.usefixtures("fresh")
def test_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "ABI_VERSION", 999)
    _assert_one_warning("needs 999")


@needs_kernel
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("function", ["adam", "sum_of_squares", "accumulate"])
def test_failed_self_test_is_not_used(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original: Callable[..., object] = getattr(Kernel, function)

    def wrong(self: Kernel, *args: Tensor, **kwargs: object) -> object:
        target = args[1] if function == "adam" else args[0]
        result = original(self, *args, **kwargs)
        target.view(torch.int16)[500] ^= 1  # one bit of one element
        return None if result is None else result * (1 + 2**-52)  # type: ignore[operator]

    monkeypatch.setattr(Kernel, function, wrong)
    _assert_one_warning("failed its self-test")


@pytest.mark.usefixtures("fresh")
def test_reference_by_choice_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernel.ISA_VARIABLE, "reference")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernel.get_kernel() is None


@needs_kernel
@pytest.mark.usefixtures("fresh")
def test_best_instruction_set_is_the_default_and_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    best = kernel.get_kernel()
    assert best is not None
    assert best.isa == ISAS[0]
    kernel._first_kernel.cache_clear()
    monkeypatch.setenv(kernel.ISA_VARIABLE, "baseline")
    assert kernel.describe() == "compiled kernel, baseline"
    kernel._first_kernel.cache_clear()
    monkeypatch.setenv(kernel.ISA_VARIABLE, "avx1024")
    with pytest.raises(ValueError, match="baseline"):
        kernel.get_kernel()


def test_in_place_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "FOLDER", tmp_path)
    monkeypatch.setenv("CC", "/nonexistent/cc")
    with pytest.raises(kernel.KernelUnavailableError, match="could not be run"):
        build.build(tmp_path)
    monkeypatch.setenv("CC", "false")
    with pytest.raises(kernel.KernelUnavailableError, match="failed"):
        build.build(tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.delenv("CC")
    if any(map(shutil.which, ("cc", "gcc", "clang"))):
        assert build.build(tmp_path) == tmp_path / "_adam.so"
        assert "baseline" in kernel.available_isas()
        kernel.open_kernel()


def test_pip_and_the_in_place_build_use_the_same_flags() -> None:
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    block = re.search(r"extra-compile-args = \[(.*?)\]", pyproject.read_text(), re.DOTALL)
    assert block is not None
    assert tuple(re.findall(r'"([^"]+)"', block[1])) == build.COMPILE_FLAGS


@needs_kernel
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_kernel_works_in_a_forked_child_and_leaves_no_threads(tmp_path: Path) -> None:
    code = """
import os, time, torch
from lightning_megatrain.update.kernel import get_kernel

def tasks():
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0

kernel = get_kernel()
x = torch.ones(1 << 20)
before = tasks()
total = kernel.sum_of_squares(x, 4)
deadline = time.monotonic() + 10
while tasks() > before and time.monotonic() < deadline:
    time.sleep(0.01)  # a thread that was joined is listed until the system has taken it apart
assert tasks() <= before, (tasks(), before)
pid = os.fork()
if pid == 0:
    os._exit(0 if kernel.sum_of_squares(x, 4) == total else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""
    # In a folder of its own: beside a source tree without a built kernel, python would import that tree.
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=tmp_path)


def test_bench_reports_every_key() -> None:
    from lightning_megatrain.update.bench import bench_host

    start = time.perf_counter()
    result = bench_host(numel=1 << 16, threads=1, repeats=1)
    assert set(result) == {
        "kernel_gparams_s",
        "torch_fused_gparams_s",
        "reference_gparams_s",
        "dram_gb_s",
        "isa",
        "threads",
    }
    assert result["threads"] == 1
    assert result["isa"] == (ISAS[0] if ISAS else "reference")
    assert all(value > 0 for value in (result["kernel_gparams_s"], result["dram_gb_s"]))
    assert time.perf_counter() - start < 60
