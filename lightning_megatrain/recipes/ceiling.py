"""The yardstick of a streamed step: the same model wholly on the device, recomputed in full, without an optimizer.

No training step can be faster that recomputes its blocks: nothing crosses the link and no weight is updated. It takes
the memory of weights and gradients, and of what one slice of the batch needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from lightning_megatrain.recipes.causal_lm import CausalLM
from lightning_megatrain.recipes.loss import stood_in
from lightning_megatrain.recipes.random_weights import weight_bytes
from lightning_megatrain.stream.compiled import CompiledForward


class Ceiling:
    """Forward and backward of a model that is on the device as a whole; use it as a context manager.

    Inside, the blocks are recomputed and, if wanted, compiled; afterwards they are as they were.

    Args:
        module: with weights and buffers on the device that computes.
        blocks: the modules to recompute, by name, as the streamed step has its units.
        compile: run blocks through ``torch.compile``, one graph for each structure.
    """

    def __init__(self, module: CausalLM, blocks: Mapping[str, nn.Module], *, compile: bool) -> None:
        self._module = module.train()
        self._blocks = blocks
        self._compile = compile
        self._patches = ExitStack()

    def __enter__(self) -> Ceiling:
        for name, block in self._blocks.items():
            forward = CompiledForward(name, block.forward) if self._compile else block.forward
            self._patches.enter_context(stood_in(block, _Recomputed(forward)))
        return self

    def __exit__(self, *error: object) -> None:
        self._patches.close()
        self._module.zero_grad(set_to_none=True)

    def step(self, batch: Mapping[str, Tensor], microbatch: int | None) -> float:
        """Compute loss and gradients, which are left in ``p.grad`` in the weights' dtype.

        Args:
            batch: `input_ids` and others, (rows, time), on the host; rows are of equal weight.
            microbatch: rows that go through the model at once; None takes all.

        Returns:
            The mean loss in nats per target token. All work of the step is done by then.
        """
        self._module.zero_grad(set_to_none=True)
        device = next(self._module.parameters()).device
        rows = len(batch["input_ids"])
        size = rows if microbatch is None else min(microbatch, rows)
        total = torch.zeros((), device=device)
        for start in range(0, rows, size):
            some = {key: value[start : start + size].to(device) for key, value in batch.items()}
            loss = self._module.loss(some) * (len(some["input_ids"]) / rows)
            loss.backward()
            total += loss.detach()
        return float(total)


def ceiling_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of weights and gradients, which is the least that a ceiling takes; the module may be on the meta device."""
    return 2 * weight_bytes(module, dtype)


class _Recomputed:
    """A block's forward that keeps its inputs alone, as a streamed unit does.

    The reentrant form of checkpointing runs the forward without a graph, which is what a streamed unit does too; it
    finds tensors among its own arguments only, hence the flattening.
    """

    def __init__(self, forward: Any) -> None:
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))

        def run(*leaves: Any) -> Any:
            args, kwargs = tree_unflatten(leaves, spec)
            return self._forward(*args, **kwargs)

        return checkpoint(run, *leaves, use_reentrant=True)
