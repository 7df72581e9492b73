"""What the strategy makes of Lightning's precision flags.

Weights are converted by the store, never by the precision plugin, so each class here keeps only the contexts of its
Lightning parent and clips gradients where they are. Subclasses of Lightning's own classes, because its monitors look
at those.
"""

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import Module
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_megatrain.memory.store import StoreFormat

ClipByNorm = Callable[[Optimizer, float], None]


class _PromoteNorms(TorchFunctionMode):
    """Runs normalisations with fp32 copies of bf16 weights where fp32 activations or statistics meet them.

    Kernels refuse the mixture. CUDA's autocast promotes all but batch normalisation by itself, the CPU's none.
    """

    _norms = frozenset({F.layer_norm, F.group_norm, F.batch_norm})

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in self._norms:
            given = (*args[1:], *kwargs.values())
            if args[0].dtype == torch.float32 or any(_is(g, torch.float32) for g in given):
                # The activations keep their dtype: kernels take bf16 ones with fp32 weights.
                args = (args[0], *(_widen(a) for a in args[1:]))
                kwargs = {key: _widen(value) for key, value in kwargs.items()}
        return function(*args, **kwargs)


def _is(value: Any, dtype: torch.dtype) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == dtype


def _widen(value: Any) -> Any:
    return value.float() if _is(value, torch.bfloat16) else value


class _ClipsOnHost(Precision):
    """Leaves clipping by norm to the strategy, which knows the norm without reading every gradient again."""

    clip_by_norm: ClipByNorm | None = None

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        if self.clip_by_norm is None:
            super().clip_grad_by_norm(optimizer, clip_val)
        else:
            self.clip_by_norm(optimizer, float(clip_val))


class FullPrecision(_ClipsOnHost, Precision):
    """``32-true``: fp32 weights, compute, gradients and moments; the same numbers as the stock strategy."""

    store_format = StoreFormat.FP32

    def unit_context(self) -> contextlib.AbstractContextManager[Any]:
        """Entered around every block's forward and recompute."""
        return contextlib.nullcontext()


class SplitMasterPrecision(_ClipsOnHost, MixedPrecision):
    """``bf16-mixed``: bf16 weights and gradients on the device, under autocast, over an exact fp32 master.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
    """

    store_format = StoreFormat.SPLIT

    def __init__(self, device: str) -> None:
        super().__init__("bf16-mixed", device)
        self._promotes_norms = device == "cpu"

    @override
    def convert_module(self, module: Module) -> Module:
        has_batch_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())
        self._promotes_norms = self.device == "cpu" or has_batch_norm
        return module

    def unit_context(self) -> contextlib.AbstractContextManager[Any]:
        """Entered around every block's forward and recompute."""
        return _PromoteNorms() if self._promotes_norms else contextlib.nullcontext()

    @override
    @contextlib.contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        with super().forward_context(), self.unit_context():
            yield


class Bf16Precision(_ClipsOnHost, HalfPrecision):
    """``bf16-true``: bf16 weights, compute and gradients, fp32 moments for Adam."""

    store_format = StoreFormat.BF16

    def __init__(self) -> None:
        super().__init__("bf16-true")

    def unit_context(self) -> contextlib.AbstractContextManager[Any]:
        """Entered around every block's forward and recompute."""
        return contextlib.nullcontext()

    @override
    def convert_module(self, module: Module) -> Module:
        return module


MegaTrainPrecision = FullPrecision | SplitMasterPrecision | Bf16Precision


def translate(plugin: Precision | None) -> MegaTrainPrecision:
    """The class here that does what Lightning's plugin asks for.

    Raises:
        MisconfigurationException: for a precision that the stores do not keep.
    """
    if plugin is None:
        return FullPrecision()
    if isinstance(plugin, (FullPrecision, SplitMasterPrecision, Bf16Precision)):
        return plugin
    if type(plugin) is Precision:
        return FullPrecision()
    if type(plugin) is MixedPrecision and plugin.precision == "bf16-mixed":
        return SplitMasterPrecision(plugin.device)
    if type(plugin) is HalfPrecision and plugin.precision == "bf16-true":
        return Bf16Precision()
    name = getattr(plugin, "precision", type(plugin).__name__)
    reason = " (its gradient scaler needs every gradient twice)" if name == "16-mixed" else ""
    raise MisconfigurationException(
        f"precision={name!r} is not supported by the megatrain strategy{reason}; "
        "set precision='bf16-mixed', '32-true' or 'bf16-true'."
    )
