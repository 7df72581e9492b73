"""Refuses blocks that reach beyond what a recompute sees (arguments, parameters, buffers), or are reached into."""

from collections.abc import Callable, Sequence

from torch import Tensor

from lightning_megatrain.stream.unit import Unit


def check_graph(
    unit: Unit, leaves: Sequence[Tensor], outputs: Sequence[Tensor], *, expected: Callable[[], bool]
) -> None:
    """Check the graph of a unit's forward, which is about to be dropped or kept for the unit's own backward.

    On the unit's first use the graph is walked: it must end in the arguments and the unit's parameters. On every use
    the arguments are armed: a gradient that arrives at them through this graph came from a tensor that left the block
    by another way than its return value (an attribute, a hook), and whose gradient would be lost.

    Args:
        unit: the unit.
        leaves: stand-ins for its arguments.
        outputs: its result's tensors, with their graph.
        expected: whether the unit's own backward is what runs through the graph now.

    Raises:
        RuntimeError: the block uses a tensor that requires a gradient and is neither an argument nor a parameter.
    """
    if not unit.graph_checked:
        known = {id(t) for t in (*leaves, *unit.group.parameters, *unit.shared)}
        if _reaches_beyond(outputs, known):
            raise RuntimeError(
                f"Unit {unit.name!r} uses a tensor that requires a gradient and is neither its parameter nor an "
                "argument that autograd can see (an attribute set from outside, or a field of an object); pass it as a "
                "tensor, or in a tuple, list or dict."
            )
        unit.graph_checked = True

    def arrived(gradient: Tensor) -> None:
        if not expected():
            raise side_door(unit.name)

    for leaf in leaves:
        if leaf.requires_grad:
            leaf.register_hook(arrived)


def side_door(unit: str) -> RuntimeError:
    """The error for a gradient that comes to a unit's graph by another way than its result."""
    return RuntimeError(
        f"A tensor made inside unit {unit!r} reached the loss by another way than the unit's return value (an "
        "attribute or a hook, such as router logits), so its gradient would be lost; return it from the unit's "
        "forward, or make other modules units with MegaTrainStrategy(units=...)."
    )


def _reaches_beyond(outputs: Sequence[Tensor], known: set[int]) -> bool:
    seen = set()
    stack = [o.grad_fn for o in outputs if o.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known:
            return True
        stack.extend(following for following, _ in node.next_functions if following is not None)
    return False
