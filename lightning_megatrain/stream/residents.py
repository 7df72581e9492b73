"""Parameters outside any unit: their compute weights stay on the device through a step."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_megatrain.memory.layout import Group
from lightning_megatrain.memory.store import Store
from lightning_megatrain.stream.streams import Copy, Event, Streams


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
            self._flat = [torch.empty(g.layout.numel, dtype=dtype, device=streams.device) for g in self.groups]
        self._views = [g.layout.views(flat) for g, flat in zip(self.groups, self._flat, strict=True)]
        self.on_device = False
        self.lent = 0  # modules that have device copies outside a step
        self._versions: dict[int, int] = {}  # of the parameters, when their data became the device's
        self._released = Event()

    @property
    def nbytes(self) -> int:
        """Device bytes held."""
        return sum(flat.nbytes for flat in self._flat)

    def to_device(self, *, upload: bool = True) -> None:
        """Make the parameters' data the device copies, refreshed from the host unless ``upload`` is False."""
        if self.on_device:
            return
        if upload:
            copies = [
                self._streams.copy("fetch", flat, self._store.wire(group.index), after=[self._released])
                for group, flat in zip(self.groups, self._flat, strict=True)
            ]
            for copy in copies:
                self._streams.compute_after(copy.done)
        for group, views in zip(self.groups, self._views, strict=True):
            for parameter, view in zip(group.parameters, views, strict=True):
                parameter.data = view
                self._versions[id(parameter)] = parameter._version
        self.on_device = True

    def to_host(self) -> None:
        """Make the parameters' data the host's wire again."""
        self.lent = 0
        if not self.on_device:
            return
        self._released = self._streams.record()
        for group, on_device in zip(self.groups, self._views, strict=True):
            for index, parameter in enumerate(group.parameters):
                version, moved = self._versions[id(parameter)], parameter.data_ptr() != on_device[index].data_ptr()
                if moved or parameter._version != version:  # somebody wrote to the device's copy
                    self._store.write_wire(group.index, index, parameter.data)
            self._store.show(group)
        self.on_device = False

    def lend(self, module: nn.Module) -> None:
        """Outside a step: device copies for the parameters that ``module`` itself holds, until :meth:`take_back`."""
        self.lent += 1
        own = {id(p) for p in module.parameters(recurse=False)}
        for group, flat, views in zip(self.groups, self._flat, self._views, strict=True):
            if not any(id(p) in own for p in group.parameters):
                continue
            copy = self._streams.copy("fetch", flat, self._store.wire(group.index), after=[self._released])
            self._streams.compute_after(copy.done)
            for parameter, view in zip(group.parameters, views, strict=True):
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
            for parameter, view in zip(group.parameters, self._store.host_views(group.index), strict=True):
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
