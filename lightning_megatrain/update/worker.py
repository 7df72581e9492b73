"""One thread that does the host's share of a step, in the order it was handed over."""

import queue
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

Spans = Callable[..., AbstractContextManager[object]]
"""Called with a lane, a label and a number of bytes: what happens in the context it returns is a span of time."""


def no_spans(lane: str, label: str, nbytes: int = 0) -> AbstractContextManager[object]:
    """For when nobody wants to know."""
    return nullcontext()


class Worker:
    """Runs tasks one after another on a thread of its own.

    The first exception of a task stops all further ones: it is raised once, as it is, by the next call of
    :meth:`wait` or :meth:`check`, and :attr:`failed` stays set, for the state it left behind is torn.

    Args:
        inline: run each task at once on the thread that hands it over. Where the CPU computes as well there is nothing
            to hide behind, and a second thread would only compete for its cores.
    """

    def __init__(self, *, inline: bool = False) -> None:
        self._inline = inline
        self.span: Spans = no_spans
        """Where updates, and waits for them, are noted."""
        self.failed: BaseException | None = None
        self._raised = False
        self._tasks: queue.SimpleQueue[tuple[int, Callable[[], None]] | None] = queue.SimpleQueue()
        self._open: Counter[int] = Counter()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def submit(self, key: int, task: Callable[[], None]) -> None:
        """Hand over a task that concerns ``key``; starts the thread if there is none.

        Raises:
            RuntimeError: a task failed before and its exception has been raised already.
        """
        self.require()
        if self._inline:
            self._do(task)
            return
        with self._changed:
            self._open[key] += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="megatrain-update", daemon=True)
            self._thread.start()
        self._tasks.put((key, task))

    def wait(self, key: int | None = None) -> None:
        """Block until no task for ``key`` (None: no task at all) is left.

        Raises:
            BaseException: what a task raised, once.
        """
        if key is None:
            self.finish()
        elif not self.idle(key):
            with self.span("wait", "update"), self._changed:
                self._changed.wait_for(lambda: not self._open[key])
        self.check()

    def finish(self) -> None:
        """Block until no task is left, without raising."""
        with self._changed:
            if not self._open.total():
                return
        with self.span("wait", "worker"), self._changed:
            self._changed.wait_for(lambda: not self._open.total())

    def idle(self, key: int | None = None) -> bool:
        """Whether no task for ``key`` (None: no task at all) is left, without waiting."""
        with self._changed:
            return not (self._open.total() if key is None else self._open[key])

    def check(self) -> None:
        """Raise what a task raised, once."""
        if self.failed is not None and not self._raised:
            self._raised = True
            raise self.failed

    def require(self) -> None:
        """Raise what a task raised or, when that has been done, that its state is not to be built on."""
        self.check()
        if self.failed is not None:
            raise RuntimeError(
                "An update failed half-way before, so weights and optimizer state do not belong together; "
                "start again from the last checkpoint with Trainer.fit(ckpt_path=...)."
            ) from self.failed

    def forget(self) -> None:
        """The state that a failure left torn was replaced: go on."""
        self.failed, self._raised = None, False

    def close(self) -> None:
        """Finish what was handed over and end the thread. Never raises."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (item := self._tasks.get()) is not None:
            key, task = item
            self._do(task)
            del item, task  # what they hold must not live until the next one comes
            with self._changed:
                self._open[key] -= 1
                self._changed.notify_all()

    @torch.no_grad()
    def _do(self, task: Callable[[], None]) -> None:
        try:
            if self.failed is None:
                task()
        except BaseException as error:
            self.failed = error
