"""What is put on a module while it is streamed: a stand-in for its forward, and care for its key-value caches."""

import copy
import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

from lightning_megatrain.stream.unit import Unit


class StreamedForward:
    """Stands in for ``unit.module.forward``; the module's own hooks fire around it, once per use.

    A copied or pickled module gets the original forward back: the copy has parameters of its own and is not streamed.
    """

    def __init__(self, unit: Unit, use: Callable[[Unit, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        functools.update_wrapper(self, unit.forward)
        self._unit = unit
        self._use = use

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block through the engine."""
        return self._use(self._unit, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        original, module = self._unit.forward, self._unit.module
        if isinstance(original, types.MethodType) and original.__self__ is module:
            return types.MethodType(original.__func__, memo[id(module)])
        return copy.deepcopy(original, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        # Read while the module's state is not restored yet, so this is its class's forward.
        return getattr, (self._unit.module, "forward")


def install(unit: Unit, use: Callable[[Unit, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Put a stand-in on the unit's module."""
    unit.module.forward = StreamedForward(unit, use)


def uninstall(unit: Unit) -> None:
    """Take the stand-in off; a forward that was set on the instance before comes back."""
    unit.module.__dict__.pop("forward", None)
    original = unit.forward
    if not (
        isinstance(original, types.MethodType) and original.__func__ is getattr(type(unit.module), "forward", None)
    ):
        unit.module.forward = original


_cache_warned = False


def drop_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Take key-value caches out of a training call: a recompute would append to them a second time.

    Raises:
        RuntimeError: a cache already holds tokens, so leaving it out would change the result.
    """

    def without(value: Any) -> Any:
        global _cache_warned
        if not (hasattr(value, "get_seq_length") and hasattr(value, "update")):
            return value
        if int(value.get_seq_length()):
            raise RuntimeError(
                "A block got a key-value cache that already holds tokens while gradients are on; recomputing the block "
                "would append to it again, so pass use_cache=False for training."
            )
        if not _cache_warned:
            _cache_warned = True
            warnings.warn(
                "Key-value caches are not filled while gradients are on; set use_cache=False in the model's config.",
                UserWarning,
                stacklevel=2,
            )
        return None

    return tuple(without(a) for a in args), {k: without(v) for k, v in kwargs.items()}
