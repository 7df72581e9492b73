"""How much host memory this process may still take."""

import ctypes
import re
from pathlib import Path

import psutil

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str | int | float, *, total: int | None = None, name: str | None = None) -> int:
    """Bytes meant by ``"20GiB"``, ``"64 GB"``, a plain number of bytes, or a fraction of ``total`` in (0, 1].

    Args:
        text: the size.
        total: what a fraction is one of; None where none is meant.
        name: of the setting, for errors.

    Raises:
        ValueError: the text is no size, or a fraction is given where no total is known.
    """
    given = repr(text) if name is None else f"{name}={text!r}"
    if isinstance(text, float) and 0 < text <= 1:
        if total is None:
            raise ValueError(f"{given} is a fraction of memory, and no total is known; set a size such as '64GiB'.")
        return int(text * total)
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]i?|)b?\s*", str(text).lower())
    if match is None:
        fraction = "" if total is None else ", or a fraction such as 0.8"
        raise ValueError(f"{given} is not a size; write bytes, or a size such as '64GiB'{fraction}.")
    return int(float(match[1]) * _UNITS[match[2]])


def format_bytes(count: int | float, *, digits: int = 1) -> str:
    """``count`` bytes for people: ``'12.3 GiB'``, with so many digits behind the point and one more for TiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.{digits}f} {unit}"
        count /= 1024
    return f"{count:.{digits + 1}f} TiB"


def format_apart(a: int, b: int) -> tuple[str, str]:
    """Two counts of bytes for people, with as many digits as it takes to see which one is larger."""
    for digits in range(1, 12):
        texts = format_bytes(a, digits=digits), format_bytes(b, digits=digits)
        if a == b or texts[0] != texts[1]:
            return texts
    return f"{a} bytes", f"{b} bytes"


def available_host_bytes() -> int:
    """Bytes this process can still allocate without swapping, within its cgroup's limit.

    The kernel's estimate (``MemAvailable`` of ``/proc/meminfo``) counts page cache that can be dropped; a container's
    limit is read from cgroup v2 or v1, where reclaimable page cache does not count as used.
    """
    candidates = [_mem_available(Path("/proc/meminfo"))]
    candidates += [_cgroup_left(Path("/sys/fs/cgroup"), "memory.max", "memory.current")]
    candidates += [_cgroup_left(Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes")]
    known = [c for c in candidates if c is not None]
    if not known:
        return int(psutil.virtual_memory().available)  # systems without /proc
    return min(known)


def give_back_freed_memory() -> None:
    """Make the C library return freed memory to the system: it keeps tensors of less than 32 MiB for itself."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _mem_available(meminfo: Path) -> int | None:
    if not meminfo.exists():
        return None
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _cgroup_left(folder: Path, limit_file: str, usage_file: str) -> int | None:
    try:
        limit = (folder / limit_file).read_text().strip()
        usage = int((folder / usage_file).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    return max(0, int(limit) - usage + int(stat.get("inactive_file", 0)))
