"""Updating one group of parameters on the host, with the user's own optimizer's rule and state.

The user's ``torch.optim`` optimizer stays the owner of hyperparameters and state: ``param_groups`` are read at every
step and ``optimizer.state[p]`` holds the true tensors, so schedulers, monitors and checkpoints need nothing special.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from lightning_megatrain.memory.layout import Group
from lightning_megatrain.memory.store import GroupMemory, Moments, Store, StoreFormat
from lightning_megatrain.update.adam import AdamScalars, adam_bf16_, adam_split_
from lightning_megatrain.update.device import adam_device_
from lightning_megatrain.update.threads import ThreadPlan

PER_PARAMETER = (Adam, AdamW, SGD, Adafactor, RAdam, NAdam, RMSprop, Adagrad, Adadelta, Adamax, Rprop, ASGD)
"""Optimizers whose step updates every parameter by itself, so that groups may be updated one at a time."""


def is_per_parameter(optimizer: Optimizer) -> bool:
    """Whether each parameter's update depends on that parameter alone. True only for classes known to be so."""
    return type(optimizer) in PER_PARAMETER


def is_adam(optimizer: Optimizer) -> bool:
    """Whether the host kernel's formula is this optimizer's: Adam or AdamW, in every group without ``amsgrad``."""
    return type(optimizer) in (Adam, AdamW) and not any(
        g["amsgrad"] or g["differentiable"] or g["capturable"] for g in optimizer.param_groups
    )


def moment_bytes(optimizers: Sequence[Optimizer], moments_dtype: torch.dtype) -> int:
    """Bytes of state per trainable parameter that the plan should count: two fp32 moments unless it is known better."""
    if all(is_adam(o) for o in optimizers):
        return 2 * moments_dtype.itemsize
    if all(type(o) is SGD and not any(g["momentum"] for g in o.param_groups) for o in optimizers):
        return 0
    if all(type(o) in (SGD, Adagrad, RMSprop) for o in optimizers):
        return 4
    return 0 if all(type(o) is Adafactor for o in optimizers) else 8


Settings = dict[Parameter, dict[str, Any]]
"""Hyperparameters of one step for every parameter of an optimizer."""


class GroupUpdate(ABC):
    """Applies one optimizer to one group at a time, from flat host gradients."""

    def __init__(self, store: Store, optimizer: Optimizer) -> None:
        self._store = store
        self._optimizer = optimizer

    def snapshot(self) -> Settings:
        """The hyperparameters of this step: a scheduler may change the optimizer's while the update runs."""
        taken: Settings = {}
        for param_group in self._optimizer.param_groups:
            settings = {k: v.clone() if isinstance(v, Tensor) else v for k, v in param_group.items() if k != "params"}
            taken.update(dict.fromkeys(param_group["params"], settings))
        return taken

    @abstractmethod
    def update(
        self,
        group: Group,
        settings: Settings,
        gradients: Tensor,
        present: Sequence[bool],
        scale: float = 1.0,
        memory: GroupMemory | None = None,
    ) -> None:
        """Step every parameter of the group that has settings and a gradient.

        Args:
            group: the group.
            settings: what :meth:`snapshot` took at the step's beginning.
            gradients: flat gradients, ``[trainable_numel]``, padding zero, on the device of the group's memory.
            present: per trainable parameter, whether a gradient arrived. Like plain training, one without is left
                alone: no decay, no step count.
            scale: factor on every gradient.
            memory: where the group's weights and moments are; None for the host. Only Adam on the split store takes
                another place.
        """


