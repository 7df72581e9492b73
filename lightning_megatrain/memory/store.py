"""The host home of all weights: one store per model, the only code that knows how a master is kept."""

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor

from lightning_megatrain.memory.arena import Arena
from lightning_megatrain.memory.host import give_back_freed_memory
from lightning_megatrain.memory.layout import Group
from lightning_megatrain.memory.split import join_master, split_master_


class StoreFormat(Enum):
    """How a weight is kept on the host, and in which dtype its wire bytes cross the link."""

    FP32 = "fp32"
    """The fp32 master is the wire: 4 bytes per parameter."""

    SPLIT = "split"
    """The fp32 master in two 16-bit halves; the upper one is the bf16 wire: 4 bytes per parameter."""

    BF16 = "bf16"
    """A bf16 master that is the wire: 2 bytes per parameter."""

    @property
    def wire_dtype(self) -> torch.dtype:
        """Dtype of weights on the wire, in slots and of gradients."""
        return torch.float32 if self is StoreFormat.FP32 else torch.bfloat16

    @property
    def weight_bytes(self) -> int:
        """Persistent host bytes per parameter for the master and the wire together."""
        return 2 if self is StoreFormat.BF16 else 4


class Store:
    """Arenas that hold the weights of ``groups``.

    Between :meth:`adopt` and :meth:`release` every parameter's ``data`` is, at rest, a view of its wire bytes on the
    host (:meth:`host_views`). Groups are adopted and released one by one, so neither needs a second copy of the model.

    Args:
        groups: units and resident groups; each parameter in exactly one of them.
        store_format: how the master is kept.
        pin: register the wire with CUDA.
    """

    def __init__(self, groups: Sequence[Group], store_format: StoreFormat, *, pin: bool) -> None:
        self.groups = tuple(groups)
        self.format = store_format
        self.versions = [0] * len(self.groups)
        self._pin = pin
        self._wire_arenas: list[Arena] = []
        self._low_arenas: list[Arena] = []
        self._wire: list[Tensor] = []
        self._low: list[Tensor] = []
        self._views: list[list[Tensor]] = []

    @property
    def nbytes(self) -> int:
        """Host bytes held now."""
        return sum(arena.nbytes for arena in (*self._wire_arenas, *self._low_arenas))

    def adopt(self) -> None:
        """Move every parameter's value into the store. The parameter keeps its identity, shape and flags.

        Raises:
            ValueError: a parameter is not on the CPU, or its dtype cannot be kept exactly.
        """
        for group in self.groups:
            for entry, parameter in zip(group.layout.entries, group.parameters, strict=True):
                _check_adoptable(entry.name, parameter)
        try:
            for group in self.groups:
                self._adopt_group(group)
                give_back_freed_memory()
        except BaseException:
            self.release()
            raise

    def _adopt_group(self, group: Group) -> None:
        layout, dtype = group.layout, self.format.wire_dtype
        wire_arena = Arena(layout.numel * dtype.itemsize, pin=self._pin)
        low_arena = Arena(layout.numel * 2 if self.format is StoreFormat.SPLIT else 0)
        self._wire_arenas.append(wire_arena)
        self._low_arenas.append(low_arena)
        self._wire.append(wire_arena.view(dtype, layout.numel))
        self._low.append(low_arena.view(torch.int16, low_arena.nbytes // 2))
        # Each view has a storage of its own size, so that pickling one parameter does not write the whole arena.
        self._views.append(
            [wire_arena.view(dtype, e.numel, e.offset * dtype.itemsize).view(e.shape) for e in layout.entries]
        )
        try:
            for index, parameter in enumerate(group.parameters):
                self.write_master(group.index, index, parameter.data)
        except BaseException:
            self._drop_last()
            raise
        for index, parameter in enumerate(group.parameters):
            parameter.data = self._views[group.index][index]

    def _drop_last(self) -> None:
        for arenas in (self._wire_arenas, self._low_arenas):
            arenas.pop().close()
        for tensors in (self._wire, self._low, self._views):
            tensors.pop()

    def wire(self, group: int) -> Tensor:
        """Flat wire bytes of a group, ``[layout.numel]`` in the wire dtype."""
        return self._wire[group]

    def low(self, group: int) -> Tensor:
        """Flat lower halves of a group's masters, ``[layout.numel]`` int16; empty unless the format is split."""
        return self._low[group]

    def host_views(self, group: int) -> list[Tensor]:
        """Wire views in parameter shape, in layout order: what ``parameter.data`` is at rest."""
        return self._views[group]

    def master(self, group: int, index: int) -> Tensor:
        """Exact fp32 value of one parameter, in its shape: the store's own memory for fp32, else a new tensor."""
        view = self._views[group][index]
        if self.format is StoreFormat.SPLIT:
            low = self._low[group][self._entry_span(group, index)]
            return join_master(view.view(-1), low).view(view.shape)
        return view.float()

    def halves(self, group: int, index: int) -> tuple[Tensor, Tensor]:
        """Wire view of one parameter in its shape, and the lower half of its master, ``[numel]`` int16.

        The second is empty unless the format is split.
        """
        return self._views[group][index], self._low[group][self._entry_span(group, index)]

    def write_master(self, group: int, index: int, value: Tensor) -> None:
        """Set one parameter's master, and its wire with it, from ``value`` of the same shape and any float dtype."""
        view = self._views[group][index]
        if self.format is StoreFormat.SPLIT:
            low = self._low[group][self._entry_span(group, index)]
            split_master_(value.detach().to(torch.float32).contiguous().view(-1), view.view(-1), low)
        else:
            view.copy_(value.detach())
        self.versions[group] += 1

    def release(self) -> None:
        """Give every parameter an ordinary fp32 CPU tensor and the arenas back, group by group."""
        while self._wire:
            group = self.groups[len(self._wire) - 1]
            for index, parameter in enumerate(group.parameters):
                parameter.data = self.master(group.index, index)
            self._drop_last()

    def _entry_span(self, group: int, index: int) -> slice:
        entry = self.groups[group].layout.entries[index]
        return slice(entry.offset, entry.offset + entry.numel)


class Moments:
    """First and second moments of the trainable parameters of ``groups``: zeros at first, touched, not pinned.

    Args:
        groups: the store's groups.
        dtype: dtype of both moments.
    """

    def __init__(self, groups: Sequence[Group], dtype: torch.dtype = torch.float32) -> None:
        self._arenas: list[Arena] = []
        self._flat: list[tuple[Tensor, Tensor]] = []
        self._views: list[list[tuple[Tensor, Tensor]]] = []
        for group in groups:
            numel = group.layout.trainable_numel
            arenas = [Arena(numel * dtype.itemsize) for _ in range(2)]
            self._arenas += arenas
            self._flat.append((arenas[0].view(dtype, numel), arenas[1].view(dtype, numel)))
            self._views.append(
                [
                    (
                        arenas[0].view(dtype, e.numel, e.offset * dtype.itemsize).view(e.shape),
                        arenas[1].view(dtype, e.numel, e.offset * dtype.itemsize).view(e.shape),
                    )
                    for e in group.layout.entries
                    if e.trainable
                ]
            )

    @property
    def nbytes(self) -> int:
        """Host bytes held."""
        return sum(arena.nbytes for arena in self._arenas)

    def flat(self, group: int) -> tuple[Tensor, Tensor]:
        """Flat first and second moments of a group, ``[trainable_numel]`` each."""
        return self._flat[group]

    def views(self, group: int, index: int) -> tuple[Tensor, Tensor]:
        """First and second moment of one trainable parameter, in its shape."""
        return self._views[group][index]


def _check_adoptable(name: str, parameter: Tensor) -> None:
    if parameter.device.type == "meta":
        raise ValueError(
            f"Parameter {name!r} is on the meta device and has no values; fill it before training, "
            "for example in LightningModule.configure_model()."
        )
    if parameter.device.type != "cpu":
        raise ValueError(
            f"Parameter {name!r} is on {parameter.device}, but the strategy keeps weights in host memory and moves "
            "them itself; build the module on the CPU and do not call .cuda() or .to(device) on it."
        )
    if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"Parameter {name!r} has dtype {parameter.dtype}, which an fp32 master cannot hold exactly; "
            "convert the module with .float() first."
        )
