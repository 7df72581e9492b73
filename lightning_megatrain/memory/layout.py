"""Offset arithmetic: where each parameter of a group lies in a flat buffer.

A *group* is a set of parameters that move together: one unit, or a handful of resident parameters. Every flat buffer
of a group (wire, slot, slab, gradient arena, moments) is cut by the same :class:`GroupLayout`, so packing and
unpacking cannot disagree and a missing gradient leaves a hole at its own place instead of shifting its neighbours.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import Parameter

ALIGNMENT = 128
"""Every parameter starts at a multiple of this many elements: 256 bytes in bf16, 512 in fp32. Matmul kernels choose by
pointer alignment, so a weaker one could change the numbers."""


def align(numel: int) -> int:
    """Round a number of elements up to the next multiple of :data:`ALIGNMENT`."""
    return -(-numel // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Entry:
    """Place of one parameter in its group; ``offset`` and ``numel`` are elements, not bytes."""

    name: str
    shape: torch.Size
    offset: int
    trainable: bool

    @property
    def numel(self) -> int:
        """Elements of the parameter, without padding."""
        return self.shape.numel()


class GroupLayout:
    """Cuts flat buffers of one group into parameter views.

    Trainable parameters come first, so gradients and moments are a prefix of the layout and frozen parameters cost
    neither. The padding between entries belongs to the buffer and stays zero.

    Args:
        entries: the parameters in layout order, trainable ones before frozen ones.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = tuple(entries)
        ends = [align(entry.offset + entry.numel) for entry in self.entries]
        self.numel = ends[-1] if ends else 0
        trainable = [end for entry, end in zip(self.entries, ends, strict=True) if entry.trainable]
        self.trainable_numel = trainable[-1] if trainable else 0
        self.trainable_count = len(trainable)
        self.parameter_numel = sum(entry.numel for entry in self.entries)

    @classmethod
    def of(cls, named: Iterable[tuple[str, torch.Size, bool]]) -> "GroupLayout":
        """Lay out ``(name, shape, trainable)`` triples; keeps their order within trainable and frozen."""
        triples = list(named)
        entries, offset = [], 0
        for name, shape, trainable in [t for t in triples if t[2]] + [t for t in triples if not t[2]]:
            entries.append(Entry(name, shape, offset, trainable))
            offset = align(offset + shape.numel())
        return cls(entries)

    def views(self, flat: Tensor) -> list[Tensor]:
        """One view of ``flat`` per entry, in layout order.

        ``flat`` is one-dimensional and holds :attr:`numel` elements, or :attr:`trainable_numel` for buffers that know
        trainable parameters only (then only their views are returned).
        """
        count = len(self.entries) if flat.numel() >= self.numel else self.trainable_count
        return [flat[e.offset : e.offset + e.numel].view(e.shape) for e in self.entries[:count]]

    def span(self, index: int) -> slice:
        """Range of entry ``index`` in a flat buffer, with the padding behind it, so that neighbours touch."""
        entry = self.entries[index]
        return slice(entry.offset, align(entry.offset + entry.numel))


@dataclass(frozen=True, eq=False)
class Group:
    """Parameters that move together, and their layout. ``parameters[i]`` belongs to ``layout.entries[i]``.

    ``named`` holds them by qualified name in the order of the module.
    """

    index: int
    name: str
    parameters: tuple[Parameter, ...]
    layout: GroupLayout
    resident: bool
    named: dict[str, Parameter]

    @classmethod
    def of(cls, index: int, name: str, named: Iterable[tuple[str, Parameter]], *, resident: bool) -> "Group":
        """Build a group from ``(qualified name, parameter)`` pairs."""
        by_name = dict(named)
        layout = GroupLayout.of((n, p.shape, p.requires_grad) for n, p in by_name.items())
        return cls(index, name, tuple(by_name[e.name] for e in layout.entries), layout, resident, by_name)

    @property
    def has_thawed(self) -> bool:
        """Whether a parameter requires a gradient that the layout has no room for."""
        return any(p.requires_grad for p in self.parameters[self.layout.trainable_count :])

    def relaid(self) -> "Group":
        """The same group, laid out for what requires a gradient now or did when it was laid out."""
        trained = {id(p) for p in self.parameters[: self.layout.trainable_count]}
        layout = GroupLayout.of((n, p.shape, p.requires_grad or id(p) in trained) for n, p in self.named.items())
        parameters = tuple(self.named[e.name] for e in layout.entries)
        return replace(self, parameters=parameters, layout=layout)
