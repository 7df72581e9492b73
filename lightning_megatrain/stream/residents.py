"""Parameters outside any unit: their compute weights stay on the device through a step."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_megatrain.memory.layout import Group
from lightning_megatrain.memory.store import Store
from lightning_megatrain.stream.streams import Copy, Streams


class Residents:
    """Device copies of the resident groups.

    Outside a step ``parameter.data`` is the host's wire, so whoever reads or writes a weight between steps meets the
    true one. :meth:`to_device` uploads the wire and swaps the device copies in; :meth:`to_host` swaps back.
    """

    def __init__(self, groups: Sequence[Group], store: Store, streams: Streams) -> None:
        self.groups = tuple(g for g in groups if g.resident)
        self._store = store
        self._streams = streams
        dtype = store.format.wire_dtype
        with torch.inference_mode(False):
            self._flat = {g.index: torch.empty(g.layout.numel, dtype=dtype, device=streams.device) for g in self.groups}
        self._views = {g.index: g.layout.views(self._flat[g.index]) for g in self.groups}
        self.on_device = False
        self.lent = 0  # modules that have device copies outside a step
        self._versions: dict[int, int] = {}  # of the parameters, when their data became the device's
        self._given: set[int] = set()  # groups whose update may have begun while their data are the device's
        self._released = streams.record()  # what had this memory before is done with it

    @property
    def nbytes(self) -> int:
        """Device bytes held."""
        return sum(flat.nbytes for flat in self._flat.values())

    def flat(self, group: Group) -> Tensor:
        """The device copy of a group's wire, ``[numel]``."""
        return self._flat[group.index]

    def views(self, group: Group) -> list[Tensor]:
        """The same, in parameter shape."""
        return self._views[group.index]

    def to_device(self, *, upload: bool = True) -> None:
        """Make the parameters' data the device copies, refreshed from the host unless ``upload`` is False."""
        if self.on_device:
            return
        if upload:
            copies = [
                self._streams.copy("fetch", self.flat(group), self._store.wire(group.index), after=[self._released])
                for group in self.groups
                if group.index not in self._store.lent
            ]
            for copy in copies:
                self._streams.compute_after(copy.done)
        for group in self.groups:
            for parameter, view in zip(group.parameters, self._views[group.index], strict=True):
                parameter.data = view
                self._versions[id(parameter)] = parameter._version
        self.on_device = True

    def to_host(self) -> list[str]:
        """Make the parameters' data the host's wire again.

        Returns:
            Names of parameters that were written to on the device after :meth:`give`: their values are lost.
        """
        self.lent = 0
        if not self.on_device:
            return []
        self._released = self._streams.record()
        self.on_device = False
        lost: list[str] = []
        for group in self.groups:
            written = self._written(group)
            if group.index in self._given:
                lost += [group.layout.entries[index].name for index in written]
            else:
                self._write(group, written)
            self._store.show(group)
        self._given.clear()
        return lost

    def give(self, group: Group) -> None:
        """An update of ``group`` may begin before :meth:`to_host`: what was written to the device goes first."""
        self._write(group, self._written(group))
        self._given.add(group.index)

    def _written(self, group: Group) -> list[int]:
        """Which parameters' device copies somebody wrote to, or put another tensor in the place of."""
        pairs = zip(group.parameters, self._views[group.index], strict=True)
        return [
            index
            for index, (parameter, view) in enumerate(pairs)
            if parameter._version != self._versions[id(parameter)] or parameter.data_ptr() != view.data_ptr()
        ]

    def _keep_for_others(self, view: Tensor) -> None:
        """Other parameters may have been given this memory, which is about to be written (a swap)."""
        for group in self.groups:
            for parameter, own in zip(group.parameters, self._views[group.index], strict=True):
                if parameter.data_ptr() == view.data_ptr() != own.data_ptr():
                    parameter.data = parameter.data.clone()

    def _write(self, group: Group, written: Sequence[int]) -> None:
        for index in written:
            parameter, view = group.parameters[index], self._views[group.index][index]
            if parameter.data_ptr() != view.data_ptr():
                self._keep_for_others(view)
                view.copy_(parameter.data)
                parameter.data = view
            if group.index not in self._store.lent:
                self._store.write_wire(group.index, index, view)
            self._versions[id(parameter)] = parameter._version

    def lend(self, module: nn.Module) -> None:
        """Outside a step: device copies for the parameters that ``module`` itself holds, until :meth:`take_back`."""
        self.lent += 1
        own = {id(p) for p in module.parameters(recurse=False)}
        for group in self.groups:
            if group.index in self._store.lent or not any(id(p) in own for p in group.parameters):
                continue
            copy = self._streams.copy("fetch", self.flat(group), self._store.wire(group.index), after=[self._released])
            self._streams.compute_after(copy.done)
            for parameter, view in zip(group.parameters, self._views[group.index], strict=True):
                if id(parameter) in own:
                    parameter.data = view

    def take_back(self, module: nn.Module) -> None:
        """After what :meth:`lend` was for: host views again. Does nothing in a step."""
        if self.on_device or not self.lent:
            return
        self.lent -= 1
        self._released = self._streams.record()
        own = {id(p) for p in module.parameters(recurse=False)}
        for group in self.groups:
            for parameter, view in zip(group.parameters, self._store.at_rest(group.index), strict=True):
                if id(parameter) in own:
                    parameter.data = view

    def take_gradients(self, group: Group) -> list[Tensor | None]:
        """Take autograd's gradients off a group's trainable parameters."""
        return [_take(p) for p in group.parameters[: group.layout.trainable_count]]

    def push(self, group: Group, gradients: Sequence[Tensor | None], target: Tensor) -> list[Copy]:
        """Start copying gradients into ``target`` (flat, ``[trainable_numel]``) at their offsets; zeros for None."""
        made = self._streams.record()
        copies = []
        for view, gradient in zip(group.layout.views(target), gradients, strict=True):
            if gradient is None:
                view.zero_()
            else:
                copies.append(self._streams.copy("push", view, gradient, after=[made]))
        return copies


def _take(parameter: Parameter) -> Tensor | None:
    gradient, parameter.grad = parameter.grad, None
    return gradient
