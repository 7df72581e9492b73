"""A data loader that goes on where a checkpoint left it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

_NEVER = -1


class ResumableLoader(DataLoader[Any]):
    """A loader whose place within an epoch is kept in checkpoints; Lightning looks for the two methods of its state.

    For data in memory: batches are made in this process, without workers, and no random number is drawn. Resumed
    batches are not made before they are passed over.

    Args:
        dataset: as of `DataLoader`, and so all others. The order must be a function of the sampler's `epoch` alone.
    """

    _given = 0  # batches of this epoch so far
    _resumed = (_NEVER, 0)  # epoch, and batches of it to pass over

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        epoch, given = self._resumed
        # A checkpoint from an epoch's end is followed by the next epoch, whole.
        self._given = given if epoch == self._epoch else 0
        self._resumed = (_NEVER, 0)
        assert self.batch_sampler is not None
        for indices in islice(self.batch_sampler, self._given, None):
            self._given += 1
            yield self.collate_fn([self.dataset[index] for index in indices])

    @property
    def _epoch(self) -> int:
        return getattr(self.sampler, "epoch", 0)

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and how many of its batches were given."""
        return {"epoch": self._epoch, "given": self._given}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Pass over what was given already when that epoch is next begun."""
        self._resumed = (state_dict["epoch"], state_dict["given"])