class AdamUpdate(GroupUpdate):
    """Adam and AdamW on the split and bf16 stores, through the host kernel.

    ``optimizer.state[p]`` is ``{"step": fp32 scalar, "exp_avg": fp32, "exp_avg_sq": fp32}`` with the moments as views
    of their arenas.
    """

    def __init__(
        self,
        store: Store,
        optimizer: Optimizer,
        moments: Moments,
        threads: ThreadPlan | None = None,
        stochastic_seed: int | None = None,
    ) -> None:
        super().__init__(store, optimizer)
        self._moments = moments
        self._threads = threads
        self.stochastic_seed = stochastic_seed
        # A parameter's draws must not depend on where other groups begin, only on its own place in the model.
        sizes = [group.layout.numel for group in store.groups]
        self._first_element = [sum(sizes[:i]) for i in range(len(sizes))]

    def update(  # noqa: D102
        self,
        group: Group,
        settings: Settings,
        gradients: Tensor,
        present: Sequence[bool],
        scale: float = 1.0,
        memory: GroupMemory | None = None,
    ) -> None:
        start: int | None = None
        rule: tuple[AdamScalars, int] | None = None
        end = 0
        # Neighbours that share hyperparameters and step count are updated in one run of the kernel.
        for index, here in enumerate(present):
            parameter = group.parameters[index]
            span = group.layout.span(index)
            owned = here and parameter in settings
            new_rule = self._advance(group, index, settings[parameter]) if owned else None
            if new_rule != rule or start is None:
                if rule is not None and start is not None:
                    self._run(group, slice(start, end), gradients, *rule, scale, memory)
                start, rule = span.start, new_rule
            end = span.stop
        if rule is not None and start is not None:
            self._run(group, slice(start, end), gradients, *rule, scale, memory)

    def _advance(self, group: Group, index: int, settings: dict[str, Any]) -> tuple[AdamScalars, int]:
        """Count the step of one parameter, creating its state on the first; returns its rule."""
        parameter = group.parameters[index]
        state = ensure_moments(self._optimizer, parameter, self._moments.views(group.index, index))
        state["step"] += 1
        beta1, beta2 = settings["betas"]
        scalars = AdamScalars(
            lr=float(settings["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(settings["eps"]),
            weight_decay=float(settings["weight_decay"]),
            decoupled=bool(settings.get("decoupled_weight_decay", type(self._optimizer) is AdamW)),
            maximize=bool(settings["maximize"]),
        )
        return scalars, int(state["step"])

    def _run(
        self,
        group: Group,
        run: slice,
        gradients: Tensor,
        scalars: AdamScalars,
        step: int,
        scale: float,
        memory: GroupMemory | None,
    ) -> None:
        if memory is not None:
            high, low, first, second = (tensor[run] for tensor in memory)
            adam_device_(high, low, first, second, gradients[run], scalars, step, scale)
            return
        first, second = (flat[run] for flat in self._moments.flat(group.index))
        wire = self._store.wire(group.index)[run]
        if self._store.format is StoreFormat.SPLIT:
            low = self._store.low(group.index)[run]
            adam_split_(wire, low, first, second, gradients[run], scalars, step, scale, threads=self._threads)
            return
        adam_bf16_(
            wire,
            first,
            second,
            gradients[run],
            scalars,
            step,
            scale,
            stochastic=self.stochastic_seed is not None,
            seed=self.stochastic_seed or 0,
            offset=self._first_element[group.index] + run.start,
            threads=self._threads,
        )


class TorchUpdate(GroupUpdate):
    """Any per-parameter optimizer through its own ``step``, one parameter at a time.

    A twin of the optimizer, sharing its state, steps a stand-in parameter: the host master itself on the fp32 store,
    a temporary fp32 master on the split store. The user's parameter and its ``grad`` are not touched, so this may run
    while the device already uses the next weights of other groups.
    """

    def __init__(self, store: Store, optimizer: Optimizer, moments: Moments | None) -> None:
        super().__init__(store, optimizer)
        self._moments = moments

    def update(  # noqa: D102
        self,
        group: Group,
        settings: Settings,
        gradients: Tensor,
        present: Sequence[bool],
        scale: float = 1.0,
        memory: GroupMemory | None = None,
    ) -> None:
        assert memory is None
        views = group.layout.views(gradients)
        for index, here in enumerate(present):
            parameter = group.parameters[index]
            if not here or parameter not in settings:
                continue
            if self._moments is not None:
                ensure_moments(self._optimizer, parameter, self._moments.views(group.index, index))
            host = self._store.host_views(group.index)[index]
            master = self._store.master(group.index, index) if self._store.format is StoreFormat.SPLIT else host
            gradient = views[index].to(master.dtype)
            scaled = gradient if scale == 1.0 else gradient * scale
            self._step(parameter, settings[parameter], Parameter(master), scaled)
            if self._store.format is StoreFormat.SPLIT:
                self._store.write_master(group.index, index, master)

    def _step(self, parameter: Parameter, settings: dict[str, Any], stand_in: Parameter, gradient: Tensor) -> None:
        optimizer = self._optimizer
        twin = object.__new__(type(optimizer))
        twin.__dict__.update(optimizer.__dict__)
        # A scheduler leaves a bound `step` in the optimizer's dict, and hooks belong to the whole step.
        for name in ("step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            twin.__dict__.pop(name, None)
        twin._optimizer_step_pre_hooks = {}
        twin._optimizer_step_post_hooks = {}
        twin.state = defaultdict(dict)
        if parameter in optimizer.state:
            twin.state[stand_in] = optimizer.state[parameter]
        twin.param_groups = [{**settings, "params": [stand_in]}]
        stand_in.grad = gradient
        with torch.enable_grad():
            type(optimizer).step(twin)
        if twin.state.get(stand_in):
            optimizer.state[parameter] = twin.state[stand_in]


def ensure_moments(optimizer: Optimizer, parameter: Parameter, moments: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """State of a parameter under Adam, with its moments in ``moments``; what a checkpoint loaded is moved there."""
    state = optimizer.state[parameter]
    if not state:
        state["step"] = torch.tensor(0.0, dtype=torch.float32)
        for moment in moments:
            moment.zero_()
    else:
        for name, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
            if state[name] is not moment:
                moment.copy_(state[name])
    state["exp_avg"], state["exp_avg_sq"] = moments
    return state


def check_optimizer_state(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Refuse a saved state that does not fit, before anything is changed.

    Raises:
        ValueError: the groups do not match, or a state tensor has another shape than its parameter's state must have.
    """
    sizes = [len(g["params"]) for g in optimizer.param_groups]
    saved_sizes = [len(g["params"]) for g in saved["param_groups"]]
    if sizes != saved_sizes:
        raise ValueError(
            f"The checkpoint's optimizer has parameter groups of {saved_sizes} parameters where "
            f"{type(optimizer).__name__} has {sizes}; nothing of it was loaded, so configure the optimizer as in the "
            "run that saved it."
        )
    for key, parameter in _by_id(optimizer, saved).items():
        state = saved["state"].get(key)
        missing = [n for n in ("step", "exp_avg", "exp_avg_sq") if state and n not in state]
        if missing and is_adam(optimizer):
            raise ValueError(
                f"The checkpoint's optimizer state has no {missing[0]!r}, which {type(optimizer).__name__} needs; "
                "nothing of it was loaded, so configure the optimizer as in the run that saved it."
            )
        for name in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            value = saved["state"].get(key, {}).get(name)
            if isinstance(value, Tensor) and value.shape != parameter.shape:
                raise ValueError(
                    f"The checkpoint's {name} has shape {tuple(value.shape)} where the parameter has "
                    f"{tuple(parameter.shape)}, so it belongs to another model; nothing of it was loaded, so use a "
                    "checkpoint of this one."
                )


def _by_id(optimizer: Optimizer, saved: dict[str, Any]) -> dict[Any, Parameter]:
    found: dict[Any, Parameter] = {}
    for saved_group, group in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        found.update(zip(saved_group["params"], group["params"], strict=True))
    return found


def load_optimizer_state(
    optimizer: Optimizer,
    saved: dict[str, Any],
    place: Callable[[Optimizer, Parameter, dict[str, Any]], dict[str, Any]],
) -> None:
    """``optimizer.load_state_dict`` that keeps the dtype of every state tensor, aliases none, and moves none.

    torch casts floating state to the parameter's dtype, which would cut fp32 moments to bf16.

    Args:
        optimizer: the optimizer to fill.
        saved: what ``optimizer.state_dict()`` returned, from this or the stock strategy, and was checked.
        place: given a parameter's saved state, returns the state to keep, sharing no memory with it.
    """
    by_id = _by_id(optimizer, saved)
    optimizer.load_state_dict({"state": {}, "param_groups": saved["param_groups"]})
    for key, state in saved["state"].items():
        if key in by_id:
            optimizer.state[by_id[key]] = place(optimizer, by_id[key], state)
