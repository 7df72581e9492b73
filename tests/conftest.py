"""One thread per test process: small tensors gain nothing from more, and parallel workers would fight for the cores."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matmuls on CUDA

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lightning_megatrain.stream.residents import Residents
from lightning_megatrain.stream.unit import Unit


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _data_move_as_to_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter forgets its gradient accumulator when its data move between devices. On a CPU they do not, so they
    are made to pass through another dtype, which has the same effect."""
    bind, to_device = Unit.bind, Residents.to_device

    def forget(parameter: Tensor) -> None:
        parameter.data = parameter.data.new_empty(0, dtype=torch.float64)

    def moving_bind(self: Unit, views: Sequence[Tensor]) -> None:
        for parameter in self.group.parameters:
            forget(parameter)
        bind(self, views)

    def moving_to_device(self: Residents, *, upload: bool = True) -> None:
        for group in self.groups if not self.on_device else ():
            for parameter in group.parameters:
                forget(parameter)
        to_device(self, upload=upload)

    monkeypatch.setattr(Unit, "bind", moving_bind)
    monkeypatch.setattr(Residents, "to_device", moving_to_device)
