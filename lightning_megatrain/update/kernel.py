"""Finding, checking and calling the compiled host optimizer (``csrc/adam.c``).

``pip install`` builds the library when a C compiler is there; ``build.py`` builds it in place. It is opened with
:mod:`ctypes`, which releases the GIL for the length of each call.

Environment: ``MEGATRAIN_ISA`` forces one instruction set (``baseline``, ``avx2``, ``avx512``) or, as ``reference``,
the torch code.
"""

import ctypes
import os
import sys
import threading
import warnings
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lightning_megatrain.update.reference import SUM_CHUNK, AdamCoefficients
from lightning_megatrain.update.threads import ThreadPlan, default_threads

ISAS = ("avx512", "avx2", "baseline")  # best first
ISA_VARIABLE = "MEGATRAIN_ISA"
BUILD_COMMAND = "python -m lightning_megatrain.update.build"
ABI_VERSION = 1  # as in adam.c

FOLDER = Path(__file__).parent  # where the library lies


class KernelUnavailableError(RuntimeError):
    """The compiled kernel cannot be used; the message says why."""


class Store(IntEnum):
    """How the parameter is kept; numbers as in adam.c."""

    SPLIT = 0
    BF16 = 1
    BF16_STOCHASTIC = 2
    FP32 = 3


