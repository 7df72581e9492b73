"""Where a module's small state lives while its parameters are streamed."""

import torch
from torch import Tensor, nn
from torch.nn import Parameter


class BufferPlacement:
    """Puts everything but parameters on the device: buffers, and the states of metrics.

    Args:
        module: the whole module.
        device: the device that computes.
        float_dtype: dtype that floating-point buffers are cast to, as ``module.to(dtype)`` would; None keeps them.
    """

    def __init__(self, module: nn.Module, device: torch.device, float_dtype: torch.dtype | None) -> None:
        self._module = module
        self._originals: list[tuple[nn.Module, str, Tensor, Tensor, int]] = []
        before = [
            (owner, name, buffer)
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        _move(module, device)
        moved: dict[int, Tensor] = {}
        for owner, name, original in before:
            if id(original) not in moved:
                now = owner._buffers[name]
                assert now is not None
                if float_dtype is not None and now.is_floating_point():
                    now = now.to(float_dtype)
                moved[id(original)] = now
            owner._buffers[name] = moved[id(original)]
            placed = moved[id(original)]
            self._originals.append((owner, name, original, placed, placed._version))

    def restore(self) -> None:
        """Bring everything back to the CPU, in its own dtype; a buffer that nobody changed comes back as it was."""
        for owner, name, original, placed, version in self._originals:
            now = owner._buffers.get(name)
            if now is placed and now._version == version:
                owner._buffers[name] = original
            elif now is not None:
                owner._buffers[name] = now.to("cpu", original.dtype if now.is_floating_point() else now.dtype)
        _move(self._module, torch.device("cpu"))


def _move(module: nn.Module, device: torch.device) -> None:
    # `_apply` is what `.to()` is made of; metrics override it for their states.
    module._apply(lambda t: t.data if isinstance(t, Parameter) else t.to(device))
