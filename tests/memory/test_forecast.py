"""The forecast against steps that were measured, and against limits that can be worked out by hand."""

import dataclasses

import pytest

from lightning_megatrain.memory.forecast import Machine, Work, forecast, on_device, tokens_to_hide

H200 = Machine(
    host_bytes=124 * 2**30,
    dram_bytes_per_s=120e9,
    link_bytes_per_s=55e9,
    flops_per_s=0.53 * 989.4e12,  # eager blocks
)
"""As measured: tests/benchmarks/results/h200_7b.md and its hardware."""

BLOCKS, HEAD, ATTENTION = 6_525_612_032, 544_997_376, 6 * 28 * 2048 * 3584


def step_of_7b(tokens: int) -> Work:
    """Qwen2.5-7B's shape, sequences of 2,048."""
    return Work(
        tokens=tokens,
        batches=1,
        model_flops=(6 * (BLOCKS + HEAD) + ATTENTION) * tokens,
        block_flops=(6 * BLOCKS + ATTENTION) * tokens,
        fetched_bytes=2 * BLOCKS,
        pushed_bytes=2 * 7_615_616_512,
        update_bytes=26 * 7_615_616_512,
    )


@pytest.mark.parametrize(
    ("schedule", "tokens", "measured"),
    [
        ("in_backward", 8192, 2.025),
        ("in_backward", 16384, 2.300),
        ("in_backward", 32768, 3.923),
        ("in_backward", 65536, 7.640),
        ("next_forward", 8192, 2.363),
        ("next_forward", 16384, 3.143),
        ("next_forward", 32768, 4.646),
        ("next_forward", 65536, 7.737),
    ],
)
def test_measured_steps_are_predicted_within_fifteen_percent(schedule: str, tokens: int, measured: float) -> None:
    predicted = forecast(step_of_7b(tokens), H200, schedule)
    assert predicted.step == pytest.approx(measured, rel=0.15)
    assert predicted.binds == ("compute" if tokens > 20000 or (schedule, tokens) == (None, 0) else "update")


def test_schedules_hide_what_they_promise() -> None:
    work = step_of_7b(65536)
    alone = forecast(work, dataclasses.replace(H200, dram_bytes_per_s=1e15), "in_backward").step
    update = forecast(work, H200, "blocking").update
    assert forecast(work, H200, "blocking").step == pytest.approx(alone + update)
    assert forecast(work, H200, "in_backward").step == pytest.approx(alone)
    assert forecast(work, H200, "next_forward").step < alone + update


def test_a_slow_link_binds_and_accumulation_pays_it_again() -> None:
    slow = dataclasses.replace(H200, link_bytes_per_s=1e9)
    one = forecast(step_of_7b(8192), slow, "in_backward")
    assert one.binds in ("fetch", "push")
    assert one.step == pytest.approx(one.fetch / 2 + max(one.fetch / 2, one.push))
    four = forecast(dataclasses.replace(step_of_7b(8192), batches=4), slow, "next_forward")
    assert four.fetch == pytest.approx(4 * one.fetch)
    assert four.compute == pytest.approx(one.compute)


def test_inputs_that_wait_on_the_host_cross_the_link_twice() -> None:
    slow = dataclasses.replace(H200, link_bytes_per_s=1e9)
    without = step_of_7b(8192)
    work = dataclasses.replace(without, saved_bytes=5 * 10**9, batches=2)
    one, two = (forecast(w, slow, "next_forward") for w in (without, work))
    assert two.fetch == pytest.approx(2 * (one.fetch + 5))
    assert two.push == pytest.approx(2 * (one.push + 5))


@pytest.mark.parametrize("schedule", ["in_backward", "next_forward", "blocking"])
def test_what_the_device_updates_takes_its_time_there(schedule: str) -> None:
    machine = dataclasses.replace(H200, device_bytes_per_s=4.8e12)
    work = step_of_7b(65536)  # both halves of the step wait for compute
    at_home, unknown = (forecast(on_device(work, part), H200, schedule) for part in (0.0, 1.0))
    own = work.update_bytes / 4.8e12
    whole, half = (forecast(on_device(work, part), machine, schedule) for part in (1.0, 0.5))
    assert forecast(on_device(work, 0.0), machine, schedule) == at_home
    assert whole.compute == pytest.approx(unknown.compute + own)
    assert half.compute == pytest.approx(unknown.compute + own / 2)
    assert whole.step == pytest.approx(unknown.step + own)
    assert (whole.update, half.update) == (0.0, pytest.approx(at_home.update / 2))


def test_tokens_from_which_link_and_update_are_hidden() -> None:
    for schedule in ("in_backward", "next_forward"):
        needed = tokens_to_hide(step_of_7b(8192), H200, schedule)
        for what, tokens in needed.items():
            at, below = (forecast(step_of_7b(n), H200, schedule) for n in (tokens, round(0.98 * tokens)))
            if tokens == max(needed.values()):
                assert at.binds == "compute", what
                assert below.step > below.compute
    assert "link" not in tokens_to_hide(step_of_7b(8192), dataclasses.replace(H200, link_bytes_per_s=None), "blocking")