class _Coefficients(ctypes.Structure):
    _fields_ = [
        ("grad_factor", ctypes.c_float),
        ("decay", ctypes.c_float),
        ("l2", ctypes.c_float),
        ("lerp_weight", ctypes.c_float),
        ("beta2", ctypes.c_float),
        ("grad_sq_weight", ctypes.c_float),
        ("bias2_sqrt", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("step_size", ctypes.c_float),
        ("coupled", ctypes.c_int32),
        ("lerp_from_grad", ctypes.c_int32),
    ]


class _AdamArgs(ctypes.Structure):
    _fields_ = [
        ("param", ctypes.c_void_p),
        ("low", ctypes.c_void_p),
        ("exp_avg", ctypes.c_void_p),
        ("exp_avg_sq", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("coefficients", _Coefficients),
        ("offset", ctypes.c_uint64),
        ("key0", ctypes.c_uint32),
        ("key1", ctypes.c_uint32),
    ]


@dataclass(frozen=True)
class Kernel:
    """The library, bound to one instruction set.

    Tensors are flat, contiguous, on the CPU and of equal length: the caller checks. Each call takes the threads to
    use; a :class:`ThreadPlan` may also say where, a bare count may not.
    """

    isa: str
    path: Path
    _library: ctypes.CDLL

    def adam(
        self,
        store: Store,
        param: Tensor,
        low: Tensor | None,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
        coefficients: AdamCoefficients,
        keys: tuple[int, int] = (0, 0),
        offset: int = 0,
        threads: ThreadPlan | int | None = None,
    ) -> None:
        """One step in place; the tensors are those of the function in ``adam.py`` that goes with ``store``."""
        args = _AdamArgs(
            param.data_ptr(),
            low.data_ptr() if low is not None else None,
            exp_avg.data_ptr(),
            exp_avg_sq.data_ptr(),
            grad.data_ptr(),
            _Coefficients(**vars(coefficients)),
            offset,
            *keys,
        )
        self._call(
            "mt_adam", store, _is16(exp_avg), _is16(grad), ctypes.byref(args), param.numel(), *_thread_args(threads)
        )

    def sum_of_squares(self, x: Tensor, threads: ThreadPlan | int | None = None) -> float:
        """Sum of squares of a bf16 or fp32 tensor, in double."""
        partial = torch.empty(-(-x.numel() // SUM_CHUNK), dtype=torch.float64)
        total = ctypes.c_double()
        self._call(
            "mt_sum_of_squares",
            _is16(x),
            x.data_ptr(),
            partial.data_ptr(),
            ctypes.byref(total),
            x.numel(),
            *_thread_args(threads),
        )
        return total.value

    def accumulate(self, dst: Tensor, src: Tensor, threads: ThreadPlan | int | None = None) -> None:
        """``dst += src``, each bf16 or fp32."""
        self._call(
            "mt_accumulate",
            _is16(dst),
            _is16(src),
            dst.data_ptr(),
            src.data_ptr(),
            dst.numel(),
            *_thread_args(threads),
        )

    def scale(self, x: Tensor, factor: float, threads: ThreadPlan | int | None = None) -> None:
        """``x *= factor`` on fp32: reads and writes 8 bytes per element, for measuring bandwidth."""
        self._library.mt_scale(x.data_ptr(), factor, x.numel(), *_thread_args(threads))

    def _call(self, function: str, *args: object) -> None:
        if getattr(self._library, function)(self.isa.encode(), *args) != 0:
            raise RuntimeError(f"{function} refused its arguments; rebuild {self.path} with `{BUILD_COMMAND}`.")


def get_kernel() -> Kernel | None:
    """The kernel of this process, or None when the torch reference has to do.

    The library is looked for and tested on the first call. If it cannot be used, that call warns
    (``RuntimeWarning``); later ones are silent, as is ``MEGATRAIN_ISA=reference``.

    Raises:
        ValueError: ``MEGATRAIN_ISA`` names something this machine or library does not have.
    """
    with _lock:
        return _first_kernel()


_lock = threading.Lock()


@cache
def _first_kernel() -> Kernel | None:
    wanted = os.environ.get(ISA_VARIABLE) or None
    if wanted == "reference":
        return None
    try:
        return open_kernel(wanted)
    except KernelUnavailableError as error:
        warnings.warn(
            f"The host optimizer runs on its torch reference, several times slower than the compiled kernel: {error} "
            f"To get the kernel, install a C compiler (gcc or clang) and run `{BUILD_COMMAND}`.",
            RuntimeWarning,
            stacklevel=3,
        )
        return None


def open_kernel(isa: str | None = None) -> Kernel:
    """Open the library for ``isa``, the best this machine has by default, and test it against the reference.

    Raises:
        KernelUnavailableError: there is no library, it is of another version, or it computes something else than
            the reference.
        ValueError: ``isa`` is not among :func:`available_isas`.
    """
    from lightning_megatrain.update.selftest import first_difference

    library, path = _open_library()
    available = _available(library)
    if isa is not None and isa not in available:
        raise ValueError(
            f"instruction set {isa!r} asked for (argument or {ISA_VARIABLE}), this machine and library have "
            f"{', '.join(available)}; choose one of these, or `reference` for the torch code."
        )
    kernel = Kernel(isa or available[0], path, library)
    if difference := first_difference(kernel):
        raise KernelUnavailableError(f"{path} ({kernel.isa}) failed its self-test: {difference}.")
    return kernel


def available_isas() -> tuple[str, ...]:
    """Instruction sets that both the library and this machine have, best first; empty without a library."""
    try:
        library, _ = _open_library()
    except KernelUnavailableError:
        return ()
    return _available(library)


def describe() -> str:
    """One line for the start-up summary."""
    kernel = get_kernel()
    return f"compiled kernel, {kernel.isa}" if kernel else "torch reference"


def _open_library() -> tuple[ctypes.CDLL, Path]:
    """The newest library beside this file: built in place, or by `pip install` (then with Python's own suffix)."""
    found = sorted(FOLDER.glob("_adam*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
    if not found:
        raise KernelUnavailableError(f"there is no compiled library in {FOLDER}.")
    path = found[0]
    try:
        library = ctypes.CDLL(str(path))
        version = library.mt_abi_version()
    except (OSError, AttributeError) as error:
        raise KernelUnavailableError(f"{path} cannot be opened: {error}.") from error
    if version != ABI_VERSION:
        raise KernelUnavailableError(f"{path} has version {version}, this package needs {ABI_VERSION}.")

    pointer, i32 = ctypes.c_void_p, ctypes.c_int32
    threads = (ctypes.c_size_t, i32, pointer)  # numel, threads, cpus
    library.mt_supports.argtypes = [ctypes.c_char_p]
    library.mt_adam.argtypes = [ctypes.c_char_p, i32, i32, i32, pointer, *threads]
    library.mt_sum_of_squares.argtypes = [ctypes.c_char_p, i32, pointer, pointer, pointer, *threads]
    library.mt_accumulate.argtypes = [ctypes.c_char_p, i32, i32, pointer, pointer, *threads]
    library.mt_scale.argtypes = [pointer, ctypes.c_float, *threads]
    library.mt_scale.restype = None
    return library, path


def _available(library: ctypes.CDLL) -> tuple[str, ...]:
    return tuple(isa for isa in ISAS if library.mt_supports(isa.encode()))


def _is16(tensor: Tensor) -> int:
    return int(tensor.dtype == torch.bfloat16)


def _thread_args(threads: ThreadPlan | int | None) -> tuple[int, ctypes.Array[ctypes.c_int32] | None]:
    if isinstance(threads, int):
        return threads, None
    plan = threads or default_threads()
    return plan.count, (ctypes.c_int32 * plan.count)(*plan.cpus) if plan.bound else None


if __name__ == "__main__":
    # The same as `python -m lightning_megatrain.update.build`.
    from lightning_megatrain.update.build import main

    sys.exit(main())
