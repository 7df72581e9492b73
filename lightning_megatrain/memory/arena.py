"""Exact-size host memory that the GPU can copy to and from directly."""

import mmap
import warnings
import weakref

import torch
from torch import Tensor

_PIECE = 64 * 2**30
"""Largest registration in bytes: drivers refuse single registrations of 512 GiB and more (LMCache#5177)."""


class Arena:
    """One anonymous, page-aligned host mapping of exactly the bytes asked for.

    A group has an arena of its own for each kind of byte it keeps. So a registration never spans two groups (one copy
    across two registered ranges fails), and memory is given back group by group.

    The mapping is private to this process and not inherited by forked workers: a data loader's fork would otherwise
    make the kernel copy every page that the next update writes.

    Args:
        nbytes: size in bytes; zero is allowed and maps nothing.
        pin: register the mapping with CUDA, so that copies are asynchronous and run at the link's full rate. Refused
            registrations are reported once and leave the arena pageable.
    """

    def __init__(self, nbytes: int, *, pin: bool = False) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if nbytes else None
        if self._map is not None:
            for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
                _advise(self._map, advice)
        self.pinned = False
        self._finalizers: list[weakref.finalize] = []
        if nbytes:
            # Registration touches every page from one thread; touching first, in parallel, is several times faster.
            self.view(torch.uint8, nbytes).zero_()
            if pin:
                self.pinned = self._register()

    def view(self, dtype: torch.dtype, numel: int, offset: int = 0) -> Tensor:
        """A tensor of ``numel`` elements over the bytes from ``offset``, with a storage of exactly that size.

        The tensor keeps the mapping alive after the arena itself is gone.
        """
        if self._map is None or numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset)

    def close(self) -> None:
        """Unregister from CUDA. The memory itself lives on, as ordinary memory, until its last tensor is gone."""
        for finalizer in self._finalizers:
            finalizer()
        self.pinned = False
        if self._map is not None:
            _advise(self._map, "MADV_DOFORK")
            self._map = None

    def _register(self) -> bool:
        assert self._map is not None
        cudart = torch.cuda.cudart()
        base = self.view(torch.uint8, self.nbytes).data_ptr()
        for start in range(0, self.nbytes, _PIECE):
            error = cudart.cudaHostRegister(base + start, min(_PIECE, self.nbytes - start), 0)
            if int(error) != 0:
                for finalizer in self._finalizers:
                    finalizer()
                _warn_unpinned(int(error))
                return False
            # The finalizer holds the mapping: it must not go before CUDA has let go of it.
            self._finalizers.append(weakref.finalize(self, _unregister, base + start, self._map))
        return True


def _advise(mapping: mmap.mmap, name: str) -> None:
    advice = getattr(mmap, name, None)
    if advice is None:
        return
    try:
        mapping.madvise(advice)
    except OSError:  # a hint, or a kernel built without it
        return


def _unregister(address: int, mapping: mmap.mmap) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


_unpinned_warned = False


def _warn_unpinned(code: int) -> None:
    global _unpinned_warned
    if _unpinned_warned:
        return
    _unpinned_warned = True
    warnings.warn(
        f"CUDA refused to pin host memory (error {code}), so copies run at a fraction of the link's speed; "
        "raise `ulimit -l` or the container's memory lock limit, or set MegaTrainStrategy(pin_memory=False) to accept.",
        RuntimeWarning,
        stacklevel=3,
    )
