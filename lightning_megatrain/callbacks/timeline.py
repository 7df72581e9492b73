"""A picture and a trace of what each lane did in chosen steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_megatrain.callbacks.gantt import draw, require_matplotlib
from lightning_megatrain.callbacks.measure import streams_of
from lightning_megatrain.callbacks.recording import Recording
from lightning_megatrain.stream.spans import Span
from lightning_megatrain.stream.streams import Streams


class Timeline(L.Callback):
    """Records chosen steps of the megatrain strategy.

    Each stretch of chosen steps that follow each other leaves ``step_5.trace.json`` (or ``steps_5-7.trace.json``), for
    https://ui.perfetto.dev or chrome://tracing, and ``step_5.png``, a chart with a row for each lane: weights fetched
    to the device, computation, gradients pushed to the host, updates on the host, and the stalls in which the device
    had nothing to do. On the CPU all of it happens one after the other, and so it is drawn.

    A step ends where the next one's first batch begins, unless a validation, the end of an epoch or a checkpoint with
    optimizer states comes between: that counts for no step, and a chart leaves it out.

    Nothing waits for the device while a step runs. Files are written one batch after the last of a stretch.

    Args:
        steps: numbers of optimizer steps, the first of a training being 0; with accumulated gradients a step has
            several batches.
        folder: where files go; made if it is not there.
        png: draw charts; needs matplotlib, which comes with ``pip install 'lightning-megatrain[notebooks]'``.

    Attributes:
        files: what was written so far.

    Raises:
        ValueError: there are no steps, or negative ones.
        ModuleNotFoundError: charts are wanted and matplotlib is not installed.
    """

    def __init__(self, steps: Sequence[int] = (5, 6), folder: str | Path = "timeline", *, png: bool = True) -> None:
        if not steps or min(steps) < 0:
            raise ValueError(f"steps={list(steps)} must be one or more numbers of steps, the first of which is 0.")
        if png:
            require_matplotlib()
        self.steps = frozenset(steps)
        self.folder = Path(folder)
        self.png = png
        self.files: list[Path] = []
        self._streams: Streams | None = None
        self._listening = False
        self._spans: list[Span] = []
        self._recording: Recording | None = None
        self._done: set[int] = set()
        self._batch_ended = 0.0  # the last one; 0 while one runs
        self._left = 0.0  # when something else began after the last batch; 0 if nothing did

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find what tells the spans.

        Raises:
            MisconfigurationException: the strategy is another one.
        """
        self._streams = streams_of(trainer)
        if self._streams is None:
            raise MisconfigurationException(
                f"Timeline shows the lanes of the megatrain strategy, and this is {type(trainer.strategy).__name__}; "
                "set Trainer(strategy='megatrain'), or leave the callback out."
            )
        self._recording, self._listening, self._done = None, False, set()
        self._spans.clear()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin or end a recording, if this step is the first, or the first after the last, of a stretch."""
        step, now = trainer.global_step, time.perf_counter()
        left, self._left, self._batch_ended = self._left, 0.0, 0.0
        # From one step earlier: an update that is under way when a step begins is part of its picture.
        self._listen(self._recording is not None or not self.steps.isdisjoint((step, step + 1)))
        if step in self.steps:
            if self._recording is None:
                self._recording = Recording(inline=trainer.strategy.root_device.type == "cpu")
            elif left:
                self._recording.pauses.append((left, now))
            if step not in self._done:
                self._recording.steps.append((step, now))
            self._done.add(step)
        elif self._recording is not None:
            self._recording.end = left or now

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take what is done, and write what is complete."""
        self._batch_ended = time.perf_counter()
        if self._streams is None or not self._listening:
            return
        self._streams.collect()
        self._streams.set_clock()
        if self._recording is not None and self._recording.end:
            self._write(self._recording)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """What comes now is no part of a step."""
        self._leave()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """What comes now is no part of a step."""
        self._leave()

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """What comes now is no part of a step."""
        self._leave()

    def _leave(self) -> None:
        self._left = self._left or self._batch_ended or time.perf_counter()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write what the last step completes."""
        if self._streams is not None and self._recording is not None:
            self._leave()
            self._recording.end = self._recording.end or self._left
            self._streams.synchronize()  # no step is under way any more
            self._streams.collect()
            self._write(self._recording)
        self._listen(False)
        if missed := sorted(self.steps - self._done):
            rank_zero_warn(
                f"Timeline was asked for steps {missed}, and training ended after step {trainer.global_step - 1}; "
                "set Timeline(steps=...) to steps that are reached."
            )

    def _listen(self, listen: bool) -> None:
        if self._streams is None or listen == self._listening:
            return
        self._listening = listen
        if listen:
            self._streams.attach(self._spans.append)
        else:
            self._streams.detach(self._spans.append)

    def _write(self, recording: Recording) -> None:
        recording.take(self._spans)
        self._recording = None
        self._spans.clear()
        self.folder.mkdir(parents=True, exist_ok=True)
        trace = self.folder / f"{recording.name}.trace.json"
        recording.write_trace(trace)
        written = [trace]
        if self.png:
            written.append(trace.with_name(f"{recording.name}.png"))
            draw(recording, written[-1])
        self.files += written
        rank_zero_info(f"megatrain: wrote {' and '.join(map(str, written))} ({recording.describe()})")
