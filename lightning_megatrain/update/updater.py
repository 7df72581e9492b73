"""Gradients in, updated weights out: the schedule of one step's host work."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from lightning_megatrain.memory.layout import Group
from lightning_megatrain.memory.store import GroupMemory, Moments, Store, StoreFormat
from lightning_megatrain.update.gradients import HostGradients, Landing, Use
from lightning_megatrain.update.optimizers import (
    AdamUpdate,
    GroupUpdate,
    Settings,
    TorchUpdate,
    check_optimizer_state,
    ensure_moments,
    is_adam,
    load_optimizer_state,
)
from lightning_megatrain.update.threads import ThreadPlan
from lightning_megatrain.update.worker import Worker

Schedule = Literal["blocking", "next_forward", "in_backward"]


class NonFiniteGradientError(RuntimeError):
    """The norm of the gradients is infinite or not a number."""


class _OnDevice(NamedTuple):
    """Gradients that are on the device, and what they will update there."""

    gradients: Tensor
    memory: GroupMemory
    present: list[bool]
    last: bool
    norm: Tensor | None


class Updater:
    """Runs the user's optimizers on the host.

    - ``blocking``: everything happens in :meth:`step`.
    - ``next_forward``: :meth:`step` hands the gradients over, residents first and then units in forward order, and the
      worker updates them behind the next forward. ``p.grad`` is None from then on.
    - ``in_backward``: each group is updated as its gradients land; ``p.grad`` stays None.

    All three apply the same operations to the same numbers.

    Args:
        store: the adopted store.
        optimizers: the user's optimizers; only ``blocking`` takes more than one.
        schedule: when the update runs.
        pin: register gradient memory with CUDA.
        inline: do the host's share on the calling thread instead of a worker's.
        threads: threads of the host kernel.
        moments_dtype: dtype of Adam's moments on the split and bf16 stores.
        stochastic_seed: round bf16 masters stochastically with this seed; None rounds to nearest.
        sum_dtype: dtype in which gradients of several batches are summed; None for that of the wire.
        nonfinite: ``"raise"``, or ``"skip"`` to leave a step out whole when the norm that clipping needs is not finite.
    """

    def __init__(
        self,
        store: Store,
        optimizers: Sequence[Optimizer],
        schedule: Schedule,
        *,
        pin: bool,
        inline: bool,
        threads: ThreadPlan | None = None,
        moments_dtype: torch.dtype = torch.float32,
        stochastic_seed: int | None = None,
        sum_dtype: torch.dtype | None = None,
        nonfinite: Literal["raise", "skip"] = "raise",
    ) -> None:
        self.schedule = schedule
        self.worker = Worker(inline=inline)
        self._make_gradients = partial(HostGradients, store, self.worker, pin=pin, threads=threads, sum_dtype=sum_dtype)
        self.skipped_steps = 0
        self._store = store
        self._optimizers = list(optimizers)
        self._nonfinite = nonfinite
        adam = any(is_adam(o) for o in optimizers)
        self._moments = Moments(store.groups, moments_dtype) if adam else None
        self._updates = [self._update_for(o, threads, stochastic_seed) for o in optimizers]
        self._lay()
        self.before_update: Callable[[int], None] = lambda group: None
        """Called on the worker, or before a blocking step, before a group's weights and state change; may wait."""
        self._on_device: dict[int, _OnDevice] = {}  # gradients of this backward that wait there
        self._used_outside: set[int] = set()  # groups with parameters that were
        self.overlaps = False
        """Updates were under way when this step began."""
        self._settings: Settings = {}
        self._updated: set[int] = set()
        self._handed_over: set[int] = set()
        self._midway = False
        self._scales: dict[Optimizer, float] = {}  # of the step to come
        self._skips: set[Optimizer] = set()

    def _lay(self) -> None:
        """Follow the layout of the store's groups."""
        self.gradients = self._make_gradients()
        if self.schedule != "in_backward":
            self.gradients.allocate()
        self._home = {p: (g, i) for g in self._store.groups for i, p in enumerate(g.parameters)}

    def relay(self, groups: Iterable[Group]) -> None:
        """The store laid ``groups`` out anew, between two steps and with no update under way.

        Gradients that parameters have already move to their new places when they are used next.
        """
        for group in groups:
            if self._moments is not None:
                self._moments.relay(group)
                for optimizer in filter(is_adam, self._optimizers):
                    self._move_moments(optimizer, group)
        self.gradients.give_back()
        self._handed_over.clear()
        self._lay()

    def _move_moments(self, optimizer: Optimizer, group: Group) -> None:
        """At once and not when they are used: until then the old memory would stay beside the new."""
        assert self._moments is not None
        owned = {id(p) for g in optimizer.param_groups for p in g["params"]}
        for index, parameter in enumerate(group.parameters[: group.layout.trainable_count]):
            if id(parameter) in owned and optimizer.state.get(parameter):
                ensure_moments(optimizer, parameter, self._moments.views(group.index, index))

    def _update_for(self, optimizer: Optimizer, threads: ThreadPlan | None, seed: int | None) -> GroupUpdate:
        if is_adam(optimizer) and self._store.format is not StoreFormat.FP32:
            assert self._moments is not None
            return AdamUpdate(self._store, optimizer, self._moments, threads, seed)
        return TorchUpdate(self._store, optimizer, self._moments if is_adam(optimizer) else None)

    @property
    def moments(self) -> Moments:
        """Memory of Adam's moments."""
        assert self._moments is not None
        return self._moments

    @property
    def nbytes(self) -> int:
        """Persistent host bytes: moments and gradients, slabs not counted."""
        return (self._moments.nbytes if self._moments else 0) + self.gradients.nbytes

    def begin_step(self) -> None:
        """A training step begins, and may read weights outside their units if one did before.

        Raises:
            BaseException: what the worker raised, once.
        """
        if self._used_outside:
            self.drain()
        self.overlaps = not self.worker.idle()

    # Backward

    def before_backward(self) -> None:
        """A backward is about to run."""
        self.worker.require()
        self._clip_pending()
        self._updated.clear()
        self._on_device.clear()
        if self.schedule == "in_backward":
            self._settings = self._updates[0].snapshot()
        for group in self._store.groups:
            if any(p.grad is not None for p in group.parameters):
                self._reclaim(group.index)
        self.gradients.begin(keep=self.schedule != "in_backward")

    def _clip_pending(self) -> None:
        """Gradients that were clipped and not used are about to be added to: round them now, as plain clipping does."""
        for optimizer, scale in self._scales.items():
            for parameter in self._parameters_of(optimizer):
                if parameter.grad is not None and scale < 1:
                    parameter.grad.mul_(scale)
        self._scales.clear()

    def _reclaim(self, group: int) -> None:
        """Wait for an update that still reads the group's gradients, before they are written."""
        if group in self._handed_over:
            self.worker.wait(group)
            self._handed_over.discard(group)

    @property
    def wants_norms(self) -> bool:
        """Whether norms taken on the device before the push are of use."""
        return self.schedule != "in_backward" and self._store.format is not StoreFormat.FP32

    @property
    def takes_residents_early(self) -> bool:
        """Whether a resident group's gradients are wanted as soon as autograd has made them."""
        return self.schedule == "in_backward"

    def destination(self, group: int, last: bool) -> Tensor:
        """Flat host memory, ``[trainable_numel]``, for the next gradients of ``group``; waits for a free slab."""
        self._reclaim(group)
        return self.gradients.destination(group, last, used_at_once=self.schedule == "in_backward")

    def landed(
        self,
        group: int,
        copies: Sequence[Landing],
        present: Sequence[bool],
        last: bool,
        norm: Tensor | None = None,
    ) -> None:
        """Copies into the last :meth:`destination` are under way; see :meth:`HostGradients.landed`.

        Raises:
            RuntimeError: ``in_backward`` already updated the group in this step.
        """
        if group in self._updated:
            raise RuntimeError(
                f"Unit {self._store.groups[group].name!r} got gradients after it was updated: backward ran twice in "
                "one step; set MegaTrainStrategy(update='blocking')."
            )
        update = self.schedule == "in_backward" and last
        self.gradients.landed(group, copies, present, last, norm, self._use(group) if update else None)
        if update:
            self._midway = True
            self._updated.add(group)
            self._store.versions[group] += 1

    def made(
        self,
        group: int,
        gradients: Tensor,
        memory: GroupMemory,
        present: Sequence[bool],
        last: bool,
        norm: Tensor | None = None,
    ) -> None:
        """Gradients of a group that is on the device are there, all that this backward has made so far.

        Args:
            group: index of the group.
            gradients: flat, ``[trainable_numel]``, on the device.
            memory: the group's weights and moments there.
            present: per trainable parameter, whether it got one just now.
            last: no more gradients of this group follow in this backward.
            norm: Euclidean norm of ``gradients``, a scalar on the device, if norms are wanted.
        """
        before = self._on_device[group].present if group in self._on_device else [False] * len(present)
        together = [a or b for a, b in zip(before, present, strict=True)]
        self._on_device[group] = _OnDevice(gradients, memory, together, last, norm)
        if last and self.schedule == "in_backward":
            self._use_on_device(group)

    def _use_on_device(self, group: int) -> None:
        found = self._on_device.pop(group)
        self._midway = True
        self._updated.add(group)
        self._apply(self._store.groups[group], found, self._updates[0], self._settings, found.present)

    def _apply(
        self,
        group: Group,
        found: _OnDevice,
        update: GroupUpdate,
        settings: Settings,
        present: Sequence[bool],
        scale: float = 1.0,
    ) -> None:
        """Update a group whose gradients are on the device: there, or on the host if it has come home since."""
        self._store.versions[group.index] += 1
        if group.index in self._store.lent:
            with self.worker.span("compute", f"update {group.name}", 4 * group.layout.trainable_numel):
                update.update(group, settings, found.gradients, present, scale, found.memory)
        else:
            task = partial(self._update_now, update, group, settings, found.gradients.cpu(), present, scale)
            self.worker.submit(group.index, task)

    def may_hold(self, group: Group) -> bool:
        """Whether a group can be updated on the device.

        Every trainable parameter is Adam's, was stepped before, and has been used inside its unit only.
        """
        if group.index in self._used_outside:
            return False
        optimizer = self._optimizers[0]
        owned = {id(p) for g in optimizer.param_groups for p in g["params"]}
        return group.layout.trainable_count > 0 and all(
            id(p) in owned and optimizer.state.get(p) for p in group.parameters[: group.layout.trainable_count]
        )

    def gather_moments(self, group: Group) -> None:
        """Bring moments that somebody put into the optimizer's state to their memory."""
        self._move_moments(self._optimizers[0], group)

    def _use(self, group: int) -> Use:
        settings, update = self._settings, self._updates[0]

        def use(flat: Tensor, present: list[bool]) -> None:
            self._update_now(update, self._store.groups[group], settings, flat, present)

        return use

    def settle(self) -> None:
        """A backward has run: wait until its gradients are on the host and put them into ``p.grad``.

        Raises:
            RuntimeError: a unit's weights were used outside the unit while updates run in backward.
            BaseException: what the worker raised, once.
        """
        for group in self.gradients.unfinished():  # uses whose backward never came
            self.landed(group, [], self.gradients.missing(group), last=True)
        for group in [g for g, found in self._on_device.items() if not found.last]:
            found = self._on_device[group]
            self.made(group, found.gradients, found.memory, [False] * len(found.present), True, found.norm)
        self.worker.wait()
        used_outside = [
            (group_, group_.layout.entries[index].name)
            for group_, index, parameter in self.gradients.trainable()
            if parameter.grad is not None
        ]
        new = [(group_, name) for group_, name in used_outside if group_.index not in self._used_outside]
        self._used_outside.update(group_.index for group_, _ in new)
        for group_, name in new:
            if group_.index in self._store.lent:
                raise RuntimeError(
                    f"Parameter {name!r} was used outside its unit for the first time since the unit is updated on the "
                    "device; set MegaTrainStrategy(device_update='never')."
                )
            if self.overlaps:
                raise RuntimeError(
                    f"Parameter {name!r} was used outside its unit for the first time, perhaps while it was being "
                    "updated behind the forward; set MegaTrainStrategy(update='blocking')."
                )
        if self.schedule != "in_backward":
            self.gradients.settle()
            return
        for _, name in used_outside:
            raise RuntimeError(
                f"Parameter {name!r} was used outside its unit, so its gradient is complete only when backward ends; "
                "set MegaTrainStrategy(update='blocking')."
            )

    # Step

    def clip_by_norm(self, optimizer: Optimizer, limit: float, *, untouched: bool) -> None:
        """Clip gradients to the Euclidean norm ``limit``, by the factor of ``torch.nn.utils.clip_grad_norm_``.

        On the fp32 store that function's own two halves run, bit for bit. On the others the factor is applied in fp32
        while the gradients are used, instead of rounding them once more.

        Args:
            optimizer: the optimizer about to step.
            limit: largest norm.
            untouched: nobody can have changed ``p.grad`` since the backward.

        Raises:
            NonFiniteGradientError: the norm is not finite, and ``nonfinite`` is ``"raise"``.
        """
        if self._store.format is StoreFormat.FP32:
            parameters = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
            total = get_total_norm([p.grad for p in parameters if p.grad is not None])
            if self._is_finite(float(total), optimizer):
                clip_grads_with_norm_(parameters, limit, total)
            return
        norms = self.gradients.norms(set(self._parameters_of(optimizer)), untouched=untouched)
        norms.update(self._norms_on_device())
        norms = {g.name: norms[g.name] for g in self._store.groups if g.name in norms}  # sums do not depend on places
        norm = math.sqrt(sum(n * n for n in norms.values()))
        if self._is_finite(norm, optimizer, norms):
            self._scales[optimizer] = min(1.0, limit / (norm + 1e-6))

    def _norms_on_device(self) -> dict[str, float]:
        found = {self._store.groups[g].name: held.norm for g, held in self._on_device.items() if held.norm is not None}
        values = torch.stack(list(found.values())).tolist() if found else []
        return dict(zip(found, values, strict=True))

    def _is_finite(self, total: float, optimizer: Optimizer, norms: dict[str, float] | None = None) -> bool:
        if math.isfinite(total):
            self._skips.discard(optimizer)
            return True
        if self._nonfinite == "skip":
            self._skips.add(optimizer)
            return False
        norms = norms or self.gradients.norms(set(self._parameters_of(optimizer)), untouched=False)
        # Backward runs against the order of the groups, so the last bad one is where it began.
        units = {g.name for g in self._store.groups if not g.resident}
        bad = [name for name, norm in norms.items() if not math.isfinite(norm)]
        first = next((n for n in reversed(bad) if n in units), bad[-1] if bad else "unknown")
        raise NonFiniteGradientError(
            f"The norm of the gradients is {total}, first in {first!r} on the way back; nothing was updated. "
            "Lower the learning rate, or set MegaTrainStrategy(nonfinite='skip') to leave such steps out."
        )

    def step(self, optimizer: Optimizer) -> None:
        """The optimizer's step: nothing is under way and ``p.grad`` is final. Runs the optimizer's step hooks."""
        self.worker.require()
        if optimizer in self._skips:
            self._skips.discard(optimizer)
            self._on_device.clear()
            self.skipped_steps += 1
            optimizer._opt_called = True  # type: ignore[attr-defined]
            return
        self._midway = True
        self._run_step(optimizer)
        self._midway = False

    def _run_step(self, optimizer: Optimizer) -> None:
        if self.schedule == "blocking" and self._store.format is StoreFormat.FP32:
            groups = {self._home[p][0].index for p in self._parameters_of(optimizer)}
            for group in groups:
                self.before_update(group)
            self._seed_moments(optimizer)
            with self.worker.span("update", "update", 4 * sum(p.numel() for p in self._parameters_of(optimizer))):
                optimizer.step()
            for group in groups:
                self._store.versions[group] += 1
            return
        # With `in_backward` every group was updated when its gradients landed.
        use = (lambda _: None) if self.schedule == "in_backward" else self._hand_over
        Optimizer.profile_hook_step(use)(optimizer)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # what a scheduler looks for
        if self.schedule == "blocking":
            self.worker.wait()

    def _seed_moments(self, optimizer: Optimizer) -> None:
        """Give parameters that Adam steps for the first time moments that are touched already."""
        if self._moments is None or not is_adam(optimizer):
            return
        for parameter in self._parameters_of(optimizer):
            group, index = self._home[parameter]
            if parameter.grad is not None and index < group.layout.trainable_count:
                ensure_moments(optimizer, parameter, self._moments.views(group.index, index))

    def _hand_over(self, optimizer: Optimizer) -> None:
        """Give the worker one update per group, residents first: the next forward needs them before anything else."""
        update = self._updates[self._optimizers.index(optimizer)]
        settings = update.snapshot()
        scale = self._scales.pop(optimizer, 1.0)
        for group in sorted(self._store.groups, key=lambda g: not g.resident):
            present = []
            for index, parameter in enumerate(group.parameters[: group.layout.trainable_count]):
                present.append(parameter.grad is not None and parameter in settings)
                if present[-1]:
                    self.gradients.keep(group, index, parameter)
                    if self.schedule == "next_forward":
                        parameter.grad = None  # the update reads this memory from now on
            if any(present):
                flat = self.gradients.arena.flat(group.index)
                self._handed_over.add(group.index)
                self._store.versions[group.index] += 1
                self.worker.submit(
                    group.index, partial(self._update_now, update, group, settings, flat, present, scale)
                )
        # Last, for the host's share is on its way meanwhile.
        for index, found in self._on_device.items():
            group = self._store.groups[index]
            present = [here and p in settings for p, here in zip(group.parameters, found.present, strict=False)]
            self._apply(group, found, update, settings, present, scale)
        self._on_device.clear()

    def _update_now(self, update: GroupUpdate, group: Group, *arguments: Any) -> None:
        """On the worker."""
        self.before_update(group.index)
        with self.worker.span("update", f"update {group.name}", 4 * group.layout.trainable_numel):
            update.update(group, *arguments)

    def updated(self, group: int) -> bool:
        """Whether no update of ``group`` is under way, without waiting."""
        return self.worker.idle(group)

    def wait_updated(self, group: int) -> None:
        """Block until no update of ``group`` is under way.

        Raises:
            BaseException: what the worker raised, once.
        """
        self.worker.wait(group)

    def drain(self) -> None:
        """Block until no update is under way.

        Raises:
            BaseException: what the worker raised, once.
        """
        self.worker.wait()

    def finish_updates(self) -> None:
        """Block until no update is under way, and let errors of theirs be: the state is about to be replaced."""
        self.worker.finish()
        self._store.recall(None)

    def come_home(self) -> None:
        """Block until no update is under way and the host's bytes are the true ones.

        Raises:
            BaseException: what the worker raised, once.
        """
        self.drain()
        self._store.recall(None)

    # State

    def counters(self) -> dict[str, int]:
        """What a resumed run must know beyond weights and optimizer state."""
        seeds = {
            u.stochastic_seed for u in self._updates if isinstance(u, AdamUpdate) and u.stochastic_seed is not None
        }
        return {"skipped_steps": self.skipped_steps, **({"stochastic_seed": seeds.pop()} if seeds else {})}

    def set_counters(self, counters: dict[str, Any]) -> None:
        """Go on from :meth:`counters`."""
        self.skipped_steps = counters.get("skipped_steps", 0)
        for update in self._updates:
            if isinstance(update, AdamUpdate) and update.stochastic_seed is not None:
                update.stochastic_seed = counters.get("stochastic_seed", update.stochastic_seed)

    def load_optimizer_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Fill the optimizers from what their ``state_dict()`` returned, moments straight into their arenas.

        The weights were loaded before, so a torn state is whole again afterwards.

        Raises:
            ValueError: a state does not fit; then no optimizer was changed.
        """
        for optimizer, state in zip(self._optimizers, states, strict=False):
            check_optimizer_state(optimizer, state)
        for optimizer, state in zip(self._optimizers, states, strict=False):
            load_optimizer_state(optimizer, state, self._place_state)
        self.worker.forget()
        self._midway = False

    def _place_state(self, optimizer: Optimizer, parameter: Parameter, state: dict[str, Any]) -> dict[str, Any]:
        kept = {k: v.detach() if isinstance(v, Tensor) else v for k, v in state.items()}
        if self._moments is not None and is_adam(optimizer) and parameter in self._home:
            group, index = self._home[parameter]
            if index < group.layout.trainable_count:
                names = ("exp_avg", "exp_avg_sq")
                for name, moment in zip(names, self._moments.views(group.index, index), strict=True):
                    moment.copy_(kept[name])
                    kept[name] = moment
                kept["step"] = kept["step"].clone() if isinstance(kept["step"], Tensor) else kept["step"]
                return kept
        return {k: v.to("cpu", copy=True) if isinstance(v, Tensor) else v for k, v in kept.items()}

    @property
    def torn(self) -> bool:
        """An update failed, or a step was left, half-way: this state must not be saved."""
        return self.worker.failed is not None or self._midway

    def require_whole(self) -> None:
        """Wait for updates under way, bring what is on the device home, and refuse to hand out a torn state.

        Raises:
            RuntimeError: says what happened.
            BaseException: what the worker raised, once.
        """
        self.drain()
        if self.torn:
            raise RuntimeError(
                "The last step was left half-way, so weights and optimizer state do not belong together and are not "
                "saved; go back to an earlier checkpoint with Trainer.fit(ckpt_path=...)."
            ) from self.worker.failed
        self._store.recall(None)

    def reset(self) -> None:
        """After an error elsewhere: let the worker finish what it has and forget the backward under way."""
        self.worker.close()
        self._on_device.clear()
        self.gradients.reset()

    def close(self) -> None:
        """End the worker and give gradient memory back; ``p.grad`` is None afterwards."""
        self.worker.close()
        self.gradients.close()

    def _parameters_of(self, optimizer: Optimizer) -> list[Parameter]:
        return [p for param_group in optimizer.param_groups for p in param_group["params"] if p in self._home]
