"""What the engine asks of whoever uses its gradients."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from lightning_megatrain.memory.layout import Group
from lightning_megatrain.memory.store import GroupMemory, Moments
from lightning_megatrain.stream.streams import Copy


class GradientSink(Protocol):
    """Where gradients go. The engine is given one; it does not know optimizers.

    Attributes:
        overlaps: updates were under way when this step began.
    """

    overlaps: bool

    def destination(self, group: int, last: bool) -> Tensor:
        """Flat host memory ``[trainable_numel]`` to push into; may wait for a free slab."""

    def landed(
        self, group: int, copies: Sequence[Copy], present: Sequence[bool], last: bool, norm: Tensor | None = None
    ) -> None:
        """Copies into the last :meth:`destination` of ``group`` are under way. ``last``: none follow in this step.

        ``norm`` is the Euclidean norm of what was pushed, a scalar on the device, if it was asked for.
        """

    @property
    def wants_norms(self) -> bool:
        """Whether to take norms on the device."""

    @property
    def takes_residents_early(self) -> bool:
        """Whether a resident group is to be pushed as soon as autograd has made its gradients."""

    def updated(self, group: int) -> bool:
        """Whether no update of ``group`` is under way; does not wait."""

    def wait_updated(self, group: int) -> None:
        """Block until no update of ``group`` is under way; raises what the worker raised."""


class DeviceUpdates(Protocol):
    """Who updates groups that the device holds: the engine's sink, as well."""

    def made(
        self,
        group: int,
        gradients: Tensor,
        memory: GroupMemory,
        present: Sequence[bool],
        last: bool,
        norm: Tensor | None = None,
    ) -> None:
        """Flat gradients of a group that the device holds are there: all that this backward has made so far."""

    def wait_updated(self, group: int) -> None:
        """As :meth:`GradientSink.wait_updated`."""

    def may_hold(self, group: Group) -> bool:
        """Whether the group can be updated on the device."""

    def gather_moments(self, group: Group) -> None:
        """Bring moments that somebody put into the optimizer's state to their memory."""

    before_update: Callable[[int], None]
    """To be called with a group before its host bytes are written; may wait."""

    @property
    def moments(self) -> Moments:
        """Host memory of the moments."""
