"""What the strategy can train, and when the update may run: every refusal in one sentence, before anything is held."""

from collections.abc import Sequence

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import LBFGS, Optimizer

from lightning_megatrain.memory.layout import Group
from lightning_megatrain.memory.store import StoreFormat
from lightning_megatrain.update.optimizers import is_per_parameter
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


def choose_schedule(wanted: str, trainer: Trainer, optimizers: Sequence[Optimizer]) -> tuple[Schedule, str]:
    """The schedule to run, and why.

    Raises:
        MisconfigurationException: ``in_backward`` was asked for and something needs all gradients first.
    """
    if wanted == "blocking":
        return "blocking", "as asked"
    obstacle = _needs_all_gradients(trainer, optimizers)
    if obstacle is None:
        return "in_backward", "as asked" if wanted == "in_backward" else "nothing needs all gradients at once"
    if wanted == "in_backward":
        raise MisconfigurationException(
            f"update='in_backward' uses each gradient as it arrives, but {obstacle}; "
            "set MegaTrainStrategy(update='blocking') or 'auto'."
        )
    return "blocking", obstacle


def _needs_all_gradients(trainer: Trainer, optimizers: Sequence[Optimizer]) -> str | None:
    module = trainer.lightning_module
    if not module.automatic_optimization:
        return "the module optimizes manually"
    if len(optimizers) != 1:
        return f"there are {len(optimizers)} optimizers"
    if not is_per_parameter(optimizers[0]):
        return f"{type(optimizers[0]).__name__} is not known to update each parameter by itself"
    if trainer.accumulate_grad_batches != 1 or any(
        isinstance(c, GradientAccumulationScheduler) for c in trainer.callbacks
    ):
        return "gradients are accumulated over batches"
    if trainer.gradient_clip_val:
        return "gradients are clipped"
    for hook in (*_GRADIENT_HOOKS, "configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad", "backward"):
        if is_overridden(hook, module, parent=LightningModule):
            return f"the module overrides {hook}"
    for callback in trainer.callbacks:
        for hook in _GRADIENT_HOOKS:
            if is_overridden(hook, callback, parent=Callback):
                return f"{type(callback).__name__} overrides {hook}"
    return None
