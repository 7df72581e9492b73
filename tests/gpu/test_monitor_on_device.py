"""What the monitor and the timeline say of a GPU: lanes overlap, times are true, and nobody waits for them."""

import json
import time
from collections import Counter, defaultdict
from itertools import pairwise

import lightning as L
import pytest
import torch
from fitting import QUIET
from torch import nn
from torch.utils.data import DataLoader

from lightning_megatrain import MegaTrainStrategy
from lightning_megatrain.callbacks.monitor import Monitor
from lightning_megatrain.callbacks.timeline import Timeline
from lightning_megatrain.stream.streams import CudaStreams, Streams

pytestmark = pytest.mark.gpu

WIDTH, UNITS, ROWS = 4096, 6, 16_384
TOLERANCE = 5e-4
"""Seconds by which the host's and the device's clock may differ."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Wide(L.LightningModule):
    """Units of 134 MB on the wire, with enough rows to hide them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(UNITS))
        self.head = nn.Linear(WIDTH, 1)

    def training_step(self, batch, batch_idx):
        x = torch.ones(ROWS, WIDTH, device=self.device, dtype=torch.bfloat16)
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def train(callbacks, steps, update="in_backward", logger=False):
    torch.manual_seed(1)
    data = DataLoader([{"input_ids": torch.ones(1), "num_tokens": ROWS}] * steps, batch_size=None)
    strategy = MegaTrainStrategy(
        units=["Block"], update=update, recompute="always", device_update="never", host_memory="32GiB"
    )
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed",
        max_steps=steps,
        callbacks=callbacks,
        **{**QUIET, "logger": logger},
    )
    trainer.fit(Wide(), data)
    return trainer


class Keep(L.Callback):
    """All spans of the steps from the third on."""

    reads_weights = False  # or every step would wait for its updates first

    def __init__(self):
        self.spans = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 3:
            trainer.strategy.streams.attach(self.spans.append)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.strategy.streams.collect()
        trainer.strategy.streams.set_clock()

    def on_train_end(self, trainer, pl_module):
        trainer.strategy.streams.synchronize()
        trainer.strategy.streams.collect()

    def on(self, lane):
        return sorted((s for s in self.spans if s.lane == lane), key=lambda s: s.start)


def overlap(some, others):
    return sum(max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a in some for b in others)


@pytest.mark.parametrize("update", ["in_backward", "next_forward"])
def test_lanes_overlap_and_their_times_are_in_the_order_of_what_depends_on_what(update):
    keep = Keep()
    train([keep], steps=8, update=update)
    compute = keep.on("compute")
    for lane in ("fetch", "push", "update"):
        spans = keep.on(lane)
        assert overlap(spans, compute) > 0.05 * sum(s.seconds for s in spans), lane
        assert all(a.end <= b.start + 1e-4 for a, b in pairwise(spans)), lane
    uses = defaultdict(list)
    for span in sorted(keep.spans, key=lambda s: s.start):
        if "blocks" in span.unit and span.lane != "wait":
            uses[span.label].append(span)
    for unit in range(UNITS):
        name = f"blocks.{unit}"
        backwards, pushes, updates = (uses[f"{verb} {name}"] for verb in ("backward", "push", "update"))
        assert len(backwards) == len(pushes) == 5
        for backward, push in zip(backwards, pushes, strict=True):  # both by the device's clock
            assert backward.end <= push.start + 1e-5
        # One by the device's clock, the other by the host's.
        for push in pushes:
            following = [update for update in updates if update.end > push.end]
            assert not following or following[0].start >= push.end - TOLERANCE
    rates = Counter()
    for span in keep.spans:
        rates[span.lane, "bytes"] += span.nbytes
        rates[span.lane, "seconds"] += span.seconds
    for lane in ("fetch", "push"):
        assert 1e9 < rates[lane, "bytes"] / rates[lane, "seconds"] < 1e12


def test_the_waits_and_the_work_of_the_device_do_not_overlap():
    keep = Keep()
    train([keep], steps=8)
    waits, compute = keep.on("wait"), keep.on("compute")
    assert overlap(waits, compute) < 0.02 * sum(s.seconds for s in compute)
    assert any(span.verb == "worker" for span in waits)  # the tail of the updates, which nothing hides


