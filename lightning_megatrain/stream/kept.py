"""Graphs that are kept from a unit's forward for its backward, without the weights that they were made with."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_megatrain.memory.slots import Slot
from lightning_megatrain.stream.closure import side_door


class _InSlot(NamedTuple):
    """Where in a slot a saved tensor lies; the slot's bytes are fetched again for the backward."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Elsewhere(NamedTuple):
    """A saved tensor that is no weight, and its version when it was saved."""

    tensor: Tensor
    version: int


class KeptGraph:
    """The graphs of one use of a unit, slice by slice.

    What a graph saves and finds in the unit's slot is kept as a place, and looked up in the slot that the unit is bound
    to in the backward: no graph holds on to a weight. The hooks take over autograd's own check that saved tensors were
    not written to.

    A parameter whose data move to another device forgets the node that gathers its gradients, and gets a new one when
    it is used next. So gradients are asked for at the nodes that the graph was made with.

    Args:
        unit: qualified name of the unit, for errors.
    """

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._slot: Slot | None = None
        self._slices: list[tuple[list[Tensor], list[Tensor]]] = []
        self._edges: dict[int, GradientEdge] = {}

    @contextlib.contextmanager
    def saving(self, slot: Slot) -> Iterator[None]:
        """Around the forward of a slice, with the unit bound to ``slot``."""
        storage = slot.buffer.untyped_storage()._cdata

        def pack(tensor: Tensor) -> _InSlot | _Elsewhere:
            if tensor.untyped_storage()._cdata == storage:
                strides = tuple(int(s) for s in tensor.stride())
                return _InSlot(tensor.dtype, tensor.shape, strides, int(tensor.storage_offset()))
            return _Elsewhere(tensor, tensor._version)

        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            yield

    def add(self, leaves: list[Tensor], outputs: list[Tensor], parameters: Iterable[Tensor]) -> None:
        """Keep a slice while its unit is bound.

        Args:
            leaves: stand for its inputs.
            outputs: its outputs with their graph.
            parameters: those that it may have used; the same for every slice.
        """
        self._slices.append((leaves, outputs))
        if not self._edges:
            self._edges = {id(p): get_gradient_edge(p) for p in parameters if p.requires_grad}

    def edges(self, parameters: Sequence[Tensor]) -> list[GradientEdge]:
        """Where the graph's gradients of parameters that required them arrive."""
        return [self._edges[id(p)] for p in parameters]

    def take(self) -> tuple[list[Tensor], list[Tensor]]:
        """The next slice."""
        return self._slices.pop(0)

    def drop(self) -> None:
        """Let the graphs go; their backward has to compute them again."""
        self._slices.clear()

    @contextlib.contextmanager
    def bound(self, slot: Slot) -> Iterator[None]:
        """Around the backward of a slice, with the unit bound to ``slot``."""
        self._slot = slot
        try:
            yield
        finally:
            self._slot = None

    @property
    def left(self) -> int:
        """Slices whose graph is there: none after a backward, or a second one would need it again."""
        return len(self._slices)

    @property
    def is_bound(self) -> bool:
        """Whether the unit's own backward is what runs through the graph now."""
        return self._slot is not None

    def _unpack(self, packed: _InSlot | _Elsewhere) -> Tensor:
        if isinstance(packed, _Elsewhere):
            if packed.tensor._version != packed.version:
                raise RuntimeError(
                    f"A tensor that unit {self._unit!r} made and needs for its gradient was changed in place after its "
                    "forward; write that operation out of place, or set MegaTrainStrategy(recompute='always')."
                )
            return packed.tensor
        if self._slot is None:  # somebody else's backward
            raise side_door(self._unit)
        buffer = self._slot.buffer
        assert buffer.dtype == packed.dtype, "weights are views of the slot in its dtype"
        return buffer.as_strided(packed.size, packed.stride, packed.offset)
