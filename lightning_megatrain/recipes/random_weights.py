"""Random weights for measurements: made in seconds whatever the size, where and in which dtype they are wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

Model = TypeVar("Model", bound=nn.Module)

NOISE = (1 << 24) - 3
"""Numbers that are drawn; a prime, so that tensors of round sizes do not all begin with the same ones."""

_DEVIATION = 0.02


def without_weights(build: Callable[[], Model]) -> Model:
    """Build a module whose parameters are on the meta device and whose buffers are real.

    A model that is built wholly on the meta device would have lost what its constructors compute, such as the
    frequencies of rotary embeddings.

    Args:
        build: makes the module.
    """

    def hollow(_: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None  # it stays as it is, and so a tied one stays tied
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    handle = register_module_parameter_registration_hook(hollow)  # type: ignore[arg-type]  # it may replace one
    try:
        return build()
    finally:
        handle.remove()


def fill_weights(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give the parameters of :func:`without_weights` memory on a device, and values; buffers go there too.

    Matrices get numbers of a normal distribution, which repeat after :data:`NOISE`, biases zeros and other vectors
    ones. Equal modules get equal values, rounded to `dtype`, on every device. No second copy is made anywhere.

    Args:
        module: the module, in whole.
        device: where to.
        dtype: of the parameters; buffers keep theirs.
    """
    largest = max((p.numel() for p in module.parameters()), default=0)
    # Drawn on the CPU, whose generator gives the same numbers everywhere.
    noise = torch.randn(min(NOISE, largest), generator=torch.Generator().manual_seed(0)) * _DEVIATION
    source = _Cycle(noise.to(device, dtype))
    made: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                values = torch.empty(parameter.shape, dtype=dtype, device=device)
                _fill(name, values, source)
                made[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
            child._parameters[name] = made[id(parameter)]
    module.to(device)


def weight_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Bytes that the parameters take in `dtype`, tied ones once."""
    return sum(p.numel() for p in module.parameters()) * dtype.itemsize


def _fill(name: str, values: Tensor, source: _Cycle) -> None:
    if values.ndim < 2:
        values.fill_(0.0 if "bias" in name else 1.0)
    else:
        source.write(values.view(-1))


class _Cycle:
    """Writes the same numbers again and again, going on where it stopped."""

    def __init__(self, noise: Tensor) -> None:
        self._noise = noise
        self._next = 0

    def write(self, target: Tensor) -> None:
        """Fill a vector."""
        done = 0
        while done < len(target):
            part = self._noise[self._next : self._next + len(target) - done]
            target[done : done + len(part)].copy_(part)
            done += len(part)
            self._next = (self._next + len(part)) % len(self._noise)
