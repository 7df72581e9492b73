"""Files and folders that are there whole or not at all, on the local file system."""

import contextlib
import ctypes
import errno
import functools
import hashlib
import itertools
import os
import platform
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_megatrain.memory.progress import working

_SUFFIX = ".partial"
_counter = itertools.count()


def is_local(path: str | os.PathLike[str]) -> bool:
    """Whether a path is one of the local file system and not a URL."""
    return "://" not in str(path)


def require_replaceable(target: Path, names: Sequence[str], *, hint: str) -> None:
    """Refuse to replace a folder with files of somebody else in it: a folder is replaced with all it holds.

    Args:
        target: what is to be replaced; anything but a folder may be.
        names: names of files that the folder may hold, as patterns.
        hint: what to set instead, as the end of a sentence.

    Raises:
        ValueError: names the first of the others.
    """
    if not target.is_dir():
        return
    others = sorted(entry.name for entry in target.iterdir() if not any(re.fullmatch(e, entry.name) for e in names))
    if others:
        raise ValueError(
            f"{target} is a folder that would be replaced and holds {others[0]!r}, which would be lost; move that, or "
            f"set {hint}."
        )


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Write a file or folder beside ``path``, then make it durable and put it in place in one step.

    Whatever is at ``path`` stays until the new content is complete on disk. The name in between begins with a dot and
    ends in ``.partial``, which nothing takes for a checkpoint; after an error it is removed.

    Yields:
        Where to write: a path that does not exist yet, in an existing folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent)
    recover(path)
    partial = _partial_of(path)
    try:
        yield partial
        _sync_tree(partial)
        _put_in_place(partial, path)
        _sync(path.parent)
    finally:
        _delete(partial)


def remove_whole(path: Path) -> None:
    """Remove a file or folder so that a half-removed one is never found under its name. Missing is fine."""
    gone = _partial_of(path)
    with contextlib.suppress(FileNotFoundError):
        path.rename(gone)
        _sync(path.parent)
        _delete(gone)


def remove_leftovers(folder: Path) -> None:
    """Remove what processes of this machine that are gone left half-written in ``folder``, if that may be written."""
    for entry in folder.glob(f".*{_SUFFIX}"):
        with contextlib.suppress(ValueError, OSError):
            host, pid, token, _count = entry.name[1:].removesuffix(_SUFFIX).split("~")
            own = os.getpid()
            gone = token != _token(own) if int(pid) == own else not _alive(int(pid))
            if host == _host() and gone:
                _delete(entry)


def _partial_of(path: Path) -> Path:
    pid = os.getpid()
    # Not made of the path's own name: that may be as long as names can be, and programs look for names with a part.
    return path.parent / f".{_host()}~{pid}~{_token(pid)}~{next(_counter)}{_SUFFIX}"


def _host() -> str:
    """This machine and, for containers that share its name, the namespace in which process ids count."""
    with contextlib.suppress(OSError):
        return f"{platform.node()}-{''.join(c for c in os.readlink('/proc/self/ns/pid') if c.isdigit())}"
    return platform.node()


def recover(path: Path) -> None:
    """Finish, or take back, a replacement of ``path`` during which its process was killed."""
    old = _replaced(path)
    if os.path.lexists(old):
        if os.path.lexists(path):
            _delete(old)
        else:
            old.rename(path)


def _replaced(path: Path) -> Path:
    """Where the old content waits for the new: a name found again after a kill, which nobody else gives a file."""
    return path.parent / f".megatrain~{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:32]}.replaced"


@functools.cache
def _token(pid: int) -> str:
    """Tells this process from an earlier one of the same id, as in a container that was started again."""
    return os.urandom(4).hex()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        pass
    return True


def _put_in_place(new: Path, path: Path) -> None:
    """Rename ``new`` to ``path``; what was there is under the name ``new`` afterwards, or gone."""
    old_is_folder = path.is_dir() and not path.is_symlink()
    if not old_is_folder and not new.is_dir():
        os.replace(new, path)
    elif not os.path.lexists(path):
        new.rename(path)
    elif not _exchange(new, path):
        # No call swaps them on this file system: for a moment there is nothing at `path`, which `recover` puts right.
        path.rename(_replaced(path))
        new.rename(path)
        _delete(_replaced(path))


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step; False where the system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(b))


def _sync_tree(path: Path) -> None:
    paths = [path, *path.rglob("*")]
    sizes = {entry: entry.stat().st_size for entry in paths if entry.is_file()}
    with working("Waiting for the disk", sum(sizes.values())) as advance:
        for entry in reversed(paths):  # a folder after what is in it
            _sync(entry)
            advance(sizes.get(entry, 0))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):  # file systems that sync no folders
            raise
    finally:
        os.close(descriptor)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def first_line(error: BaseException) -> str:
    """What an error says first, without a full stop, to stand within another sentence; its type if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
