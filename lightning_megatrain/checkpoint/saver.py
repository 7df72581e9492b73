"""Writing a checkpoint beside training: updates wait for the bytes that are still to be saved."""

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from lightning_megatrain.checkpoint.files import remove_whole


class Saver:
    """One checkpoint at a time is written on a thread of its own.

    Group by group, training is held back until the group's bytes were read (:meth:`wait_read`), so what is written is
    the state of the step at which the save began. An error of the thread is handed over once, by :meth:`join`.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._writing = False
        self._unread: Counter[int] = Counter()
        self._changed = threading.Condition()
        self._removals: list[Path] = []

    def hold(self, group: int) -> Callable[[], None]:
        """Hold ``group`` back, from now until the returned function is called. Once for each tensor of the group."""
        with self._changed:
            self._unread[group] += 1

        def let_go() -> None:
            with self._changed:
                self._unread[group] -= 1
                self._changed.notify_all()

        return let_go

    def start(self, write: Callable[[], None]) -> None:
        """Run ``write`` on the thread; the caller has waited for the one before."""
        assert self._thread is None
        self._writing = True
        self._thread = threading.Thread(target=self._run, args=(write,), name="megatrain-save")
        self._thread.start()

    def let_all_go(self) -> None:
        """Nothing will be read any more."""
        with self._changed:
            self._unread.clear()
            self._changed.notify_all()

    def wait_read(self, group: int | None = None) -> None:
        """Block until nothing of ``group`` (None: of any) is still to be read."""

        def unread() -> bool:
            return self._unread[group] > 0 if group is not None else any(n > 0 for n in self._unread.values())

        with self._changed:
            self._changed.wait_for(lambda: not unread())

    def join(self) -> BaseException | None:
        """Block until no checkpoint is being written.

        Returns:
            What the thread raised, once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        return error

    def wait(self) -> None:
        """Block until no checkpoint is being written.

        Raises:
            BaseException: what the thread raised, once.
        """
        error = self.join()
        if error is not None:
            raise error

    def remove(self, path: Path) -> None:
        """Remove an older checkpoint, but not before the newer one that replaces it is complete."""
        with self._changed:
            if self._writing:
                self._removals.append(path)
                return
            if self._error is not None:  # the newer one never came
                return
        remove_whole(path)

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error
        self.let_all_go()  # after an error nobody will read what is left
        with self._changed:
            self._writing = False
            removals, self._removals = self._removals, []
        try:
            for path in removals if self._error is None else ():
                remove_whole(path)
        except BaseException as error:
            self._error = error
