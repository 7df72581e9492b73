"""Bytes, counted before anything is allocated."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_megatrain.memory.host import format_apart, format_bytes
from lightning_megatrain.memory.layout import Group
from lightning_megatrain.memory.store import StoreFormat


@dataclass(frozen=True)
class Plan:
    """What a model will hold, in bytes by item.

    Attributes:
        host: persistent host bytes.
        device: device bytes that the engine itself holds, without activations.
        parameters: elements of all parameters, padding not counted.
    """

    host: dict[str, int]
    device: dict[str, int]
    parameters: int

    @property
    def host_bytes(self) -> int:
        """All host bytes."""
        return sum(self.host.values())

    @property
    def device_bytes(self) -> int:
        """All device bytes of the engine."""
        return sum(self.device.values())

    @property
    def host_bytes_per_parameter(self) -> float:
        """Persistent host bytes (everything but the fixed ring of slabs) per parameter."""
        return (self.host_bytes - self.host["slabs"]) / max(1, self.parameters)

    def require_host(self, available: int, hint: str) -> None:
        """Refuse a plan that does not fit.

        Args:
            available: host bytes this process may take on top of the parameters it already holds.
            hint: what to set instead, as the end of a sentence.

        Raises:
            RuntimeError: needed, available, the two largest items, and the hint.
        """
        if self.host_bytes > available:
            needed, free = format_apart(self.host_bytes, available)
            what = "Training" if self.host_bytes > self.host["weights"] else "Holding"  # to evaluate it
            raise RuntimeError(
                f"{what} {self._size()} needs {needed} of host memory ({_largest(self.host)}), but {free} are "
                f"available; {hint}."
            )

    def require_device(self, available: int) -> None:
        """Refuse a plan whose engine alone does not fit the device.

        Args:
            available: device bytes that are free.

        Raises:
            RuntimeError: needed, available, the two largest items, and what to set.
        """
        if self.device_bytes > available:
            needed, free = format_apart(self.device_bytes, available)
            raise RuntimeError(
                f"Streaming {self._size()} needs {needed} of device memory before activations "
                f"({_largest(self.device)}), but {free} are free; set a smaller prefetch, choose smaller modules with "
                "units=..., or free the device."
            )

    def describe(self) -> str:
        """What will be held, in one line."""
        host = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.host.items() if size)
        device = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.device.items() if size)
        return (
            f"{self._size()}; host {format_bytes(self.host_bytes)} ({host}); device {format_bytes(self.device_bytes)} "
            f"before activations ({device})"
        )

    def _size(self) -> str:
        for size, word in ((1e9, "billion"), (1e6, "million")):
            if self.parameters >= size:
                return f"{self.parameters / size:.3g} {word} parameters"
        return f"{self.parameters:,} parameters"


def _largest(items: dict[str, int]) -> str:
    largest = [(name, size) for name, size in sorted(items.items(), key=lambda item: -item[1])[:2] if size]
    return " and ".join(f"{name} {format_bytes(size)}" for name, size in largest)


def make_plan(
    groups: Sequence[Group],
    store_format: StoreFormat,
    *,
    training: bool,
    moment_bytes: int,
    gradients_coexist: bool,
    gradient_bytes: int | None = None,
    slots: int,
    gradient_buffers: int,
    slabs: int,
    accumulates: bool = False,
) -> Plan:
    """Count the bytes of a run.

    Args:
        groups: units and resident groups.
        store_format: how masters are kept.
        training: False for validation, test and prediction, which hold weights only.
        moment_bytes: bytes of optimizer state per trainable parameter.
        gradients_coexist: every gradient lives in the gradient arena until the step.
        gradient_bytes: bytes of a gradient in the arena; None for the wire's.
        slots: device slots.
        gradient_buffers: device gradient buffers.
        slabs: host slabs.
        accumulates: gradients of several batches are summed, those of resident groups by way of a slab of their own.
    """
    wire = store_format.wire_dtype.itemsize
    units = [g.layout for g in groups if not g.resident]
    residents = [g.layout for g in groups if g.resident]
    unit_numel = max((u.numel for u in units), default=0)
    unit_gradient = max((u.trainable_numel for u in units), default=0)
    trainable = sum(g.layout.trainable_numel for g in groups)
    resident_trainable = sum(r.trainable_numel for r in residents)
    wide_slab = max((r.trainable_numel for r in residents), default=0) if accumulates else 0
    host = {
        "weights": sum(g.layout.numel for g in groups) * store_format.weight_bytes,
        "moments": trainable * moment_bytes if training else 0,
        "gradients": (trainable if gradients_coexist else resident_trainable) * (gradient_bytes or wire) * training,
        "slabs": (slabs * unit_gradient + wide_slab) * wire if training else 0,
    }
    device = {
        "resident weights": sum(r.numel for r in residents) * wire,
        "resident gradients": resident_trainable * wire if training else 0,
        "slots": slots * unit_numel * wire,
        "gradient buffers": gradient_buffers * unit_gradient * wire if training else 0,
    }
    return Plan(host, device, sum(g.layout.parameter_numel for g in groups))
