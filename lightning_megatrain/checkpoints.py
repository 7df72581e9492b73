"""What the strategy does with checkpoints: which format, what is in them, and when they are written and read."""

import copy
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatrain.checkpoint.files import (
    is_local,
    recover,
    remove_leftovers,
    require_replaceable,
    written_whole,
)
from lightning_megatrain.checkpoint.lazy import (
    LazyTensor,
    SplitSource,
    TensorSource,
    Watched,
    kept_in_copies,
    memory_of,
)
from lightning_megatrain.checkpoint.loading import (
    check_state_dict,
    materialize_meta,
    reading,
    state_like,
    widen,
    with_missing,
)
from lightning_megatrain.checkpoint.rng import random_state, set_random_state
from lightning_megatrain.checkpoint.saver import Saver
from lightning_megatrain.checkpoint.sharded import FILES, is_sharded, read_sharded, write_sharded
from lightning_megatrain.checkpoint.single import parts_of, read_single, write_single
from lightning_megatrain.fence import who_may_write
from lightning_megatrain.memory.host import format_bytes
from lightning_megatrain.memory.mapped import FileMappings
from lightning_megatrain.memory.store import Store, StoreFormat

CheckpointFormat = Literal["auto", "ckpt", "sharded"]

SHARDED_FROM = 32 * 2**30
"""Bytes of weights and optimizer state from which ``checkpoint_format="auto"`` writes sharded checkpoints."""

KEY = "megatrain"
"""Where a checkpoint keeps what only this strategy knows."""


