"""Training steps on random tokens, timed: through the strategy, and of the ceiling beside it."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_megatrain.callbacks.measure import Tally, peak_host_rss, streams_of
from lightning_megatrain.memory.host import available_host_bytes
from lightning_megatrain.recipes.causal_lm import CausalLM
from lightning_megatrain.recipes.ceiling import Ceiling, ceiling_bytes
from lightning_megatrain.recipes.random_weights import fill_weights
from lightning_megatrain.strategy import MegaTrainStrategy
from lightning_megatrain.stream.discovery import UnitSelector, find_units


class RandomTokens(Dataset[dict[str, Tensor]]):
    """Batches of random tokens without padding: several of each size, one size after the other.

    Args:
        rows: the sizes.
        each: batches of each size.
        seq_len: tokens of a row.
        vocabulary: tokens to choose from.
    """

    def __init__(self, rows: Sequence[int], each: int, *, seq_len: int, vocabulary: int) -> None:
        self.rows = rows
        self.each = each
        self.seq_len = seq_len
        self.vocabulary = vocabulary

    def __len__(self) -> int:
        return len(self.rows) * self.each

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        shape = self.rows[index // self.each], self.seq_len
        return {"input_ids": torch.randint(0, self.vocabulary, shape, generator=generator)}


@dataclass
class Measured:
    """Steps with one batch size.

    Attributes:
        seconds: of each step, those that warm up included.
        losses: of each step, nats per token.
        allocated: most device bytes that tensors held at once; None on the CPU.
        reserved: most device bytes that the allocator held; None on the CPU.
        host_rss: most resident bytes of this process so far; None where the system does not tell.
        kept_graphs: units that were not recomputed in the last step; None for the ceiling.
        device_groups: units and other groups that were updated on the device in the last step; None for the ceiling.
        spans: of the last step that warms up: of ``"compute"`` units alone, of ``"update"`` what ended within the
            step. Empty for the ceiling.
    """

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    allocated: int | None = None
    reserved: int | None = None
    host_rss: int | None = None
    kept_graphs: int | None = None
    device_groups: int | None = None
    spans: Tally = field(default_factory=Tally)

    def add(self, seconds: float, loss: float, device: torch.device) -> None:
        """Note a step that has just ended on `device`."""
        self.seconds.append(seconds)
        self.losses.append(loss)
        self.host_rss = peak_host_rss()
        if device.type == "cuda":
            self.allocated = max(self.allocated or 0, torch.cuda.max_memory_allocated(device))
            self.reserved = max(self.reserved or 0, torch.cuda.max_memory_reserved(device))

    def step_s(self, warmup: int, steps: int) -> float:
        """Median seconds of `steps` steps after the first `warmup`."""
        return statistics.median(self.seconds[warmup : warmup + steps])


@dataclass(frozen=True)
class Shortage:
    """Why there is no measurement: the device is too small.

    Attributes:
        needed: bytes that are needed at least.
        available: bytes that are free.
    """

    needed: int
    available: int


class StepClock(L.Callback):
    """Seconds from the end of one step's Python to the end of the next one's, without waiting for the host's updates.

    A step that leaves an update behind is charged for it in the next one, which has to wait: over several equal steps
    the median is what a step costs.

    Args:
        data: what is trained on.
        microbatch: rows that go through a block at once, as the strategy was asked.
        warmup: steps of each size that are not measured; the last of them is looked at more closely.

    Attributes:
        measured: by index of the size.
        schedule: when the host's updates run.
    """

    reads_weights = False

    def __init__(self, data: RandomTokens, microbatch: int | str | None, warmup: int) -> None:
        self.measured = [Measured() for _ in data.rows]
        self.schedule: str | None = None
        self._data = data
        self._slices = _slices(data.rows, microbatch)
        self._last_warmup = warmup - 1
        self._last = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        strategy = trainer.strategy
        assert isinstance(strategy, MegaTrainStrategy)
        self.schedule = strategy.update_schedule
        self._last = time.perf_counter()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin a size anew."""
        size, step = divmod(batch_idx, self._data.each)
        if step == 0:
            _begin_size(size, self._slices, trainer.strategy.root_device)
        streams = streams_of(trainer)
        if step == self._last_warmup and streams is not None:
            streams.attach(self.measured[size].spans.add)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the step."""
        loss = float(outputs["loss"])  # waits for this step's forward and backward, not for its update
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        size, step = divmod(batch_idx, self._data.each)
        strategy = trainer.strategy
        assert isinstance(strategy, MegaTrainStrategy)
        measured = self.measured[size]
        measured.add(seconds, loss, strategy.root_device)
        measured.kept_graphs, measured.device_groups = strategy.kept_graphs, strategy.device_groups
        streams = streams_of(trainer)
        if step == self._last_warmup and streams is not None:
            streams.collect()
            streams.detach(measured.spans.add)
        _say(f"{self._data.rows[size]} rows, step {step + 1} of {self._data.each}: {seconds:.3f} s, loss {loss:.4f}")


def measure_ceiling(
    module: CausalLM,
    data: RandomTokens,
    *,
    units: UnitSelector,
    microbatch: int | None,
    compile: bool,
    device: torch.device,
    dtype: torch.dtype,
    steps: int,
) -> list[Measured | Shortage]:
    """Time the ceiling on the batches that the strategy has.

    Args:
        module: with parameters on the meta device. It takes all of the device's memory that is taken here: let go of
            it, and call :func:`give_back`.
        data: the batches.
        units: the blocks that are recomputed, as the strategy is asked to stream them.
        microbatch: rows at once; None takes all.
        compile: compile the blocks.
        device: where everything is.
        dtype: of weights and gradients.
        steps: of each size.

    Returns:
        One for each size.
    """
    needed, available = ceiling_bytes(module, dtype), _free_bytes(device)
    if needed > available:
        return [Shortage(needed, available) for _ in data.rows]
    fill_weights(module, device, dtype)
    results: list[Measured | Shortage] = []
    slices = _slices(data.rows, microbatch)
    with Ceiling(module, find_units(module, units), compile=compile) as ceiling:
        for size, rows in enumerate(data.rows):
            _begin_size(size, slices, device)
            measured = Measured()
            try:
                for step in range(steps):
                    batch = data[size * data.each + step]
                    began = time.perf_counter()
                    loss = ceiling.step(batch, microbatch)
                    measured.add(time.perf_counter() - began, loss, device)
                    _say(f"ceiling, {rows} rows, step {step + 1} of {steps}: {measured.seconds[-1]:.3f} s")
                results.append(measured)
            except torch.OutOfMemoryError:
                module.zero_grad(set_to_none=True)
                results.append(Shortage(max(needed, available), available))
            if isinstance(results[-1], Shortage):  # outside of `except`, which keeps what the failing step held
                give_back(device)
    torch.compiler.reset()  # its graphs are of no use to streamed blocks, and count towards torch's limit
    return results


def forget_host_peak() -> None:
    """Let the peak of resident memory begin anew, where the system can do that."""
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def give_back(device: torch.device) -> None:
    """Hand memory that nobody uses to whoever comes next."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _begin_size(size: int, slices: Sequence[set[int]], device: torch.device) -> None:
    """Count peaks anew, and compile anew where shapes change: torch would make a slower graph that takes any shape."""
    if size and slices[size] != slices[size - 1]:
        torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _slices(rows: Sequence[int], microbatch: int | str | None) -> list[set[int]]:
    """Rows that blocks meet at once, with each size; all, where the strategy chooses them."""
    most = microbatch if isinstance(microbatch, int) else max(rows)
    return [{min(size, most), size % most} - {0} if size >= most else {size} for size in rows]


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return available_host_bytes()
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def _say(text: str) -> None:
    """To standard error, so that a run that is cut short has said what it measured, and results stand alone."""
    print(text, file=sys.stderr, flush=True)
