"""Rates, stalls and peaks while a model trains, for any logger, without waiting for the device."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch

from lightning_megatrain.callbacks.measure import CAUSES, Tally, peak_device_bytes, peak_host_rss, streams_of
from lightning_megatrain.callbacks.throughput import Throughput
from lightning_megatrain.stream.spans import Span
from lightning_megatrain.stream.streams import Streams


class Monitor(Throughput):
    """:class:`Throughput`, and every few batches what the machine did in them.

    To the trainer's loggers go, over the batches since the last time and with validation left out:

    - ``perf/tokens_per_s``: real tokens, of batches that :func:`count_tokens` can count; ``perf/model_tflops`` and
      ``perf/mfu`` where FLOPs and peak are known too.
    - ``perf/fetch_gb_per_s``, ``perf/push_gb_per_s``, ``perf/update_gparams_per_s``: each while that lane worked.
    - ``perf/stall_s/CAUSE``: seconds per batch without work of the computing device, by what it waited for; see
      :data:`CAUSES`. ``perf/waited`` is their share of the time.
    - ``perf/peak_host_bytes`` (resident), of the process so far, and ``perf/peak_device_bytes`` (allocated),
      of the run.

    Lanes and stalls are known with the megatrain strategy only. Times come from events that have passed: nothing waits
    for the device.

    Args:
        warmup_steps: first batches left out of all rates (allocation, compilation, first touch of memory).
        window: batches over which ``tokens_per_s`` is taken.
        every_n_steps: batches between two looks.
        flops_per_token: arithmetic of forward and backward per real token, without recompute. None asks the module for
            its ``flops_per_token``; without either, nothing is said about FLOPs.
        peak_tflops: what the device could do, in TFLOP/s; None leaves the MFU out.

    Attributes:
        latest: what was logged last, by name without ``perf/``.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        warmup_steps: int = 3,
        window: int = 20,
        *,
        every_n_steps: int = 10,
        flops_per_token: float | None = None,
        peak_tflops: float | None = None,
    ) -> None:
        super().__init__(warmup_steps, window)
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps} is not a number of batches; set 1 or more.")
        if peak_tflops is not None and peak_tflops <= 0:
            raise ValueError(f"peak_tflops={peak_tflops} is no rate; set the device's peak in TFLOP/s, or None.")
        self.every_n_steps = every_n_steps
        self.flops_per_token = flops_per_token
        self.peak_tflops = peak_tflops
        self.latest: dict[str, float] = {}
        self._streams: Streams | None = None
        self._tally = Tally()
        self._since: tuple[float, int, int] | None = None  # training clock, tokens seen and batches at the last look

    @property
    def state_key(self) -> str:
        """A checkpoint of a run with :class:`Throughput` goes on here, and the other way round."""
        return Throughput.__qualname__

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start anew for this fit."""
        super().on_train_start(trainer, pl_module)
        self._since = None
        self._streams = streams_of(trainer)
        self._listen()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Look away: validation is not training."""
        self._look_away()
        super().on_validation_start(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Look again."""
        super().on_validation_end(trainer, pl_module)
        self._listen()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Listen no more."""
        self._look_away()
        self._streams = None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Listen no more."""
        self._streams = None

    def _listen(self) -> None:
        if self._streams is not None:
            self._streams.attach(self._add, ("fetch", "push", "update", "wait"))

    def _look_away(self) -> None:
        if self._streams is not None:
            self._streams.collect()
            self._streams.detach(self._add)

    def _add(self, span: Span) -> None:
        self._tally.add(span)

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: torch.Tensor) -> None:
        """See what is done, while the device has a forward to work on: between two batches it would wait for that."""
        if self._streams is not None:
            self._streams.collect()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch, and look if it is time."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._streams is not None:
            self._streams.set_clock()
        now = (self._clock(), self.tokens_seen, self._batches)
        if self._batches < self.warmup_steps or (self._since and now[2] - self._since[2] < self.every_n_steps):
            return
        if self._streams is not None:
            self._streams.collect()
        if self._since is None:
            self._tally, self._since = Tally(), now
        else:
            seconds, tokens, batches = (b - a for a, b in zip(self._since, now, strict=True))
            self.latest = self._measure(trainer, pl_module, max(seconds, 1e-9), int(tokens), int(batches))
            self._tally, self._since = Tally(), now
            self._tell(trainer, pl_module)

    def _measure(
        self, trainer: L.Trainer, pl_module: L.LightningModule, seconds: float, tokens: int, batches: int
    ) -> dict[str, float]:
        found: dict[str, float] = {}
        if tokens:
            found["tokens_per_s"] = tokens / seconds
            flops = self.flops_per_token or getattr(pl_module, "flops_per_token", None)
            if flops is not None:
                found["model_tflops"] = flops * tokens / seconds / 1e12
                if self.peak_tflops is not None:
                    found["mfu"] = found["model_tflops"] / self.peak_tflops
        if self._streams is not None:
            found |= self._tally.rates()
            found |= {f"stall_s/{cause}": self._tally.waits[cause] / batches for cause in CAUSES}
            found["waited"] = sum(self._tally.waits.values()) / seconds
        peaks = {
            "peak_device_bytes": peak_device_bytes(trainer.strategy.root_device),
            "peak_host_bytes": peak_host_rss(),
        }
        return found | {name: float(value) for name, value in peaks.items() if value is not None}

    def _tell(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        step = max(0, trainer.global_step - 1)  # as Lightning numbers what this batch logged
        for logger in trainer.loggers:
            logger.log_metrics({f"perf/{name}": value for name, value in self.latest.items()}, step=step)
        for name in ("model_tflops", "waited"):
            if name in self.latest:
                pl_module.log(name, torch.tensor(self.latest[name]), prog_bar=True, logger=False)
