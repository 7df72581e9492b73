"""The user's code for one batch, run again with less spent on speed when device memory runs out in it."""

import copy
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightning_megatrain.checkpoint.rng import random_state, set_random_state
from lightning_megatrain.stream.engine import Engine


class Attempts:
    """Runs a step of the user's until it fits, or nothing is left that could be given back.

    Within a unit the engine sees to that by itself. What runs outside of one (a head, a loss) can only be run again as
    a whole: with the same batch and the same random numbers, but whatever else it does, it does twice.

    Args:
        engine: the engine, in whose step this is.
        begin: begins that step anew.
        step: the user's code.
        args: its arguments: the batch first.
        kwargs: the same.
    """

    def __init__(
        self, engine: Engine, begin: Callable[[], None], step: Callable[..., Any], args: Any, kwargs: Any
    ) -> None:
        self._engine = engine
        self._begin = begin
        self._step = step
        self._random_state = random_state(engine.streams.device)
        self._arguments = args, kwargs
        # A step may take a batch's containers apart.
        leaves, self._spec = tree_flatten((args, kwargs))
        self._leaves = _with_own_mappings(leaves)
        self._versions = self._tensor_versions()
        self._made: list[weakref.ref[Tensor]] = []  # what it returned that has a graph

    def forward(self) -> Any:
        """What the step returns.

        Raises:
            torch.OutOfMemoryError: memory ran out, and nothing was spent on speed or the batch is there no more.
        """
        found: list[Any] = []
        while not self._fits(lambda: found.append(self._run())):
            self._rewind()
        self._made = [weakref.ref(t) for t in tree_leaves(found[0]) if isinstance(t, Tensor) and t.grad_fn is not None]
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
            torch.OutOfMemoryError: memory ran out, and nothing was spent on speed, gradients were used or the batch is
                there no more.
        """
        current = loss
        while not self._fits(partial(run, current), may=lambda: not self._engine.used_gradients):
            # Lightning holds the loss and what else was returned, and those their graph.
            for tensor in (loss, current, *(made() for made in self._made)):
                if tensor is not None and not tensor._is_view():
                    tensor.detach_()
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

    def _run(self) -> Any:
        args, kwargs = self._arguments
        return self._step(*args, **kwargs)

    def _fits(self, run: Callable[[], None], may: Callable[[], bool] = lambda: True) -> bool:
        try:
            with self._engine.spending():
                run()
        except torch.OutOfMemoryError:
            if not may() or not self._has_the_batch() or not self._engine.give_back():
                raise
            return False  # and the error with its frames, which hold tensors, is gone
        return True

    def _has_the_batch(self) -> bool:
        """Whether it is as it was: an iterator has gone on, and what was changed in place is lost."""
        return self._versions == self._tensor_versions() and not any(isinstance(x, Iterator) for x in self._leaves)

    def _tensor_versions(self) -> list[int]:
        return [x._version for x in self._leaves if isinstance(x, Tensor) and not x.is_inference()]

    def _rewind(self) -> None:
        warnings.warn(
            "Device memory ran out outside the units: what it was spent on is given back, and the step runs again with "
            "the same batch; set a smaller MegaTrainStrategy(device_memory=...) if that happens often.",
            RuntimeWarning,
            stacklevel=2,
        )
        self._begin()
        set_random_state(self._random_state, self._engine.streams.device)
        self._arguments = tree_unflatten(_with_own_mappings(self._leaves), self._spec)


def _with_own_mappings(leaves: list[Any]) -> list[Any]:
    """What a tree does not know how to take apart, such as the encoding of a tokenizer, is copied."""
    return [copy.copy(leaf) if isinstance(leaf, MutableMapping) else leaf for leaf in leaves]


@contextmanager
def _nothing_logged(module: LightningModule) -> Generator[None, None, None]:
    """``self.log`` does nothing inside."""
    own = module.__dict__
    before = {"log": own["log"]} if "log" in own else {}
    own["log"] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        del own["log"]
        own.update(before)
