"""Tokens per second that count no padding and cost no device synchronisation."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor

NUM_TOKENS = "num_tokens"
"""Key under which a batch carries its number of real tokens as a Python integer."""


def count_tokens(batch: Any) -> int:
    """Count the tokens of a batch that are not padding, without ever waiting for a device.

    Args:
        batch: a mapping with `num_tokens` (an int, taken as it is), or else `attention_mask` on the CPU (its non-zero
            entries are counted), or else `input_ids` (all of them are). Anything else counts 0.

    Returns:
        Tokens. With a mask that has already left the host and no `num_tokens`, padding is counted, with a warning:
        reading the mask would stall the device.
    """
    if not isinstance(batch, Mapping):
        return 0
    if NUM_TOKENS in batch:
        return int(batch[NUM_TOKENS])
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor):
        if mask.device.type == "cpu" and mask.ndim == 2:
            return int(mask.count_nonzero())
        warnings.warn(
            f"The batch's attention mask is not a two-dimensional tensor on the host, so tokens/s counts padding too; "
            f"put the number of real tokens into the batch as batch['{NUM_TOKENS}'].",
            stacklevel=2,
        )
    tokens = batch.get("input_ids")
    return tokens.numel() if isinstance(tokens, Tensor) else 0


class Throughput(L.Callback):
    """Log `tokens_per_s` over the last batches and `tokens_seen` since the start of training.

    Rates are taken from the host's clock at batch ends, validation excluded. Launching work on a GPU returns early, so
    a single interval says little, but the host cannot run ahead without bound: over a window the rate is right.

    Args:
        warmup_steps: first batches left out of the mean rate (allocation, compilation, first touch of memory).
        window: batches over which the logged rate is taken.

    Attributes:
        mean_tokens_per_s: over the whole of the last fit without warm-up and validation; None before there is one.
        tokens_seen: real tokens trained on, kept in checkpoints.
    """

    def __init__(self, warmup_steps: int = 3, window: int = 20) -> None:
        if warmup_steps < 1 or window < 1:
            raise ValueError(f"warmup_steps={warmup_steps} and window={window} must be at least 1.")
        self.warmup_steps = warmup_steps
        self.window = window
        self.tokens_seen = 0
        self.mean_tokens_per_s: float | None = None
        self._reset()

    def _reset(self) -> None:
        self._batches = 0
        self._paused = 0.0  # seconds spent in validation so far
        self._pause_began = 0.0
        self._mean_since: tuple[float, int] | None = None  # training clock and tokens seen when warm-up ended
        self._recent: deque[tuple[float, int]] = deque(maxlen=self.window + 1)  # the same, after each batch

    def _clock(self) -> float:
        """Seconds of training: a clock that stands still during validation."""
        return time.perf_counter() - self._paused

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock anew for this fit."""
        self._reset()
        self.mean_tokens_per_s = None

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock."""
        self._pause_began = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let the clock run again."""
        self._paused += time.perf_counter() - self._pause_began

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch and log the rates."""
        now = self._clock()
        self._batches += 1
        self.tokens_seen += count_tokens(batch)
        self._recent.append((now, self.tokens_seen))
        if self._batches == self.warmup_steps:
            self._mean_since = (now, self.tokens_seen)
        elif self._mean_since is not None:
            self.mean_tokens_per_s = _rate(self._mean_since, self._recent[-1])
        # `self.log` would put a Python number on the device, and wait for it; a tensor stays where it is.
        pl_module.log("tokens_seen", torch.tensor(float(self.tokens_seen)))
        if len(self._recent) > 1:
            rate = _rate(self._recent[0], self._recent[-1])
            pl_module.log("tokens_per_s", torch.tensor(round(rate, 1)), prog_bar=True)

    def state_dict(self) -> dict[str, Any]:
        """Keep the token count in checkpoints."""
        return {"tokens_seen": self.tokens_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting from a checkpoint."""
        self.tokens_seen = state_dict["tokens_seen"]


def _rate(start: tuple[float, int], end: tuple[float, int]) -> float:
    return (end[1] - start[1]) / max(end[0] - start[0], 1e-9)
