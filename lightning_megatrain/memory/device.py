"""How much memory of the device a run may take, and what its allocator says."""

import os
import platform
from abc import ABC, abstractmethod

import torch

from lightning_megatrain.memory.host import format_bytes, parse_bytes

SPENDABLE = 0.92
"""Part of the limit that is spent on purpose: the rest is for what lies between the allocator's blocks."""


class DeviceMemory(ABC):
    """Bytes of the device that computes. Asking never waits for it.

    Attributes:
        limit: bytes that may be allocated.
    """

    limit: int

    @abstractmethod
    def allocated(self) -> int:
        """Bytes in tensors now."""

    @abstractmethod
    def peak(self) -> int:
        """The most bytes in tensors at any time since the last reset by whoever reads such numbers."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Let :meth:`peak` count from now on."""

    def close(self) -> None:
        """Take back what was set for this run."""
        return


_highest: dict[torch.device, int] = {}
"""By device, the highest peak of this run before torch's last began to count."""


def highest_allocated(device: torch.device) -> int:
    """The most bytes in tensors of a CUDA device in this run, however often its peak was reset; does not wait."""
    return max(_highest.get(device, 0), torch.cuda.max_memory_allocated(device))


_EXPANDABLE = "expandable_segments"

_TRIED = 32 * 2**20
"""Bytes that torch does not take out of a segment that small tensors share."""


def expand_segments() -> str | None:
    """Have torch's CUDA allocator map memory page by page from now on, so that no free byte is out of reach.

    Graphs that are kept lie between what comes and goes. In segments of fixed size they would keep what is free around
    them from being used for anything larger, or given back: gigabytes, near a limit. Other settings stay.

    Nothing is changed where ``PYTORCH_ALLOC_CONF`` or ``PYTORCH_CUDA_ALLOC_CONF`` speaks of ``expandable_segments``,
    where they are in use already, and where torch cannot be told at run time or the system cannot map so: anything but
    Linux, and WSL, whose driver fails at it (pytorch/pytorch#192330).

    Returns:
        The settings to go back to, for :func:`set_allocator`; None if nothing was changed.
    """
    environment = [os.environ[name] for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF") if name in os.environ]
    able = platform.system() == "Linux" and "microsoft" not in platform.release().lower()
    if not able or not hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        return None
    # Before torch 2.13 only the environment tells what is set. Of two variables the first counts.
    get = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    now: str = get() if get is not None else environment[0] if environment else ""
    if any(_EXPANDABLE in setting for setting in environment) or f"{_EXPANDABLE}:True" in now:
        return None
    # What is not said again may be forgotten, and this one only goes when that is said.
    others = [option for option in now.split(",") if option and _EXPANDABLE not in option]
    set_allocator(",".join([*others, f"{_EXPANDABLE}:True"]))
    return ",".join([*others, f"{_EXPANDABLE}:False"])


def set_allocator(settings: str) -> None:
    """Give torch's allocators these settings, in the form of ``PYTORCH_ALLOC_CONF``."""
    torch._C._accelerator_setAllocatorSettings(settings)


class CudaMemory(DeviceMemory):
    """Memory of one CUDA device.

    A limit of the user's is one of torch's allocator, so that what it keeps in reserve counts as well: at the limit it
    gives its reserve back, and only then is a request refused. With a limit, :func:`expand_segments` is called as well.

    Args:
        device: the device.
        wanted: ``"auto"`` for what is free, or a size such as ``"24GiB"``, a number of bytes, or a fraction of the
            device's memory.

    Raises:
        ValueError: ``wanted`` is no size.
        RuntimeError: it is more than the device has.
    """

    def __init__(self, device: torch.device, wanted: str | int | float = "auto") -> None:
        self._device = device
        free, total = torch.cuda.mem_get_info(device)
        self._capped = wanted != "auto"
        # What this process has reserved already is free for it.
        self.limit = free + torch.cuda.memory_reserved(device) if wanted == "auto" else parse_bytes(wanted, total=total)
        if self.limit > total:
            raise RuntimeError(
                f"device_memory={wanted!r} is {format_bytes(self.limit)}, but the device has {format_bytes(total)}; "
                "set device_memory='auto' or a smaller size."
            )
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # not in every release
        self._fraction = 1.0 if fraction is None else fraction(device)
        self._allocator = expand_segments() if self._capped else None
        self._try_segments()
        if not self._capped:
            self.limit = min(self.limit, int(self._fraction * total))
        else:
            torch.cuda.set_per_process_memory_fraction(self.limit / total, device)
        # What ran before in this process is not this run's.
        self.reset_peak()
        _highest[device] = 0

    def _try_segments(self) -> None:
        """Go back if this device cannot map memory, as some virtual ones."""
        if self._allocator is None:
            return
        torch.cuda.empty_cache()  # so that memory has to be mapped
        try:
            torch.empty(_TRIED, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            return
        except RuntimeError:
            set_allocator(self._allocator)
            self._allocator = None

    def allocated(self) -> int:  # noqa: D102
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:  # noqa: D102
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:  # noqa: D102
        _highest[self._device] = highest_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def close(self) -> None:  # noqa: D102
        if self._allocator is not None:
            set_allocator(self._allocator)
        if self._capped:
            torch.cuda.set_per_process_memory_fraction(self._fraction, self._device)


def device_memory(device: torch.device, wanted: str | int | float = "auto") -> DeviceMemory | None:
    """The memory of a device that has its own, with the user's limit; None for the CPU.

    Raises:
        ValueError: ``wanted`` is no size.
        RuntimeError: it is more than the device has.
    """
    return CudaMemory(device, wanted) if device.type == "cuda" else None
