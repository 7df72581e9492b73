"""A bar on the terminal for work that moves many bytes while nothing else is to be seen."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

LARGE = 4 * 2**30
"""Bytes of work from which its bar is drawn at once."""

SLOW = 2.0
"""Seconds after which the bar of smaller work is drawn too."""

_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
"""Variables of launchers in which processes find their number, in the order in which Lightning looks."""

_under_way = False
"""Whether the main thread is inside :func:`working`."""


@contextlib.contextmanager
def working(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Inside, a bar shows how far a piece of work is: bytes of all bytes, bytes per second, and the time left.

    It is drawn on stderr if the work is large (:data:`LARGE`) or slow (:data:`SLOW`), where somebody can see it: a
    terminal by rich's account, which hears ``TTY_COMPATIBLE``, ``TTY_INTERACTIVE`` and ``FORCE_COLOR``, or a notebook
    with ipywidgets; in the process of rank 0. It is wiped when the work is over, also by an error. Work inside other
    work, and that of other threads than the main one, which is beside something, shows nothing.

    Args:
        what: what is being done, a few words.
        total_bytes: all that there is to do.

    Yields:
        What to call with the bytes done since the last call, from any thread: once per tensor or group, not per page.
    """
    global _under_way
    if _under_way or total_bytes <= 0 or threading.current_thread() is not threading.main_thread():
        yield _ignore
        return
    _under_way = True
    bar = _Bar(what, total_bytes)
    try:
        bar.advance(0)
        yield bar.advance
    finally:
        _under_way = False
        bar.close()


def _ignore(nbytes: int) -> None:
    """For work that shows nothing."""


class _Bar:
    """One piece of work: counted from its beginning, drawn when there is reason to.

    Args:
        what: what is being done.
        total: bytes to do.
    """

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done = what, total, 0
        self._began = time.monotonic()
        self._settled = False  # whether to draw has been decided
        self._drawn: tuple[Progress, TaskID] | None = None
        self._lock = threading.Lock()

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes
            if not self._settled and (self.total >= LARGE or time.monotonic() - self._began >= SLOW):
                self._settled = True
                self._drawn = self._draw()
            if self._drawn is not None:
                progress, task = self._drawn
                progress.update(task, completed=self.done)

    def close(self) -> None:
        with self._lock:
            self._settled = True
            drawn, self._drawn = self._drawn, None
        if drawn is not None:
            drawn[0].stop()

    def _draw(self) -> tuple[Progress, TaskID] | None:
        console = _console()
        if console is None:
            return None
        from rich.control import Control
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
        from rich.segment import ControlType

        # Training's own bar may have left the cursor behind its last line; it draws that again when it goes on.
        console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
        columns = (
            "{task.description}",
            BarColumn(None),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        progress = Progress(*columns, "left", console=console, transient=True, refresh_per_second=4)
        task = progress.add_task(self.what, total=self.total, completed=self.done)
        progress.start()
        return progress, task


def _console() -> Console | None:
    """Where a bar would be seen; None if nowhere."""
    rank = next((os.environ[name] for name in _RANKS if name in os.environ), "0")
    if rank != "0" or multiprocessing.parent_process() is not None:
        return None
    # Imported only for work that is large or slow: a command that only answers should not wait for it.
    import rich
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_jupyter:
        return console if importlib.util.find_spec("ipywidgets") is not None else None
    shared = rich.get_console()
    if getattr(shared, "_live_stack", None) or getattr(shared, "_live", None):  # as of Lightning's RichProgressBar
        return None  # two displays on one terminal write over each other
    return console if console.is_terminal and console.is_interactive else None
