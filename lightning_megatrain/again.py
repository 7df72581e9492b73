"""The user's code for one batch, run again with less spent on speed when device memory runs out in it."""

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor

from lightning_megatrain.stream.engine import Engine


class Attempts:
    """Runs a step of the user's until it fits, or nothing is left that could be given back.

    Within a unit the engine sees to that by itself. What runs outside of one (a head, a loss) can only be run again as
    a whole: with the same batch and the same random numbers, but whatever else it does, it does twice.

    Args:
        engine: the engine, in whose step this is.
        begin: begins that step anew.
        step: the user's code with its batch.
    """

    def __init__(self, engine: Engine, begin: Callable[[], None], step: Callable[[], Any]) -> None:
        self._engine = engine
        self._begin = begin
        self._step = step
        self._random_state = engine.streams.random_state()

    def forward(self) -> Any:
        """What the step returns.

        Raises:
            torch.OutOfMemoryError: memory ran out, and nothing was spent on speed.
        """
        found: list[Any] = []
        while not self._fits(lambda: found.append(self._step())):
            self._rewind()
        return found[0]

    def backward(self, module: LightningModule, loss: Tensor, run: Callable[[Tensor], None]) -> None:
        """Run the backward of a step of automatic optimization that made ``loss``.

        As long as none of its gradients has been used, the forward can be run again, too. What that logs is known.

        Args:
            module: the module that is trained.
            loss: as Lightning has it, divided by the number of batches that are accumulated; loses its graph if memory
                runs out.
            run: backward of a loss.

        Raises:
            torch.OutOfMemoryError: memory ran out, and nothing was spent on speed, or gradients were used.
        """
        current = loss
        while not self._fits(partial(run, current), may=lambda: not self._engine.used_gradients):
            loss.detach_()  # Lightning holds it, and so its graph
            current = loss
            self._engine.forget_gradients()
            self._rewind()
            current = self._loss_again(module)

    def _loss_again(self, module: LightningModule) -> Tensor:
        with _nothing_logged(module):
            output = self.forward()
        loss = ClosureResult.from_training_step_output(output, module.trainer.accumulate_grad_batches).closure_loss
        assert loss is not None, "training_step made a loss before, and none now"
        return loss

    def _fits(self, run: Callable[[], None], may: Callable[[], bool] = lambda: True) -> bool:
        try:
            with self._engine.spending():
                run()
        except torch.OutOfMemoryError:
            if not may() or not self._engine.budget.relieve():
                raise
            return False  # and the error with its frames, which hold tensors, is gone
        return True

    def _rewind(self) -> None:
        warnings.warn(
            "Device memory ran out outside the units: what it was spent on is given back, and the step runs again with "
            "the same batch; set a smaller MegaTrainStrategy(device_memory=...) if that happens often.",
            RuntimeWarning,
            stacklevel=2,
        )
        self._begin()
        self._engine.streams.set_random_state(self._random_state)


@contextmanager
def _nothing_logged(module: LightningModule) -> Generator[None, None, None]:
    """``self.log`` does nothing inside."""
    module.__dict__["log"] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        del module.__dict__["log"]