class Checkpoints:
    """Writes and reads the strategy's checkpoints.

    Args:
        checkpoint_format: the format to write; any is read.
        exclude_frozen: leave parameters out that do not train.
        save_async: write beside training where that is safe.
    """

    def __init__(self, checkpoint_format: CheckpointFormat, *, exclude_frozen: bool, save_async: bool) -> None:
        self._format = checkpoint_format
        self._exclude_frozen = exclude_frozen
        self._save_async = save_async
        self._beside = False
        self._said = False
        self._path: str | os.PathLike[str] = ""
        self._random: dict[str, Any] | None = None
        self.saver = Saver()

    def prepare(self, trainer: Trainer) -> None:
        """A fit begins: find out whether checkpoints may be written beside it."""
        self._beside = self._save_async
        if not self._save_async:
            return
        obstacle = who_may_write(trainer)
        if any(isinstance(c, ModelCheckpoint) and c.save_last == "link" for c in trainer.callbacks):
            obstacle = "ModelCheckpoint(save_last='link') links to a checkpoint as soon as it is begun"
        if any(getattr(logger, "_log_model", False) for logger in trainer.loggers):
            obstacle = "a logger uploads checkpoints as soon as they are begun"
        if obstacle is not None:
            self._beside = False
            rank_zero_info(f"megatrain: checkpoints are written before training goes on, because {obstacle}")

    def finish(self) -> None:
        """A fit is over: wait for what is being written. From now on nothing runs that a save could be beside.

        Raises:
            BaseException: an error of the save.
        """
        self._beside = False
        self._random = None
        self.saver.wait()

    # Contents

    def model_state(
        self, module: nn.Module, state: dict[str, Any], store: Store | None, optimizers: Iterable[Optimizer]
    ) -> dict[str, Any]:
        """The state of a module in which every master is exact, and without what is to be left out."""
        named = dict(module.named_parameters(remove_duplicate=False))
        if store is not None and store.format is StoreFormat.SPLIT:
            homes = {id(p): (g.index, i) for g in store.groups for i, p in enumerate(g.parameters)}
            masters: dict[int, Tensor] = {}  # tied names share one tensor
            for name in state.keys() & named.keys():
                key = id(named[name])
                if key not in masters:
                    masters[key] = LazyTensor(SplitSource(*store.halves(*homes[key])))
                state[name] = masters[key]
        for name in self._excluded(module, optimizers):
            state.pop(name, None)
        return state

    def _excluded(self, module: nn.Module, optimizers: Iterable[Optimizer]) -> list[str]:
        """Names of parameters to leave out: those that do not train, and did not either."""
        if not self._exclude_frozen:
            return []
        trained = {id(p) for optimizer in optimizers for p, state in optimizer.state.items() if state}
        named = module.named_parameters(remove_duplicate=False)
        return sorted(n for n, p in named if not p.requires_grad and id(p) not in trained)

    def note(self, checkpoint: dict[str, Any], trainer: Trainer, own: dict[str, Any], device: torch.device) -> None:
        """Add what a resumed run needs beyond Lightning's own state."""
        module = trainer.lightning_module
        noted: dict[str, Any] = {}
        if self._exclude_frozen:
            noted["excluded"] = self._excluded(module, trainer.strategy.optimizers)
        if "optimizer_states" in checkpoint:
            progress = trainer.fit_loop.epoch_loop.batch_progress
            noted |= {
                **own,
                "random_state": random_state(device),
                "mid_epoch": progress.current.ready > 0 and not progress.is_last_batch,
            }
        checkpoint[KEY] = noted

    # Saving

    def save(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        *,
        groups_of: Callable[[], dict[int, int]],
        order: Mapping[int, int],
    ) -> None:
        """Write a checkpoint, beside training where that was found safe.

        Args:
            checkpoint: what Lightning made of the trainer's state.
            path: where to.
            groups_of: gives, by ``id``, the group whose update changes a tensor of the checkpoint.
            order: rank of each group: those with lower ones are wanted back first.

        Raises:
            ValueError: a sharded checkpoint was asked for on a file system that is not local, or the path is a folder
                that holds something else.
            BaseException: an error of the save before this one, after this one was begun.
        """
        failed = self.saver.join()
        try:
            self._save(checkpoint, path, groups_of, order)
        finally:
            if failed is not None and sys.exc_info()[1] is None:
                raise failed
            if failed is not None:  # somebody rescues what can be rescued: their error counts
                rank_zero_warn(
                    f"The checkpoint before this one was not written ({failed!r}); see to the cause before you rely on "
                    "later ones."
                )

    def _save(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        groups_of: Callable[[], dict[int, int]],
        order: Mapping[int, int],
    ) -> None:
        sharded = self._is_sharded(checkpoint)
        if not is_local(path):
            if sharded and self._format == "sharded":
                raise ValueError(
                    f"Sharded checkpoints are written to the local file system, and {os.fspath(path)} is not on it; "
                    "set MegaTrainStrategy(checkpoint_format='ckpt') or a local ModelCheckpoint(dirpath=...)."
                )
            with get_filesystem(path).open(path, "wb") as file:
                write_single(checkpoint, file)
            return
        target = Path(path).absolute()
        require_replaceable(target, FILES, hint="another path for the checkpoint")
        ranks: dict[int, int] = {}
        if not self._beside:
            _write(checkpoint, target, sharded=sharded, ranks=ranks)
            return
        try:
            snapshot = self._snapshot(checkpoint, groups_of(), order, ranks, once=not sharded)
            self.saver.start(partial(_write, snapshot, target, sharded=sharded, ranks=ranks))
        except BaseException:
            self.saver.let_all_go()
            raise

    def _is_sharded(self, checkpoint: dict[str, Any]) -> bool:
        if self._format != "auto":
            return self._format == "sharded"
        size = sum(t.numel() * t.element_size() for t in _tensors(checkpoint))
        if size >= SHARDED_FROM and not self._said:
            self._said = True
            rank_zero_info(
                f"megatrain: checkpoints of {format_bytes(size)} are written as folders (sharded); "
                "`megatrain export` makes single files of them"
            )
        return size >= SHARDED_FROM

    def _snapshot(
        self,
        checkpoint: dict[str, Any],
        groups: dict[int, int],
        order: Mapping[int, int],
        ranks: dict[int, int],
        *,
        once: bool,
    ) -> dict[str, Any]:
        """The checkpoint as it is now: small things copied, and the groups of the others held until they are read.

        Args:
            checkpoint: the checkpoint.
            groups: the group of each tensor, by ``id``.
            order: rank of each group.
            ranks: filled with the rank of each watched tensor, by ``id``.
            once: a tensor under two names is read once.
        """
        watched: dict[Any, LazyTensor] = {}

        def watch(tensor: Any) -> Any:
            group = groups.get(id(tensor)) if isinstance(tensor, Tensor) and tensor.dim() else None
            if group is None:
                return tensor
            lazy = isinstance(tensor, LazyTensor)
            # Tied weights come as several tensors over the same memory.
            place = id(tensor) if lazy else memory_of(tensor)
            key = place if once else len(watched)
            if key not in watched:
                source = tensor.source if lazy else TensorSource(tensor)
                watched[key] = LazyTensor(Watched(source, self.saver.hold(group)))
                ranks[id(watched[key])] = order[group]
            return watched[key]

        state = copy.copy(checkpoint["state_dict"])
        for name, value in state.items():
            state[name] = watch(value)
        snapshot = {**checkpoint, "state_dict": state}
        if "optimizer_states" in checkpoint:
            snapshot["optimizer_states"] = [
                {**o, "state": {k: {n: watch(v) for n, v in s.items()} for k, s in o["state"].items()}}
                for o in checkpoint["optimizer_states"]
            ]
        with kept_in_copies({id(lazy) for lazy in watched.values()}):
            return copy.deepcopy(snapshot)

    # Loading

    def load(self, path: str | os.PathLike[str], *, weights_only: bool | None) -> dict[str, Any]:
        """Read a checkpoint of either format; large tensors take memory when they are used.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is not whole, or not a checkpoint.
        """
        self.saver.wait()
        with suppress(OSError):  # a folder that may only be read
            recover(Path(path).absolute())
            remove_leftovers(Path(path).absolute().parent)
        if not os.path.exists(path):
            raise FileNotFoundError(
                f"Checkpoint {os.fspath(path)} does not exist; set ckpt_path to a .ckpt file or a sharded folder."
            )
        if is_sharded(path):
            checkpoint = read_sharded(Path(path), weights_only=weights_only)
        else:
            checkpoint = read_single(path, weights_only=weights_only)
        missing = [key for key in ("state_dict", "pytorch-lightning_version") if key not in checkpoint]
        if missing:
            raise ValueError(
                f"{self._source} has no {missing[0]!r}, so it is not a Lightning checkpoint; use another one."
            )
        return checkpoint

    def load_model(
        self, module: LightningModule, checkpoint: Mapping[str, Any], *, strict: bool, at_home: bool
    ) -> Mapping[str, Any]:
        """Load a module's state whole or not at all.

        Args:
            module: the module.
            checkpoint: the checkpoint.
            strict: as for ``load_state_dict``.
            at_home: whether the parameters are ordinary ones, which may become wider, and not the store's.

        Returns:
            The state that was loaded, by name.

        Raises:
            RuntimeError: it belongs to another model.
        """
        mappings = FileMappings()
        state = with_missing(module, checkpoint["state_dict"], checkpoint.get(KEY, {}).get("excluded", ()))
        check_state_dict(module, state, strict=strict, source=self._source)
        materialize_meta(module, loaded=checkpoint["state_dict"].keys())
        values = {k: parts_of(v, mappings) if isinstance(v, Tensor) else v for k, v in state.items()}
        if at_home:
            widen(module, values)
        with reading("Loading weights", values) as told:
            module.load_state_dict(state_like(state, told), strict=strict)
        return values

    def optimizer_states(self, checkpoint: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The saved states of the optimizers, with tensors whose pages are given back as they are read."""
        mappings = FileMappings()

        def mapped(values: dict[str, Any]) -> dict[str, Any]:
            return {k: parts_of(v, mappings) if isinstance(v, Tensor) else v for k, v in values.items()}

        return [{**o, "state": {k: mapped(s) for k, s in o["state"].items()}} for o in checkpoint["optimizer_states"]]

    @property
    def _source(self) -> str:
        return f"Checkpoint {os.fspath(self._path)}"

    def comes_from(self, path: str | os.PathLike[str]) -> None:
        """What is loaded next comes from ``path``."""
        self._path = path

    def resume(self, checkpoint: Mapping[str, Any], trainer: Trainer) -> dict[str, Any]:
        """A run resumes from ``checkpoint``: its random numbers will go on when training begins.

        Returns:
            What :meth:`note` was given.
        """
        noted: dict[str, Any] = checkpoint.get(KEY, {})
        self._random = noted if "random_state" in noted else None
        if self._random is not None and not self._random["mid_epoch"]:
            trainer.callbacks.insert(0, _AfterLoaders(self))
        return noted

    def before_loader(self, device: torch.device) -> None:
        """A data loader is about to be used: between epochs, its order is the first thing drawn after the save."""
        if self._random is not None and not self._random["mid_epoch"]:
            set_random_state(self._random["random_state"], device)

    def before_batches(self, device: torch.device) -> None:
        """Training begins, and hooks for that may have drawn; the run that saved had that behind it.

        In the middle of an epoch, a batch is the first thing after the save.
        """
        if self._random is not None:
            set_random_state(self._random["random_state"], device)
        self._random = None


class _AfterLoaders(Callback):
    """First to hear that training begins: notes the random numbers as the loaders left them."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note them."""
        random = self._checkpoints._random
        if random is not None:
            random["random_state"] = random_state(trainer.strategy.root_device)
        trainer.callbacks = [c for c in trainer.callbacks if c is not self]


def groups_of_tensors(
    store: Store, module: nn.Module, state: Mapping[str, Any], optimizers: Iterable[Optimizer]
) -> dict[int, int]:
    """By ``id``: the group whose update changes a tensor of a model's state or an optimizer's."""
    homes = {id(p): g.index for g in store.groups for p in g.parameters}
    named = dict(module.named_parameters(remove_duplicate=False))
    found = {id(value): homes[id(named[name])] for name, value in state.items() if name in named}
    for optimizer in optimizers:
        for parameter, values in optimizer.state.items():
            if id(parameter) in homes:
                found.update((id(v), homes[id(parameter)]) for v in values.values() if isinstance(v, Tensor))
    return found


def _write(checkpoint: dict[str, Any], target: Path, *, sharded: bool, ranks: Mapping[int, int]) -> None:
    with written_whole(target) as partial_path:
        if sharded:
            write_sharded(checkpoint, partial_path, order=lambda tensor: ranks.get(id(tensor), -1))
        else:
            write_single(checkpoint, partial_path)


def _tensors(checkpoint: Mapping[str, Any]) -> Iterable[Tensor]:
    yield from (v for v in checkpoint.get("state_dict", {}).values() if isinstance(v, Tensor))
    for optimizer in checkpoint.get("optimizer_states", ()):
        for values in optimizer["state"].values():
            yield from (v for v in values.values() if isinstance(v, Tensor))
