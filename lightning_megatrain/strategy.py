"""The Lightning strategy: Lightning's order of calls on one side, the engine and the updater on the other."""

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.utilities.init import _EmptyInit
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from lightning_megatrain.again import Attempts
from lightning_megatrain.checkpoint.files import is_local
from lightning_megatrain.checkpoint.lazy import LazyTensor
from lightning_megatrain.checkpoint.loading import materialize_meta, reading
from lightning_megatrain.checkpoints import CheckpointFormat, Checkpoints, groups_of_tensors
from lightning_megatrain.fence import Fence, who_looks_between_steps
from lightning_megatrain.legality import (
    announce_copies,
    check_model,
    check_still_legal,
    gradients_stay_untouched,
)
from lightning_megatrain.memory.host import parse_bytes
from lightning_megatrain.memory.plan import Plan
from lightning_megatrain.memory.store import Store
from lightning_megatrain.precision import MegaTrainPrecision, translate
from lightning_megatrain.session import Session, Settings
from lightning_megatrain.stream.engine import Engine
from lightning_megatrain.stream.streams import Streams
from lightning_megatrain.update.updater import Updater


class MegaTrainStrategy(SingleDeviceStrategy):
    """Trains with weights, moments and gradients in host memory; the device holds the units it is working on.

    Args:
        units: which modules are streamed. ``"auto"`` takes the model's repeated blocks; a list of class names or
            qualified names, or a predicate ``(qualified_name, module) -> bool``, chooses by hand.
        prefetch: units fetched ahead of the one in use. The device holds one slot more than this, each as large as
            the largest unit.
        microbatch: batch size inside a unit. The unit's weights are fetched once and serve the batch in slices of this
            size, so a large batch fits a small device. ``None`` runs the whole batch at once; ``"auto"`` takes as many
            rows as there is any gain in, some 16,384 tokens, and fewer when memory runs out. The batch is dimension 0
            of the unit's first floating-point input.
        activations: where units' inputs wait for the backward: on the ``"device"``, in pinned memory of the
            ``"host"``, or ``"auto"``, on the host when all of them would take more than a quarter of a GPU's memory.
        sequence_chunks: run the feed-forward part of each unit, its child ``mlp``, over so many slices of the
            sequence, one after another: its intermediates are there for one slice at a time, and it is computed once
            more. For very long sequences.
        recompute: ``"always"`` keeps each unit's inputs only and computes its forward again in the backward, so the
            device holds the activations of one unit; ``"never"`` keeps those of all, as plain training does, and saves
            a forward; ``"auto"`` keeps those of as many units, the last ones, as a GPU's memory was seen to have room
            for, and on a CPU none. Weights are streamed in any case. The numbers are the same to the bit.
        compile: run units through ``torch.compile``: one graph for each structure, not for each layer. A unit that
            cannot be compiled runs as it is, with a warning.
        update: when the host optimizer runs. ``"in_backward"`` updates each unit as its gradients arrive, behind the
            backward of the others; ``"next_forward"`` hides the update behind the forward of the next step, so that
            gradients can be clipped and accumulated first; ``"blocking"`` updates in ``optimizer.step()``;
            ``"auto"`` takes ``in_backward``
            where nothing needs all gradients at once, else ``next_forward`` where it may, and says which and why.
        host_memory: the most host memory to use, such as ``"120GiB"`` or a number of bytes; ``"auto"`` takes what
            this process can still get.
        device_memory: the most memory of a GPU to use, what its allocator keeps in reserve included, such as
            ``"24GiB"``, a number of bytes, or a fraction of the device's; ``"auto"`` takes what is free.
        device_update: with ``"auto"``, as many groups as steps were seen to wait for the host's update of move into
            spare memory of a GPU, with their moments, and are updated there, with the same bits. Checkpoints,
            validation and ends of epochs bring them home for a while. Only AdamW and Adam in ``bf16-mixed``, without
            accumulation, clipping by value and ``save_async``, and where nobody reads gradients or, between steps,
            weights. ``"never"`` leaves all to the host.
        threads: threads of the host optimizer; ``"auto"`` takes the physical cores but a few for launching GPU work.
        moments_dtype: dtype of Adam's moments in ``bf16-mixed`` and ``bf16-true``: ``"float32"``, or ``"bfloat16"`` to
            save 4 bytes per parameter.
        accumulate_dtype: dtype in which ``accumulate_grad_batches`` sums bf16 gradients on the host: ``"float32"``,
            ``"bfloat16"``, or ``"auto"`` for float32 where the 2 bytes more per parameter fit.
        stochastic_rounding: in ``bf16-true``, round weights up or down at random so that small updates count on
            average; reproducible from the seed of ``seed_everything``.
        nonfinite: when gradients are clipped by norm and the norm is not finite: ``"raise"``, or ``"skip"`` to leave
            the step out whole and count it in ``skipped_steps``.
        pin_memory: register host memory with CUDA, so that copies run at the link's rate beside the computation.
        checkpoint_format: what ``Trainer.save_checkpoint`` and ``ModelCheckpoint`` write: ``"ckpt"``, one file that any
            strategy loads; ``"sharded"``, a folder of ``torch.distributed.checkpoint``, written part by part without a
            second copy in memory; ``"auto"`` takes folders from 32 GiB of weights and optimizer state on.
        save_async: write checkpoints beside training. The bytes saved are those of the step they are named after:
            updates wait for what is still to be read.
        exclude_frozen_parameters: leave parameters that do not train out of checkpoints, as for adapters.
        accelerator: Lightning's accelerator; normally set through ``Trainer(accelerator=...)``.
        checkpoint_io: Lightning's checkpoint plugin.
        precision_plugin: Lightning's precision plugin; normally set through ``Trainer(precision=...)``.

    Raises:
        ValueError: an argument is out of range.
    """

    strategy_name = "megatrain"

    update_thread_on_cpu = False
    """Run updates on the worker thread even where the CPU computes: slower there, to show and to test the overlap."""

    def __init__(
        self,
        *,
        units: str | Sequence[str] | Callable[[str, nn.Module], bool] = "auto",
        prefetch: int = 2,
        microbatch: int | Literal["auto"] | None = None,
        activations: Literal["auto", "device", "host"] = "auto",
        sequence_chunks: int | None = None,
        recompute: Literal["auto", "always", "never"] = "auto",
        compile: bool = False,
        update: Literal["auto", "in_backward", "next_forward", "blocking"] = "auto",
        host_memory: str | int = "auto",
        device_memory: str | int | float = "auto",
        device_update: Literal["auto", "never"] = "auto",
        threads: int | Literal["auto"] = "auto",
        moments_dtype: Literal["float32", "bfloat16"] = "float32",
        accumulate_dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        stochastic_rounding: bool = False,
        nonfinite: Literal["raise", "skip"] = "raise",
        pin_memory: bool = True,
        checkpoint_format: CheckpointFormat = "auto",
        save_async: bool = False,
        exclude_frozen_parameters: bool = False,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        _require_units(units)
        if not _is_count(prefetch, least=0):
            raise ValueError(f"prefetch={prefetch!r} is not a number of units; set 0 or more.")
        if microbatch not in (None, "auto") and not _is_count(microbatch):
            raise ValueError(f"microbatch={microbatch!r} is not a batch size; set 1 or more, 'auto' or None.")
        if sequence_chunks is not None and not _is_count(sequence_chunks):
            raise ValueError(f"sequence_chunks={sequence_chunks!r} is not a number of slices; set 1 or more, or None.")
        _require_one_of("activations", activations, ("auto", "device", "host"))
        _require_one_of("recompute", recompute, ("auto", "always", "never"))
        _require_one_of("device_update", device_update, ("auto", "never"))
        _require_one_of("update", update, ("auto", "in_backward", "next_forward", "blocking"))
        _require_one_of("moments_dtype", moments_dtype, ("float32", "bfloat16"))
        _require_one_of("accumulate_dtype", accumulate_dtype, ("auto", "float32", "bfloat16"))
        _require_one_of("nonfinite", nonfinite, ("raise", "skip"))
        _require_one_of("checkpoint_format", checkpoint_format, ("auto", "ckpt", "sharded"))
        if threads != "auto" and not _is_count(threads):
            raise ValueError(f"threads={threads!r} is not a number of threads; set 1 or more, or 'auto'.")
        if host_memory != "auto":
            parse_bytes(host_memory, name="host_memory")
        if device_memory != "auto" and parse_bytes(device_memory, total=2**40, name="device_memory") < 1:
            raise ValueError(f"device_memory={device_memory!r} leaves no room; set a size such as '24GiB', or 'auto'.")
        self._settings = Settings(
            units=units,
            prefetch=prefetch,
            microbatch=microbatch,
            activations=activations,
            sequence_chunks=sequence_chunks,
            recompute=recompute,
            compile=compile,
            update=update,
            host_memory=host_memory,
            device_memory=device_memory,
            device_update="never" if save_async else device_update,
            threads=threads,
            moments_dtype=torch.bfloat16 if moments_dtype == "bfloat16" else torch.float32,
            accumulate_dtype=accumulate_dtype,
            stochastic_rounding=stochastic_rounding,
            nonfinite=nonfinite,
            pin_memory=pin_memory,
        )
        self._checkpoints = Checkpoints(
            checkpoint_format, exclude_frozen=exclude_frozen_parameters, save_async=save_async
        )
        self._fence: Fence | None = None
        self._gradients_untouched = False
        self._session: Session | None = None
        self._plan: Plan | None = None
        self._resumes = False
        self._weights_fresh = False
        self._attempts: Attempts | None = None  # at the batch whose backward is to come
        self._counters: dict[str, int] = {}  # of the last fit
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)

    # What the trainer tells the strategy

    @property
    def parallel_devices(self) -> None:
        """Always None, so that the trainer tells its devices."""
        return

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) != 1:
            raise MisconfigurationException(
                f"The megatrain strategy trains on one device and got {len(devices)}; set Trainer(devices=1)."
            )
        if devices[0].type not in ("cpu", "cuda"):
            raise MisconfigurationException(
                f"The megatrain strategy runs on CUDA and CPU devices and got {devices[0]}; "
                "set Trainer(accelerator='gpu') with an NVIDIA GPU, or accelerator='cpu'."
            )
        self._root_device = devices[0]

    @property
    def num_nodes(self) -> int:
        """Always 1."""
        return 1

    @num_nodes.setter
    def num_nodes(self, count: int) -> None:
        if count != 1:
            raise MisconfigurationException(
                f"The megatrain strategy runs on one node and got {count}; set Trainer(num_nodes=1)."
            )

    @property
    def _layer_sync(self) -> None:
        return

    @_layer_sync.setter
    def _layer_sync(self, layer_sync: Any) -> None:
        if layer_sync is not None:
            raise MisconfigurationException(
                "The megatrain strategy has one device, so there is nothing to synchronise; "
                "set Trainer(sync_batchnorm=False)."
            )

    @property
    @override
    def precision_plugin(self) -> MegaTrainPrecision:
        assert self._precision is not None
        return self._precision

    @precision_plugin.setter
    @override
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision = translate(plugin)

    # Set-up and teardown

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """New modules are made on the CPU: host memory is where they live."""
        with _EmptyInit(enabled=bool(empty_init)), torch.device("cpu"), self.precision_plugin.tensor_init_context():
            yield

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self._module()
        self.precision_plugin.convert_module(module)
        training = trainer.state.fn == TrainerFn.FITTING
        check_model(module)
        materialize_meta(module)
        if training:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self._session = session = Session(
            trainer,
            module,
            self.optimizers if training else None,
            self._settings,
            self.precision_plugin,
            self.root_device,
            update_thread=self.update_thread_on_cpu,
        )
        self._plan = session.plan
        self.precision_plugin.clip_by_norm = self._clip_by_norm
        if session.updater is not None:
            session.updater.before_update = self._checkpoints.saver.wait_read
            session.store.before_write = self._checkpoints.saver.wait_read
            announce_copies(trainer, self.precision_plugin.store_format)
            self._gradients_untouched = gradients_stay_untouched(trainer)
            self._raise_fence(trainer, session)
            self._checkpoints.prepare(trainer)

    def _raise_fence(self, trainer: Trainer, session: Session) -> None:
        if session.schedule != "next_forward" and not session.shares_update:
            return
        looks = who_looks_between_steps(trainer) if session.schedule == "next_forward" else None
        if looks is not None:
            rank_zero_info(
                f"megatrain: updates are waited for after every batch, because {looks} may read weights (a callback "
                "that does not says so with the class attribute `reads_weights = False`)"
            )
        updater = self._updating()
        self._fence = Fence(updater.drain, updater.come_home, every_batch=looks is not None)
        trainer.callbacks.insert(0, self._fence)

    @override
    def teardown(self) -> None:
        try:
            self._checkpoints.finish()
        finally:
            self._stop()
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _stop(self) -> None:
        """Make the module ordinary again. Does nothing before :meth:`setup`, or twice."""
        session, self._session = self._session, None
        self._attempts = None
        if self._fence is not None and self._module()._trainer is not None:
            with suppress(ValueError):  # a loop may have put other callbacks in place
                self._module().trainer.callbacks.remove(self._fence)
        self._fence = None
        if session is not None:
            self._plan = session.plan
            if session.updater is not None:
                self._counters = session.updater.counters()
            session.close()

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._updater is not None:
            self._updater.reset()
        if self._engine is not None:
            self._engine.reset()

    # Steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        assert self._session is not None, "the strategy was not set up"
        self._attempts = None  # the last batch's, if it had no backward
        check_still_legal(self._module().trainer, self._updating().schedule, on_device=self._session.shares_update)
        self._session.follow_unfreezing(self._checkpoints.saver.wait)
        engine = self._running()
        self._updating().begin_step()
        engine.begin_step()
        if self._module().automatic_optimization:
            attempts = Attempts(engine, engine.begin_again, super().training_step, args, kwargs)
            output = attempts.forward()
            if output is not None:
                self._attempts = attempts
            return output
        with engine.spending():  # its optimizer may have stepped: that is not to be done again
            output = super().training_step(*args, **kwargs)
        engine.end_step()
        return output

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        engine, updater, module = self._running(), self._updating(), self._module()

        def run(loss: Tensor) -> None:
            engine.begin_backward()
            self.precision_plugin.backward(loss, module, optimizer, *args, **kwargs)
            engine.end_backward()

        attempts, self._attempts = self._attempts, None
        version = closure_loss._version
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        updater.before_backward()
        if attempts is not None and closure_loss._version == version:  # else a hook changed what is made again
            attempts.backward(module, closure_loss, run)
        else:
            with engine.spending():
                run(closure_loss)
        if module.automatic_optimization:
            engine.end_step()
        # Hooks that read gradients or weights after the backward meet the host's, all there.
        with engine.host_window():
            updater.settle()
            closure_loss = self.precision_plugin.post_backward(closure_loss, module)
            self.post_backward(closure_loss)
        return closure_loss

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        module = model or self._module()
        assert isinstance(module, LightningModule)
        result = closure()
        with self._running().host_window():
            self.precision_plugin._after_closure(module, optimizer)
            self._updating().step(optimizer)
        return result

    def _clip_by_norm(self, optimizer: Optimizer | LightningOptimizer, limit: float) -> None:
        if isinstance(optimizer, LightningOptimizer):  # as manual optimization has it
            optimizer = optimizer.optimizer
        self._updating().clip_by_norm(optimizer, limit, untouched=self._gradients_untouched)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self._evaluate(super().validation_step, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self._evaluate(super().test_step, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self._evaluate(super().predict_step, args, kwargs)

    def _evaluate(self, step: Callable[..., STEP_OUTPUT], args: Any, kwargs: Any) -> STEP_OUTPUT:
        self._attempts = None
        engine = self._running()
        engine.begin_step(fresh=self._weights_fresh, trains=False)
        self._weights_fresh = True
        try:
            return Attempts(engine, partial(engine.begin_step, trains=False), step, args, kwargs).forward()
        finally:
            engine.end_step()

    def _weights_may_change(self) -> None:
        self._weights_fresh = False

    @override
    def on_train_end(self) -> None:
        self._updating().drain()  # an error of the last update must not be lost
        self._checkpoints.saver.wait()

    @override
    def on_validation_start(self) -> None:
        self._weights_may_change()

    @override
    def on_test_start(self) -> None:
        self._weights_may_change()

    @override
    def on_predict_start(self) -> None:
        self._weights_may_change()

    # State

    @override
    def process_dataloader(self, dataloader: object) -> object:
        self._checkpoints.before_loader(self.root_device)
        return super().process_dataloader(dataloader)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._checkpoints.before_batches(self.root_device)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state with exact masters: fp32, or bf16 for ``bf16-true``. They are read when they are used."""
        self._require_whole()
        with nullcontext() if self._engine is None else self._engine.host_window():
            state = super().lightning_module_state_dict()
            return self._checkpoints.model_state(self._module(), state, self._store, self.optimizers)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        self._require_whole()
        return super().optimizer_state(optimizer)

    def _require_whole(self) -> None:
        """Refuse to hand out state that an update left torn.

        Raises:
            RuntimeError: says so.
        """
        if self._updater is not None:
            self._updater.require_whole()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        self._require_whole()
        if self._updater is not None:
            self._counters = self._updater.counters()
        self._checkpoints.note(checkpoint, self._module().trainer, self._counters, self.root_device)
        if self._writes_itself and storage_options is None:
            self._checkpoints.save(
                checkpoint, filepath, groups_of=lambda: self._groups_of_tensors(checkpoint), order=self._order()
            )
        else:
            whole = tree_map_only(LazyTensor, LazyTensor.materialize, checkpoint)
            super().save_checkpoint(whole, filepath, storage_options)

    def _groups_of_tensors(self, checkpoint: Mapping[str, Any]) -> dict[int, int]:
        if self._store is None:  # after a fit nothing changes them
            return {}
        return groups_of_tensors(self._store, self._module(), checkpoint["state_dict"], self.optimizers)

    def _order(self) -> dict[int, int]:
        """Rank of each group by when its next update is due."""
        if self._store is None:
            return {}
        groups = sorted(self._store.groups, key=lambda g: not g.resident)
        if self.update_schedule == "in_backward":
            groups = sorted(self._store.groups, key=lambda g: (not g.resident, -g.index))
        return {group.index: rank for rank, group in enumerate(groups)}

    @property
    def _writes_itself(self) -> bool:
        """Whether no plugin of the user's has been put in charge of checkpoint files."""
        return type(self.checkpoint_io) is TorchCheckpointIO

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        if self._writes_itself and is_local(filepath):
            self._checkpoints.saver.remove(Path(filepath))
        else:
            super().remove_checkpoint(filepath)

    @override
    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        self._checkpoints.comes_from(checkpoint_path)
        self._resumes = self._session is None  # a tuner restores what it saved in the middle of a run
        if self._writes_itself and is_local(checkpoint_path):
            return self._checkpoints.load(checkpoint_path, weights_only=weights_only)
        # Lightning 2.5 has no weights_only.
        options = kwargs if weights_only is None else {"weights_only": weights_only, **kwargs}
        return super().load_checkpoint(checkpoint_path, **options)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True, **kwargs: Any) -> None:
        module, store = self._module(), self._store
        if self._engine is None or store is None:
            self._checkpoints.load_model(module, checkpoint, strict=strict, at_home=True)
            return
        if self._updater is not None:
            self._updater.finish_updates()  # or they would write over what is loaded
        with self._engine.host_window():
            state = self._checkpoints.load_model(module, checkpoint, strict=strict, at_home=False)
            named = dict(module.named_parameters(remove_duplicate=False))
            values = {id(p): state[n] for n, p in named.items() if n in checkpoint["state_dict"]}
            for group in store.groups:
                for index, parameter in enumerate(group.parameters):
                    if id(parameter) in values:  # the module copied into the wire; the master is wider
                        store.write_master(group.index, index, values[id(parameter)])

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        with reading("Loading optimizer states", self._checkpoints.optimizer_states(checkpoint)) as states:
            self._updating().load_optimizer_states(states)
        if self._resumes:
            self._updating().set_counters(self._checkpoints.resume(checkpoint, self._module().trainer))

    # What people ask

    @property
    def plan(self) -> Plan | None:
        """Bytes of the run under way, or of the last one."""
        return self._plan if self._session is None else self._session.plan

    @property
    def host_bytes_per_parameter(self) -> float | None:
        """Persistent host bytes per parameter: weights, moments and gradients, without the fixed ring of slabs."""
        return None if self.plan is None else self.plan.host_bytes_per_parameter

    @property
    def update_schedule(self) -> str | None:
        """The schedule in use during fit: ``"in_backward"``, ``"next_forward"`` or ``"blocking"``."""
        return None if self._updater is None else self._updater.schedule

    @property
    def update_reason(self) -> str | None:
        """Why that schedule, during fit."""
        return None if self._session is None else self._session.schedule_reason

    @property
    def update_threads(self) -> str | None:
        """Threads of the host optimizer during fit, in words."""
        return None if self._session is None or self._session.threads is None else self._session.threads.describe()

    @property
    def unit_names(self) -> tuple[str, ...]:
        """Qualified names of the streamed modules of the run under way."""
        return () if self._session is None else self._session.unit_names

    @property
    def streams(self) -> Streams | None:
        """The lanes of the run under way: callbacks attach listeners to learn what was done when."""
        return None if self._session is None else self._session.streams

    @property
    def skipped_steps(self) -> int:
        """Steps of this fit that were left out because the norm of their gradients was not finite."""
        return (self._counters if self._updater is None else self._updater.counters()).get("skipped_steps", 0)

    @property
    def kept_graphs(self) -> int | None:
        """Graphs that the last batch kept from its forward, and so did not recompute; None outside a run."""
        return None if self._engine is None else self._engine.budget.kept

    @property
    def device_groups(self) -> int | None:
        """Units and other groups that are updated on the device now; None outside a run."""
        return None if self._engine is None else self._engine.held_groups

    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _engine(self) -> Engine | None:
        return None if self._session is None else self._session.engine

    @property
    def _updater(self) -> Updater | None:
        return None if self._session is None else self._session.updater

    @property
    def _store(self) -> Store | None:
        return None if self._session is None else self._session.store

    def _running(self) -> Engine:
        assert self._engine is not None, "the strategy was not set up"
        return self._engine

    def _updating(self) -> Updater:
        assert self._updater is not None, "there is no optimizer outside fit"
        return self._updater

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(
                cls.strategy_name, cls, description="Streams weights from host memory through one device."
            )


def _is_count(value: Any, *, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _require_units(units: Any) -> None:
    named = isinstance(units, str) or (isinstance(units, Collection) and all(isinstance(name, str) for name in units))
    if not named and (isinstance(units, type) or not callable(units)):
        raise ValueError(
            f"units={units!r} names no modules; set 'auto', a list of class names or qualified names, or a function of "
            "a name and a module."
        )


def _require_one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown; set one of {', '.join(map(repr, allowed))}.")
