"""Which hooks of a module or callback somebody has filled in."""

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden


def overrides(owner: Callback | LightningModule, hook: str) -> bool:
    """Whether ``owner`` has an own ``hook``, as a method, or as a callable of any kind set on the instance."""
    parent = LightningModule if isinstance(owner, LightningModule) else Callback
    if hook in vars(owner) and not hasattr(vars(owner)[hook], "__code__"):
        return True  # a callable object, which Lightning's own question cannot handle
    return is_overridden(hook, owner, parent=parent)
