"""Tensors whose memory is a mapped file: they are read once, part by part, and their pages are given back."""

import contextlib
import ctypes
import mmap
import re

from torch import Tensor

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ [1-9]\d* +(/.*)|([0-9a-f]+)-([0-9a-f]+) ")
_CHANGED = re.compile(r"(Anonymous|Swap): +[1-9]")


class FileMappings:
    """Where in this process's memory files are mapped now, by the kernel's own account.

    Mappings of which somebody changed a page are left out: giving such a page back would lose the change.
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        with contextlib.suppress(OSError), open("/proc/self/smaps") as maps:  # elsewhere pages are kept
            last_is_a_files = False
            for line in maps:
                if (head := _MAPPING.match(line)) is not None:
                    last_is_a_files = bool(head[3])
                    if last_is_a_files:
                        self._ranges.append((int(head[1], 16), int(head[2], 16)))
                elif last_is_a_files and _CHANGED.match(line):  # in memory, or in the swap
                    self._ranges.pop()
                    last_is_a_files = False

    def hold(self, tensor: Tensor) -> bool:
        """Whether a contiguous tensor lies in a mapped file as a whole, unchanged since it was mapped.

        Ask about tensors that were there when this object was made: addresses are used again.
        """
        start = tensor.data_ptr()
        end = start + tensor.numel() * tensor.element_size()
        return tensor.is_contiguous() and any(low <= start and end <= high for low, high in self._ranges)


def give_pages_back(part: Tensor) -> None:
    """Let go of the pages of a part of a mapped file, contiguous. Whoever reads them again gets them from the file.

    Only for what :meth:`FileMappings.hold` knows to be one: anything else would lose its values.
    """
    page = mmap.PAGESIZE
    start, end = part.data_ptr(), part.data_ptr() + part.numel() * part.element_size()
    first, last = -(-start // page) * page, end // page * page  # pages that hold nothing else
    if last > first:
        _MADVISE(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


_MADVISE = ctypes.CDLL(None).madvise
