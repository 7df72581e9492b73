"""How a unit takes part in autograd: one node per use, whose backward recomputes the block."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_megatrain.stream.kept import KeptGraph
from lightning_megatrain.stream.saved import SavedOnHost
from lightning_megatrain.stream.unit import Conditions, Unit

if TYPE_CHECKING:
    from lightning_megatrain.stream.engine import Engine


@dataclass(eq=False)
class Call:
    """One use of a unit: its arguments with holes where tensors go, and what a recompute needs to know.

    ``slice_rows`` is the batch size inside the unit; ``saved`` are inputs that wait on the host; ``before`` is the use
    before this one, whose backward is likely to follow.
    """

    unit: Unit
    leaves: list[Any]
    spec: TreeSpec
    positions: list[int]
    preceding: list[int] = field(default_factory=list)
    version: int = 0
    conditions: Conditions | None = None
    output: "Output | None" = None
    output_shapes: list[torch.Size] = field(default_factory=list)
    kept: KeptGraph | None = None
    slice_rows: int | None = None
    saved: list[SavedOnHost] = field(default_factory=list)
    before: "weakref.ref[Call] | None" = None

    @classmethod
    def of(cls, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple["Call", list[Tensor]]:
        """Split the arguments of a use into a call and its tensors."""
        leaves, spec = tree_flatten((args, kwargs))
        positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = [leaves[i] for i in positions]
        for i in positions:
            leaves[i] = None  # autograd keeps tensors; a second reference would outlive it
        return cls(unit, leaves, spec, positions), tensors

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """Call the block's own forward with these tensors in their places. The unit must be bound."""
        leaves = list(self.leaves)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.unit.forward(*args, **kwargs)


@dataclass(eq=False)
class Output:
    """The structure of a block's result, with holes where tensors go."""

    leaves: list[Any]
    spec: TreeSpec
    positions: list[int]

    @classmethod
    def of(cls, value: Any) -> tuple["Output", list[Tensor]]:
        """Split a result into its structure and its tensors, so that those can pass through autograd one by one."""
        leaves, spec = tree_flatten(value)
        positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = [leaves[i] for i in positions]
        for i in positions:
            leaves[i] = None
        return cls(leaves, spec, positions), tensors

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """The result with ``tensors`` in their places."""
        leaves = list(self.leaves)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        return tree_unflatten(leaves, self.spec)


class StreamedBlock(torch.autograd.Function):
    """Autograd node of one use of a unit.

    Inputs are the engine, the call, an anchor (a tensor that requires grad, so that a unit with trainable parameters
    gets a backward even when no input requires one), the call's tensors, and the resident parameters that the unit
    shares with other modules, so that autograd itself sums their gradients. The unit's own parameters are no inputs:
    their gradients leave through the engine.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, engine: "Engine", call: Call, anchor: Tensor | None, *tensors_and_shared: Tensor
    ) -> tuple[Tensor, ...]:
        tensors = tensors_and_shared[: len(call.positions)]
        ctx.set_materialize_grads(False)
        ctx.engine, ctx.call = engine, call
        outputs = engine.forward(call, tensors)
        call.saved = engine.runner.save_inputs(call, tensors)
        elsewhere = {saved.position for saved in call.saved}
        ctx.save_for_backward(*(t for i, t in enumerate(tensors) if i not in elsewhere))
        ctx.mark_non_differentiable(*(o for o in outputs if not (o.is_floating_point() or o.is_complex())))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: D102
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"Double backward through unit {ctx.call.unit.name!r}: its graph is recomputed and thrown away, so "
                "create_graph=True cannot work; train without it or use Lightning's single-device strategy."
            )
        tensors = ctx.engine.runner.saved_inputs(ctx.call, ctx.saved_tensors)
        inputs = ctx.engine.backward(ctx.call, tensors, ctx.needs_input_grad[3:], gradients)
        return (None, None, None, *inputs)
