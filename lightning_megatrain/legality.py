"""What the strategy can train, and when the update may run: every refusal in one sentence, before anything is held."""

from collections.abc import Sequence

from lightning.pytorch import Trainer, callbacks
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lightning_megatrain.fence import who_looks_between_steps
from lightning_megatrain.hooks import overrides
from lightning_megatrain.memory.host import format_bytes
from lightning_megatrain.memory.layout import Group
from lightning_megatrain.memory.store import StoreFormat
from lightning_megatrain.update.optimizers import is_adam, is_per_parameter
from lightning_megatrain.update.updater import Schedule

_GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step")


def check_model(module: nn.Module) -> None:
    """Refuse models that streaming would train wrongly.

    Raises:
        MisconfigurationException: names the parameter.
    """
    for name, parameter in module.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise MisconfigurationException(
                f"Parameter {name!r} has a post-accumulate-grad hook, which never fires for streamed weights; "
                "remove it and use on_before_optimizer_step, which sees every gradient."
            )
    for name, child in module.named_modules():
        if (
            hasattr(child, "_orig_mod")
            or getattr(child, "_compiled_call_impl", None) is not None
            or getattr(child, "_compiler_ctx", None) is not None
        ):
            raise MisconfigurationException(
                f"{name or type(child).__name__!r} was compiled with torch.compile, whose graphs hold on to weights "
                "that streaming moves; give the trainer the module without torch.compile."
            )
    for name, child in module.named_modules():
        if getattr(child, "gradient_checkpointing", False) is True:
            rank_zero_warn(
                f"{name or 'The model'} has gradient checkpointing on, and units are recomputed anyway; turn it off "
                "to save one forward per step."
            )
            break


def announce_copies(trainer: Trainer, store_format: StoreFormat) -> None:
    """Say what callbacks that average weights take: a model of their own."""
    what = " of the bf16 halves of the weights" if store_format is StoreFormat.SPLIT else ""
    kinds = tuple(
        getattr(callbacks, name)
        for name in ("StochasticWeightAveraging", "WeightAveraging")
        if hasattr(callbacks, name)  # early releases have only the first
    )
    size = sum(p.numel() * 4 for p in trainer.lightning_module.parameters())
    for callback in trainer.callbacks:
        if isinstance(callback, kinds):
            rank_zero_warn(
                f"{type(callback).__name__} keeps an average{what} in a second copy of the model: {format_bytes(size)} "
                "of host memory that the plan does not count; leave room for it, or leave the callback out."
            )


def check_optimizers(optimizers: Sequence[Optimizer], store_format: StoreFormat, groups: Sequence[Group]) -> None:
    """Refuse optimizers whose rule cannot be applied to weights kept on the host.

    Raises:
        MisconfigurationException: names the optimizer and what to use.
    """
    known = {id(p) for group in groups for p in group.parameters}
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if isinstance(optimizer, LBFGS):
            raise MisconfigurationException(
                "LBFGS evaluates the model many times inside one step, which streaming does not support; use AdamW."
            )
        if store_format is not StoreFormat.FP32 and not is_per_parameter(optimizer):
            raise MisconfigurationException(
                f"{name} is not known to update each parameter by itself, which is needed to step a split or bf16 "
                "master unit by unit; use torch.optim.AdamW, or set precision='32-true'."
            )
        foreign = any(id(p) not in known for g in optimizer.param_groups for p in g["params"])
        if foreign and store_format is not StoreFormat.FP32:
            raise MisconfigurationException(
                f"{name} holds a parameter that is not part of the LightningModule; make it an attribute of the module."
            )


def choose_schedule(
    wanted: str, trainer: Trainer, optimizers: Sequence[Optimizer], *, on_cpu: bool
) -> tuple[Schedule, str]:
    """The schedule to run, and why.

    Args:
        wanted: a schedule, or ``"auto"`` for the fastest that is legal.
        trainer: the trainer about to fit.
        optimizers: its optimizers.
        on_cpu: the CPU computes, so that an update has nothing to hide behind.

    Raises:
        MisconfigurationException: the schedule asked for is not legal.
    """
    if wanted == "blocking":
        return "blocking", "as asked"
    for_all = _owns_its_step(trainer, optimizers)
    needs_all = for_all or _needs_all_gradients(trainer)
    obstacles = {"in_backward": needs_all, "next_forward": for_all}
    if wanted != "auto":
        if (obstacle := obstacles[wanted]) is not None:
            what = "each gradient as it arrives" if wanted == "in_backward" else "the gradients after the step"
            raise MisconfigurationException(
                f"update={wanted!r} uses {what}, but {obstacle}; set MegaTrainStrategy(update='blocking') or 'auto'."
            )
        return ("in_backward" if wanted == "in_backward" else "next_forward"), "as asked"
    if needs_all is None:
        return "in_backward", "nothing needs all gradients at once"
    if for_all is None and not on_cpu:
        return "next_forward", needs_all
    return "blocking", for_all or f"{needs_all}, and the CPU has nothing to hide an update behind"