def test_tokens_per_s_are_those_of_the_wall_clock_within_two_percent():
    class Wall(L.Callback):
        """Comes after the monitor."""

        reads_weights = False

        def __init__(self):
            self.moments = {}

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx + 1 in (5, 25):
                torch.cuda.synchronize()
                self.moments[batch_idx + 1] = time.perf_counter()

    monitor, wall = Monitor(warmup_steps=5, every_n_steps=20, flops_per_token=1e9), Wall()
    train([monitor, wall], steps=25)
    expected = 20 * ROWS / (wall.moments[25] - wall.moments[5])
    assert monitor.latest["tokens_per_s"] == pytest.approx(expected, rel=0.02)
    assert monitor.latest["model_tflops"] == pytest.approx(expected * 1e9 / 1e12, rel=0.02)
    assert monitor.latest["peak_device_bytes"] > 2 * UNITS * ROWS * WIDTH
    assert 0 < monitor.latest["waited"] < 1


def refusing_to_wait(function):
    def inner(*args, **kwargs):
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return function(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    return inner


class Hurried(Monitor):
    on_train_start = refusing_to_wait(Monitor.on_train_start)
    on_train_batch_end = refusing_to_wait(Monitor.on_train_batch_end)


def test_the_monitor_waits_for_nothing(monkeypatch):
    # Event.query and elapsed_time are no waits; these would be.
    def never(*args, **kwargs):
        raise AssertionError("the monitor waited for the device")

    monitor = Hurried(warmup_steps=1, every_n_steps=1, flops_per_token=1e9)
    monkeypatch.setattr(Streams, "collect", refusing_to_wait(Streams.collect))
    train([monitor], steps=4)
    assert monitor.latest["fetch_gb_per_s"] > 0
    streams = Streams.on(torch.device("cuda", 0))
    told = []
    source = torch.ones(1 << 20, pin_memory=True)
    target = torch.empty(1 << 20, device="cuda")
    streams.synchronize()
    monkeypatch.setattr(torch.cuda.Event, "synchronize", never)
    monkeypatch.setattr(torch.cuda.Stream, "synchronize", never)

    @refusing_to_wait
    def work():
        streams.attach(told.append)
        torch.cuda._sleep(200_000_000)
        with streams.span("compute", "forward a"):
            target.mul_(2)
        with streams.span("fetch", "fetch a"):
            copy = streams.copy("fetch", target, source, after=[streams.record()])
        streams.compute_after(copy.done)
        streams.collect()
        return len(told)

    assert work() == 0  # the device still sleeps, and nobody waited for it
    streams.synchronize()
    streams.collect()
    assert sorted(span.lane for span in told) == ["compute", "fetch", "wait"]


def test_a_slow_link_is_a_stall_and_a_wait_of_the_host_behind_enough_work_is_none():
    def slow(lane):
        if lane == "fetch":
            torch.cuda._sleep(100_000_000)

    streams, told = CudaStreams(torch.device("cuda", 0), slow), []
    source, target = torch.ones(1024, pin_memory=True), torch.empty(1024, device="cuda")
    streams.copy("fetch", target, source)
    streams.synchronize()
    streams.attach(told.append)
    with streams.span("fetch", "fetch a"):
        streams.compute_after(streams.copy("fetch", target, source).done)
    with streams.span("wait", "update a"):  # the device has the fetch to wait for, and that is counted already
        time.sleep(0.005)
    streams.synchronize()
    with streams.span("wait", "update b"):  # and now it has nothing
        time.sleep(0.02)
    streams.collect()
    waits = {span.label: span for span in told if span.lane == "wait"}
    [fetch] = [span for span in told if span.lane == "fetch"]
    assert waits["fetch a"].seconds == pytest.approx(fetch.seconds, rel=0.05)
    assert waits["update b"].seconds >= 0.019
    assert "update a" not in waits or waits["update a"].start >= waits["fetch a"].end - TOLERANCE


def test_a_timeline_of_a_gpu_has_every_lane_and_a_chart(tmp_path):
    timeline = Timeline([3, 4], tmp_path)
    train([timeline], steps=7)
    trace, chart = timeline.files
    rows = Counter(e["tid"] for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X")
    assert set(rows) >= {0, 1, 2, 3, 4}  # steps, fetch, compute, push, update
    assert rows[2] == 2 * 3 * UNITS  # forward, recompute and backward
    assert chart.read_bytes().startswith(b"\x89PNG")
