"""Blocks through ``torch.compile``: one graph for each structure, however many layers have it."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch._dynamo.exc import TorchDynamoException

OPTIONS: dict[str, Any] = {}
"""Keyword arguments of ``torch.compile``."""

_NAME = "force_non_lazy_backward_lowering"
_WITH_BACKWARD = {_NAME: True} if hasattr(functorch_config, _NAME) else {}
"""Compile the backward along with the forward; where torch has no such setting it is compiled when it first runs."""


class CompiledForward:
    """A block's forward, compiled when it is first called; as it was, with one warning, if that fails.

    Parameters are inputs of the graph, so blocks of one class and form share it, and it does not matter which memory
    their parameters are bound to. The backward is compiled along with the forward, so that if it cannot be, the block
    can still run as it is.

    Args:
        unit: qualified name, for the warning.
        forward: the block's own bound ``forward``.
    """

    def __init__(self, unit: str, forward: Callable[..., Any]) -> None:
        self._unit = unit
        self._eager = forward
        self._compiled: Callable[..., Any] | None = torch.compile(forward, **OPTIONS)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the block's ``forward``."""
        if self._compiled is None:
            return self._eager(*args, **kwargs)
        try:
            with functorch_config.patch(_WITH_BACKWARD):
                return self._compiled(*args, **kwargs)
        except TorchDynamoException as error:
            cause = getattr(error, "inner_exception", error)
            reason = next((line for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
            warnings.warn(
                f"Unit {self._unit!r} could not be compiled and runs as it is ({reason.rstrip('.')}); change what "
                "torch.compile stumbles over, or set MegaTrainStrategy(compile=False).",
                stacklevel=2,
            )
            self._compiled = None
            return self._eager(*args, **kwargs)
