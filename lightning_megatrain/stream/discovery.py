"""Which modules become units."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from torch import nn
from torch.nn import Parameter

from lightning_megatrain.memory.layout import Group

UnitSelector = str | Sequence[str] | Callable[[str, nn.Module], bool]

_SHARE = 0.05
"""A container of repeated blocks counts if it holds this share of all parameters."""

_RESIDENT_GROUP = 64 * 2**20
"""Elements after which a new resident group is begun, so that one copy never grows with the model."""


def find_units(model: nn.Module, units: UnitSelector = "auto") -> dict[str, nn.Module]:
    """Modules that will be streamed, by qualified name, in module order; none lies inside another.

    Args:
        model: the whole module.
        units: ``"auto"`` takes the blocks of every outermost ``ModuleList`` or ``Sequential`` that repeats a block
            class and holds at least 5% of all parameters. Class names, qualified names, or a predicate
            ``(qualified_name, module) -> bool`` choose by hand; of nested matches the outermost counts.

    Raises:
        ValueError: nothing matches.
    """
    if isinstance(units, str) and units == "auto":
        found = dict(_repeated_blocks(model))
        if not found:
            raise ValueError(
                "No unit found: megatrain streams repeated blocks, and this model has no ModuleList or Sequential that "
                f"repeats a block and holds at least {_SHARE:.0%} of all parameters; name the modules to stream with "
                "MegaTrainStrategy(units=['YourBlockClass', 'qualified.name'])."
            )
        return found
    names = [units] if isinstance(units, str) else units
    if callable(names):
        matches: Callable[[str, nn.Module], bool] = names
    else:
        wanted = set(names)

        def matches(name: str, module: nn.Module) -> bool:
            return name in wanted or type(module).__name__ in wanted

    found = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(outer + ".") for outer in found)
        if name and not inside and matches(name, module) and _has_parameters(module):
            found[name] = module
    if not found:
        classes = Counter(type(m).__name__ for n, m in model.named_modules() if n and _has_parameters(m))
        listed = ", ".join(name for name, _ in classes.most_common(8))
        raise ValueError(
            f"No unit found: units={units!r} matches no module with parameters; set MegaTrainStrategy(units=...) to "
            f"'auto', to qualified names, or to class names such as {listed}."
        )
    return found


def make_groups(model: nn.Module, units: dict[str, nn.Module]) -> list[Group]:
    """One group per unit, then groups of resident parameters.

    A parameter that is reachable outside its unit, or from two units, is resident: it is one tensor.
    """
    owners = Counter(id(p) for module in units.values() for p in module.parameters())
    inside = {id(m) for unit in units.values() for m in unit.modules()}
    outside = {id(p) for m in model.modules() if id(m) not in inside for p in m.parameters(recurse=False)}
    groups: list[Group] = []
    taken: set[int] = set()
    for name, module in units.items():
        own = [(f"{name}.{n}", p) for n, p in module.named_parameters() if owners[id(p)] == 1 and id(p) not in outside]
        taken.update(id(p) for _, p in own)
        groups.append(Group.of(len(groups), name, own, resident=False))
    pending: list[tuple[str, Parameter]] = []
    rest = [(n, p) for n, p in model.named_parameters() if id(p) not in taken]
    for name, parameter in rest:
        if pending and sum(p.numel() for _, p in pending) + parameter.numel() > _RESIDENT_GROUP:
            groups.append(Group.of(len(groups), pending[0][0], pending, resident=True))
            pending = []
        pending.append((name, parameter))
    if pending:
        groups.append(Group.of(len(groups), pending[0][0], pending, resident=True))
    return groups


def _repeated_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    total = max(1, sum(p.numel() for p in model.parameters()))
    accepted: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(outer + ".") for outer in accepted):
            continue
        blocks = _blocks_of(module)
        held = {id(p): p.numel() for block in blocks.values() for p in block.parameters()}
        if blocks and sum(held.values()) >= _SHARE * total:
            for child, block in blocks.items():
                qualified = f"{name}.{child}" if name else child
                accepted.append(qualified)
                yield qualified, block


def _blocks_of(container: nn.Module) -> dict[str, nn.Module]:
    """Children of a container that repeats a block class.

    A ModuleList of blocks may hold odd ones (a different first layer): all of them are blocks. A Sequential may hold
    anything (a stem, a head), so there only the repeated classes count.
    """
    if not isinstance(container, (nn.ModuleList, nn.Sequential)):
        return {}
    children = {name: child for name, child in container.named_children() if _has_parameters(child)}
    counts = Counter(type(child) for child in children.values())
    if not counts or max(counts.values()) < 2:
        return {}
    if isinstance(container, nn.ModuleList):
        return children
    return {name: child for name, child in children.items() if counts[type(child)] >= 2}


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
