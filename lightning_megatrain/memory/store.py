"""The host home of all weights: one store per model, the only code that knows how a master is kept."""

from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_megatrain.memory.arena import Arena
from lightning_megatrain.memory.host import give_back_freed_memory
from lightning_megatrain.memory.layout import Group
from lightning_megatrain.memory.mapped import FileMappings, give_pages_back
from lightning_megatrain.memory.progress import working
from lightning_megatrain.memory.split import join_master, split_master_

PART = 4 << 20
"""Elements in which values are read that are converted, or whose pages are given back."""


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


class GroupMemory(NamedTuple):
    """Flat memory of one group that its update reads and writes, on one device.

    Attributes:
        wire: ``[numel]`` in the wire dtype.
        low: ``[numel]`` int16, lower halves of the masters; empty unless the format is split.
        exp_avg: ``[trainable_numel]``.
        exp_avg_sq: ``[trainable_numel]``.
    """

    wire: Tensor
    low: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class _Home:
    """Memory of one group: its wire, and the lower halves if the format is split."""

    def __init__(self, group: Group, store_format: StoreFormat, *, pin: bool) -> None:
        layout, dtype = group.layout, store_format.wire_dtype
        self._arenas = (
            Arena(layout.numel * dtype.itemsize, pin=pin),
            Arena(layout.numel * 2 if store_format is StoreFormat.SPLIT else 0),
        )
        wire, low = self._arenas
        self.nbytes = wire.nbytes + low.nbytes
        self.wire = wire.view(dtype, layout.numel)
        self.low = low.view(torch.int16, low.nbytes // 2)
        # Each view has a storage of its own size, so that pickling one parameter does not write the whole arena.
        self.views = [wire.view(dtype, e.numel, e.offset * dtype.itemsize).view(e.shape) for e in layout.entries]

    def close(self) -> None:
        for arena in self._arenas:
            arena.close()


class Store:
    """Arenas that hold the weights of ``groups``.

    Between :meth:`adopt` and :meth:`release` every parameter's ``data`` is, at rest, a view of its wire bytes on the
    host (:meth:`host_views`), or, while the group is lent, of those on the device. Groups are adopted and released one
    by one, so neither needs a second copy of the model.

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
        self._homes: list[_Home] = []
        self.before_write: Callable[[], None] = lambda: None
        """Called before values that were assigned to parameters are taken over; may wait."""
        self.lent: dict[int, list[Tensor]] = {}
        """Groups whose host bytes are stale, because the true ones are on the device: their parameters' data there."""
        self.recall: Callable[[Collection[int] | None], None] = lambda groups: None
        """Brings lent groups home: all, or those of these that are."""

    @property
    def nbytes(self) -> int:
        """Host bytes held now."""
        return sum(home.nbytes for home in self._homes)

    def adopt(self) -> None:
        """Move every parameter's value into the store. The parameter keeps its identity, shape and flags.

        A parameter that is mapped from a file is read part by part, and the file's pages are given back as they are
        read, so that its bytes are not in memory beside the store's.

        Raises:
            ValueError: a parameter is not on the CPU, or its dtype cannot be kept exactly.
        """
        for group in self.groups:
            for entry, parameter in zip(group.layout.entries, group.parameters, strict=True):
                _check_adoptable(entry.name, parameter)
        mappings = FileMappings()
        total = sum(group.layout.numel for group in self.groups) * self.format.weight_bytes
        try:
            with working("Taking weights over", total) as advance:
                for group in self.groups:
                    self._adopt_group(group, mappings)
                    give_back_freed_memory()
                    advance(self._homes[-1].nbytes)
        except BaseException:
            self.release()
            raise

    def _adopt_group(self, group: Group, mappings: FileMappings) -> None:
        self._homes.append(_Home(group, self.format, pin=self._pin))
        try:
            for index, parameter in enumerate(group.parameters):
                self.write_master(group.index, index, parameter.data, mappings)
        except BaseException:
            self._homes.pop().close()
            raise
        self.show(group)

    def show(self, group: Group) -> None:
        """Make the parameters' data what they are at rest."""
        for parameter, view in zip(group.parameters, self.at_rest(group.index), strict=True):
            parameter.data = view

    def at_rest(self, group: int) -> list[Tensor]:
        """What ``parameter.data`` is between steps, in layout order: the host's wire unless the group is lent."""
        return self.lent[group] if group in self.lent else self.host_views(group)

    def relay(self, group: Group) -> None:
        """Keep a group in other memory, bit for bit; :meth:`show` its parameters' data afterwards.

        Args:
            group: the group of that index, with the same parameters in the same or another order.
        """
        before, old = self.groups[group.index], self._homes[group.index]
        new = _Home(group, self.format, pin=self._pin)
        place = {id(p): i for i, p in enumerate(before.parameters)}
        for index, parameter in enumerate(group.parameters):
            source, target = before.layout.span(place[id(parameter)]), group.layout.span(index)
            new.wire[target] = old.wire[source]
            if self.format is StoreFormat.SPLIT:
                new.low[target] = old.low[source]
        self.groups = (*self.groups[: group.index], group, *self.groups[group.index + 1 :])
        self._homes[group.index] = new
        self.versions[group.index] += 1
        old.close()

    def take_assigned(self, groups: Iterable[Group] | None = None) -> None:
        """Take over values that somebody gave parameters by assigning to ``parameter.data``, which is at rest.

        Args:
            groups: those to look at; None for all.

        Raises:
            ValueError: a value has another shape.
        """
        assigned: list[tuple[Group, int, Tensor]] = []
        for group in self.groups if groups is None else groups:
            for index, (parameter, view) in enumerate(zip(group.parameters, self.at_rest(group.index), strict=True)):
                if parameter.data_ptr() != view.data_ptr() or parameter.stride() != view.stride():
                    if parameter.shape != view.shape:
                        raise ValueError(
                            f"Parameter {group.layout.entries[index].name!r} was given data of shape "
                            f"{tuple(parameter.shape)} instead of {tuple(view.shape)} during training; give it the "
                            "same shape, or replace it before fit()."
                        )
                    assigned.append((group, index, parameter.data))
        if not assigned:
            return
        self.recall({group.index for group, _, _ in assigned})
        self.before_write()
        # Some may be other parameters' memory, which is about to be written (a swap).
        ours = {view.data_ptr() for home in self._homes for view in home.views}
        values = [value.clone() if value.data_ptr() in ours else value for _, _, value in assigned]
        for (group, index, _), value in zip(assigned, values, strict=True):
            # Whoever kept the old `data` (a backup to be put back) keeps its memory; the group moves to another.
            if _others_hold(self.host_views(group.index)[index]):
                self.relay(group)
            if value.dtype == self.format.wire_dtype:
                self.write_wire(group.index, index, value)
            else:
                self.write_master(group.index, index, value)
        for group in {group.index: group for group, _, _ in assigned}.values():
            self.show(group)

    def wire(self, group: int) -> Tensor:
        """Flat wire bytes of a group, ``[layout.numel]`` in the wire dtype."""
        return self._homes[group].wire

    def low(self, group: int) -> Tensor:
        """Flat lower halves of a group's masters, ``[layout.numel]`` int16; empty unless the format is split."""
        return self._homes[group].low

    def host_views(self, group: int) -> list[Tensor]:
        """Wire views on the host in parameter shape, in layout order."""
        return self._homes[group].views

    def halves(self, group: int, index: int) -> tuple[Tensor, Tensor]:
        """Wire view of one parameter in its shape, and the lower half of its master, ``[numel]`` int16.

        The second is empty unless the format is split.
        """
        entry = self.groups[group].layout.entries[index]
        return self.host_views(group)[index], self.low(group)[entry.offset : entry.offset + entry.numel]

    def master(self, group: int, index: int) -> Tensor:
        """Exact fp32 value of one parameter, in its shape: the store's own memory for fp32, else a new tensor."""
        view, low = self.halves(group, index)
        if self.format is StoreFormat.SPLIT:
            return join_master(view.view(-1), low).view(view.shape)
        return view.float()

    def write_master(self, group: int, index: int, value: Tensor, mappings: FileMappings | None = None) -> None:
        """Set one parameter's master, and its wire with it.

        Args:
            group: index of the group.
            index: of the parameter in it.
            value: of the same shape and any float dtype.
            mappings: if they hold ``value``, its pages are given back as they are read.
        """
        view, low = self.halves(group, index)
        split = self.format is StoreFormat.SPLIT
        mapped = mappings is not None and mappings.hold(value)
        if split or mapped:
            wire, values = view.view(-1), value.detach().contiguous().view(-1)
            for start in range(0, values.numel(), PART):
                part = slice(start, start + PART)
                if split:
                    split_master_(values[part].to(torch.float32), wire[part], low[part])
                else:
                    wire[part].copy_(values[part])
                if mapped:
                    give_pages_back(values[part])
        else:
            view.copy_(value.detach())
        self.versions[group] += 1

    def write_wire(self, group: int, index: int, value: Tensor) -> None:
        """Set one parameter's wire from ``value`` in its dtype, as somebody does who writes to the parameter itself.

        The lower halves stay: where the wire is what it was, so is the master.
        """
        self.before_write()
        self.host_views(group)[index].copy_(value.detach())
        self.versions[group] += 1

    def release(self) -> None:
        """Give every parameter an ordinary fp32 CPU tensor and the arenas back, group by group."""
        with working("Giving weights back", self.nbytes) as advance:
            while self._homes:
                group = self.groups[len(self._homes) - 1]
                for index, parameter in enumerate(group.parameters):
                    parameter.data = self.master(group.index, index)
                advance(self._homes[-1].nbytes)
                self._homes.pop().close()


class _GroupMoments:
    """Memory of one group's moments."""

    def __init__(self, group: Group, dtype: torch.dtype) -> None:
        layout = group.layout
        first, second = (Arena(layout.trainable_numel * dtype.itemsize) for _ in range(2))
        self.nbytes = first.nbytes + second.nbytes
        self.flat = (first.view(dtype, layout.trainable_numel), second.view(dtype, layout.trainable_numel))
        self.views = [
            (
                first.view(dtype, e.numel, e.offset * dtype.itemsize).view(e.shape),
                second.view(dtype, e.numel, e.offset * dtype.itemsize).view(e.shape),
            )
            for e in layout.entries
            if e.trainable
        ]


class Moments:
    """First and second moments of the trainable parameters of ``groups``: zeros at first, touched, not pinned.

    Args:
        groups: the store's groups.
        dtype: dtype of both moments.
    """

    def __init__(self, groups: Sequence[Group], dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype
        self._groups: list[_GroupMoments] = []
        total = 2 * sum(group.layout.trainable_numel for group in groups) * dtype.itemsize
        with working("Memory for moments", total) as advance:
            for group in groups:
                self._groups.append(_GroupMoments(group, dtype))
                advance(self._groups[-1].nbytes)

    @property
    def nbytes(self) -> int:
        """Host bytes held."""
        return sum(group.nbytes for group in self._groups)

    def relay(self, group: Group) -> None:
        """New memory, zeros, for a group whose layout changed. The old lives on as long as somebody holds views."""
        self._groups[group.index] = _GroupMoments(group, self._dtype)

    def flat(self, group: int) -> tuple[Tensor, Tensor]:
        """Flat first and second moments of a group, ``[trainable_numel]`` each."""
        return self._groups[group].flat

    def views(self, group: int, index: int) -> tuple[Tensor, Tensor]:
        """First and second moment of one trainable parameter, in its shape."""
        return self._groups[group].views[index]


def _others_hold(view: Tensor) -> bool:
    """Whether a tensor besides ``view`` itself shares its storage."""
    use_count = getattr(torch._C, "_storage_Use_Count", None)
    # Besides ours there is the reference that asking creates.
    return use_count is None or use_count(view.untyped_storage()._cdata) > 2


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
