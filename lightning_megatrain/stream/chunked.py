"""The feed-forward part of a block over slices of the sequence: its intermediates are there for one slice at a time."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Context = Callable[[], contextlib.AbstractContextManager[Any]]

CHILD = "mlp"
"""The child of a block that is run in slices, as transformers names it."""


class ChunkedForward:
    """Stands in for the forward of a module whose output at a position depends on its input there alone.

    With gradients on, each slice is computed again in the backward: one more forward of this module, and in return the
    intermediates of one slice in place of all.

    Args:
        name: qualified name of the module, for errors.
        forward: its own forward.
        chunks: how many slices.
        context: entered around the forward that is computed again, as around the block's.
    """

    def __init__(self, name: str, forward: Callable[..., Any], chunks: int, context: Context) -> None:
        self._name = name
        self._forward = forward
        self._chunks = chunks
        self._context = context

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``[batch, time, width]`` to the same.

        Raises:
            RuntimeError: the module returns something else than a tensor with the batch and time of its input.
        """
        parts = []
        for part in hidden.chunk(self._chunks, dim=1):
            if torch.is_grad_enabled():
                made = checkpoint(self._forward, part, *args, use_reentrant=False, **self._again(), **kwargs)
            else:
                made = self._forward(part, *args, **kwargs)
            if not isinstance(made, Tensor) or made.shape[:2] != part.shape[:2]:
                raise RuntimeError(
                    f"Module {self._name!r} does not return one tensor with the batch and sequence of its input, so it "
                    "cannot be run in slices; set MegaTrainStrategy(sequence_chunks=None)."
                )
            parts.append(made)
        return torch.cat(parts, dim=1)

    def _again(self) -> dict[str, Any]:
        # Only where there is one: a compiled block cannot have it.
        if isinstance(self._context(), contextlib.nullcontext):
            return {}
        return {"context_fn": lambda: (contextlib.nullcontext(), self._context())}


def without_child(blocks: Mapping[str, nn.Module]) -> str | None:
    """Qualified name of the first of these blocks, given by name, that has no part to run in slices."""
    return next((name for name, b in blocks.items() if not isinstance(getattr(b, CHILD, None), nn.Module)), None)


def require_child(blocks: Mapping[str, nn.Module]) -> None:
    """Refuse blocks without a part that can be run in slices.

    Args:
        blocks: by qualified name.

    Raises:
        ValueError: names the first of them.
    """
    if (name := without_child(blocks)) is not None:
        raise ValueError(
            f"sequence_chunks runs each unit's child {CHILD!r} in slices, and unit {name!r} has none; set "
            "sequence_chunks=None."
        )


def chunk(name: str, block: nn.Module, chunks: int, context: Context) -> Callable[[], None]:
    """Run a block's feed-forward part in slices.

    Args:
        name: qualified name of the block.
        block: the block, with that part.
        chunks: how many slices.
        context: entered around every block's forward.

    Returns:
        Undoes it.
    """
    child = getattr(block, CHILD)
    own = vars(child).get("forward")
    child.forward = ChunkedForward(f"{name}.{CHILD}", child.forward, chunks, context)

    def undo() -> None:
        if own is None:
            vars(child).pop("forward", None)
        else:
            child.forward = own

    return undo