def _owns_its_step(trainer: Trainer, optimizers: Sequence[Optimizer]) -> str | None:
    """Why the step must be over when ``optimizer.step()`` returns."""
    module = trainer.lightning_module
    if not module.automatic_optimization:
        return "the module optimizes manually"
    if len(optimizers) != 1:
        return f"there are {len(optimizers)} optimizers"
    if not is_per_parameter(optimizers[0]):
        return f"{type(optimizers[0]).__name__} is not known to update each parameter by itself"
    known = {id(p) for p in module.parameters()}
    if any(id(p) not in known for group in optimizers[0].param_groups for p in group["params"]):
        return "the optimizer holds a parameter that is not part of the module"
    if optimizers[0]._optimizer_step_pre_hooks or optimizers[0]._optimizer_step_post_hooks:
        return "the optimizer has step hooks"
    if overrides(module, "optimizer_step"):
        return "the module overrides optimizer_step"
    return None


def _needs_all_gradients(trainer: Trainer) -> str | None:
    """Why no gradient may be used before all have been made."""
    module = trainer.lightning_module
    if accumulates(trainer):
        return "gradients are accumulated over batches"
    if trainer.gradient_clip_val:
        return "gradients are clipped"
    for hook in (*_GRADIENT_HOOKS, "configure_gradient_clipping", "optimizer_zero_grad", "backward"):
        if overrides(module, hook):
            return f"the module overrides {hook}"
    for callback in trainer.callbacks:
        for hook in _GRADIENT_HOOKS:
            if overrides(callback, hook):
                return f"{type(callback).__name__} overrides {hook}"
    return None


def check_still_legal(trainer: Trainer, schedule: Schedule, *, on_device: bool) -> None:
    """Refuse what a callback asks of the trainer during fit when updates that do not wait for it were chosen already.

    Args:
        trainer: the trainer, about to train a batch.
        schedule: what was chosen.
        on_device: groups may be updated on the device.

    Raises:
        MisconfigurationException: names the argument, and what to set.
    """
    if trainer.fit_loop._skip_backward:  # averaging callbacks pass over the data once more, without training
        return
    sums, clips = accumulates(trainer), bool(trainer.gradient_clip_val)
    settings = []
    if (sums or clips) and schedule == "in_backward":
        settings.append("update='blocking'")
    if (sums or _clips_values(trainer)) and on_device:
        settings.append("device_update='never'")
    if settings:
        name = "accumulate_grad_batches" if sums else "gradient_clip_val"
        raise MisconfigurationException(
            f"{name} became {getattr(trainer, name)} during fit, when updates had been chosen that cannot follow; give "
            f"it to the Trainer, or set MegaTrainStrategy({', '.join(settings)})."
        )


def accumulates(trainer: Trainer) -> bool:
    """Whether gradients of several batches are, or may come to be, summed for one step."""
    return trainer.accumulate_grad_batches != 1 or any(
        isinstance(c, GradientAccumulationScheduler) for c in trainer.callbacks
    )


def gradients_stay_untouched(trainer: Trainer) -> bool:
    """Whether no hook could change ``p.grad`` between the backward and clipping."""
    module = trainer.lightning_module
    hooks = (*_GRADIENT_HOOKS, "on_before_zero_grad")
    return not (
        any(overrides(module, h) for h in (*hooks, "configure_gradient_clipping", "backward"))
        or any(overrides(c, h) for c in trainer.callbacks for h in hooks)
        or not module.automatic_optimization
    )


def _has_step_hooks(optimizer: Optimizer) -> bool:
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return any((*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))


def _clips_values(trainer: Trainer) -> bool:
    return bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm == "value"


def may_update_on_device(trainer: Trainer, optimizers: Sequence[Optimizer], store_format: StoreFormat) -> bool:
    """Whether groups may be updated on the device: nobody expects their gradients or optimizer state on the host."""
    return (
        store_format is StoreFormat.SPLIT
        and len(optimizers) == 1
        and is_adam(optimizers[0])
        and not accumulates(trainer)
        and gradients_stay_untouched(trainer)
        and not _clips_values(trainer)
        and not _has_step_hooks(optimizers[0])
        and not any(overrides(trainer.lightning_module, hook) for hook in ("optimizer_step", "optimizer_zero_grad"))
        and who_looks_between_steps(trainer) is None
    )
