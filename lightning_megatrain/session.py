"""What lives from set-up to teardown: the plan, the store, the updater and the engine of one run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lightning_megatrain.legality import accumulates, check_optimizers, choose_schedule, may_update_on_device
from lightning_megatrain.memory.device import DeviceMemory, device_memory
from lightning_megatrain.memory.host import available_host_bytes, parse_bytes
from lightning_megatrain.memory.layout import Group
from lightning_megatrain.memory.mapped import FileMappings
from lightning_megatrain.memory.plan import Plan, make_plan
from lightning_megatrain.memory.store import Store, StoreFormat
from lightning_megatrain.placement import BufferPlacement
from lightning_megatrain.precision import MegaTrainPrecision
from lightning_megatrain.stream.budget import Budget, Recompute
from lightning_megatrain.stream.chunked import require_child
from lightning_megatrain.stream.discovery import UnitSelector, find_units, make_groups
from lightning_megatrain.stream.engine import Engine
from lightning_megatrain.stream.gradients import GRADIENT_BUFFERS
from lightning_megatrain.stream.saved import Activations, SavedInputs
from lightning_megatrain.stream.streams import Streams
from lightning_megatrain.update.gradients import SLABS, SUMS_WIDE
from lightning_megatrain.update.kernel import describe as describe_kernel
from lightning_megatrain.update.optimizers import moment_bytes
from lightning_megatrain.update.threads import ThreadPlan, plan_threads
from lightning_megatrain.update.updater import Schedule, Updater


@dataclass(frozen=True)
class Settings:
    """The strategy's arguments that shape a run; see :class:`MegaTrainStrategy`."""

    units: UnitSelector
    prefetch: int
    microbatch: int | Literal["auto"] | None
    activations: Activations
    sequence_chunks: int | None
    recompute: Recompute
    compile: bool
    update: str
    host_memory: str | int
    device_memory: str | int | float
    device_update: Literal["auto", "never"]
    threads: int | Literal["auto"]
    moments_dtype: torch.dtype
    accumulate_dtype: Literal["auto", "float32", "bfloat16"]
    stochastic_rounding: bool
    nonfinite: Literal["raise", "skip"]
    pin_memory: bool


class Session:
    """Moves a module into the store and streams it; :meth:`close` makes it ordinary again.

    Args:
        trainer: the trainer, about to run.
        module: its module.
        optimizers: of a fit; None for a run without training.
        settings: the strategy's arguments.
        precision: how masters are kept and blocks computed.
        device: the device that computes.
        update_thread: run updates on a thread of their own even where the CPU computes.

    Raises:
        MisconfigurationException: what was asked for is not possible.
        RuntimeError: the plan does not fit; nothing was allocated.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        optimizers: Sequence[Optimizer] | None,
        settings: Settings,
        precision: MegaTrainPrecision,
        device: torch.device,
        *,
        update_thread: bool,
    ) -> None:
        self._module = module
        self._optimizers = optimizers
        self._settings = settings
        self._precision = precision
        self._device = device
        self._format = precision.store_format
        self._accumulates = optimizers is not None and accumulates(trainer)
        self.schedule: Schedule = "blocking"
        self.schedule_reason: str | None = None
        self.threads: ThreadPlan | None = None
        self.streams = Streams.on(device)  # one for all engines of the run: whoever listens goes on listening
        self._modules = find_units(module, settings.units)
        self.unit_names = tuple(self._modules)
        if settings.sequence_chunks is not None:
            require_child(self._modules)
        groups = make_groups(module, self._modules)
        if optimizers is not None:
            check_optimizers(optimizers, self._format, groups)
            _check_formats(settings, self._format)
            on_cpu = device.type == "cpu"
            self.schedule, self.schedule_reason = choose_schedule(settings.update, trainer, optimizers, on_cpu=on_cpu)
            rank_zero_info(f"megatrain: {len(self._modules)} units, update {self.schedule!r} ({self.schedule_reason})")
        # What the parameters take now will be taken over; the pages of mapped files count as free already.
        mapped = FileMappings()
        taken = sum(p.numel() * p.element_size() for p in module.parameters() if not mapped.hold(p.data))
        free = self._free_bytes(taken=taken)
        self._sum_dtype = self._choose_sum_dtype(trainer, groups, free)
        self.plan = self._plan(groups, self._sum_dtype)
        self.plan.require_host(free, _smaller(self._format))
        self._pin = settings.pin_memory and device.type == "cuda"
        self.store = Store(groups, self._format, pin=self._pin)
        self.updater: Updater | None = None
        self.engine: Engine | None = None  # until close()
        self._buffers: BufferPlacement | None = None
        self._device_memory = self._limit_device(device)
        if optimizers is not None:
            rank_zero_info(f"megatrain: {self.plan.describe()}")
        self.shares_update = (
            optimizers is not None
            and self._device_memory is not None
            and settings.device_update == "auto"
            and may_update_on_device(trainer, optimizers, self._format)
        )
        try:
            self.store.adopt()
            if optimizers is not None:
                self.updater = self._make_updater(optimizers, inline=device.type == "cpu" and not update_thread)
            self.engine = self._make_engine()
            float_dtype = torch.bfloat16 if self._format is StoreFormat.BF16 else None
            self._buffers = BufferPlacement(module, device, float_dtype)
            _say_device(module, device)
        except BaseException:
            self.close()
            raise

    def _limit_device(self, device: torch.device) -> DeviceMemory | None:
        memory = device_memory(device, self._settings.device_memory)
        if memory is not None:
            try:
                self.plan.require_device(memory.limit - memory.allocated())
            except RuntimeError:
                memory.close()
                raise
        return memory

    def _free_bytes(self, *, taken: int) -> int:
        """Host bytes the run may hold, of which it holds ``taken`` already."""
        if self._settings.host_memory == "auto":
            return available_host_bytes() + taken
        return parse_bytes(self._settings.host_memory)

    def _plan(self, groups: Sequence[Group], sum_dtype: torch.dtype | None) -> Plan:
        training = self._optimizers is not None
        return make_plan(
            groups,
            self._format,
            training=training,
            moment_bytes=moment_bytes(self._optimizers, self._settings.moments_dtype) if self._optimizers else 0,
            gradients_coexist=self.schedule != "in_backward",
            gradient_bytes=None if sum_dtype is None else sum_dtype.itemsize,
            slots=min(self._settings.prefetch + 1, len(self._modules)),
            gradient_buffers=GRADIENT_BUFFERS,
            slabs=SLABS,
            accumulates=self._accumulates,
        )

    def _choose_sum_dtype(self, trainer: Trainer, groups: Sequence[Group], free: int) -> torch.dtype | None:
        """fp32 for sums of bf16 gradients over batches, where it was asked for or may be; None for the wire's dtype."""
        if self._optimizers is None or self._format is StoreFormat.FP32 or self.schedule == "in_backward":
            return None
        wanted = self._settings.accumulate_dtype
        if not accumulates(trainer):
            return None
        # Without `grad_dtype` torch refuses an fp32 gradient on a bf16 parameter, and hooks must see true gradients.
        if wanted == "float32" and not SUMS_WIDE:
            raise MisconfigurationException(
                f"accumulate_dtype='float32' needs Tensor.grad_dtype, which torch {torch.__version__} does not have; "
                "set accumulate_dtype='bfloat16', or use a newer torch."
            )
        fits = wanted == "float32" or self._plan(groups, torch.float32).host_bytes <= free
        return torch.float32 if SUMS_WIDE and wanted != "bfloat16" and fits else None

    def _make_updater(self, optimizers: Sequence[Optimizer], *, inline: bool) -> Updater:
        self.threads = threads = plan_threads(self._settings.threads)
        rank_zero_info(f"megatrain: {threads.describe()}, {describe_kernel()}")
        updater = Updater(
            self.store,
            optimizers,
            self.schedule,
            pin=self._pin,
            inline=inline,
            threads=threads,
            moments_dtype=self._settings.moments_dtype,
            stochastic_seed=torch.initial_seed() & 0xFFFFFFFF if self._settings.stochastic_rounding else None,
            sum_dtype=self._sum_dtype,
            nonfinite=self._settings.nonfinite,
        )
        updater.worker.span = self.streams.span
        return updater

    def _make_engine(self) -> Engine:
        return Engine(
            self._module,
            list(self._modules.values()),
            self.store.groups,
            self.store,
            self.streams,
            prefetch=self._settings.prefetch,
            microbatch=self._settings.microbatch,
            sequence_chunks=self._settings.sequence_chunks,
            saved=self._saved_inputs(self.streams) if self._optimizers is not None else None,
            compile=self._settings.compile,
            budget=Budget(self._settings.recompute, self._device_memory),
            sink=self.updater,
            updates=self.updater if self.shares_update else None,
            compute_context=self._precision.unit_context,
        )

    def _saved_inputs(self, streams: Streams) -> SavedInputs | None:
        where, limit = self._settings.activations, self._settings.host_memory
        if where == "device" or (where == "auto" and self._device_memory is None):
            return None
        return SavedInputs(
            where,
            streams,
            self._device_memory,
            len(self._modules),
            pin=self._pin,
            host_limit=None if limit == "auto" else parse_bytes(limit) - self.plan.host_bytes,
        )

    def follow_unfreezing(self, before_change: Callable[[], None]) -> None:
        """Give parameters that require a gradient since the last step room for gradients and moments.

        Args:
            before_change: called before anything is changed, if anything is.

        Raises:
            RuntimeError: there is not enough host memory; nothing was changed.
        """
        if self.updater is None:
            return
        changed = [group for group in self.store.groups if group.has_thawed]
        if not changed:
            return
        before_change()
        self.updater.drain()
        new = {group.index: group.relaid() for group in changed}
        groups = [new.get(group.index, group) for group in self.store.groups]
        plan = self._plan(groups, self._sum_dtype)
        plan.require_host(self._free_bytes(taken=self.plan.host_bytes), _smaller(self._format))
        thawed = sum(g.layout.trainable_count for g in new.values()) - sum(g.layout.trainable_count for g in changed)
        rank_zero_info(
            f"megatrain: {thawed} more parameters train from now on, in {len(changed)} units or other groups"
        )
        assert self.engine is not None
        self.engine.close()
        self.engine = None  # its device memory goes before the next one's comes
        try:
            for group in new.values():
                self.store.relay(group)
                self.store.show(group)
            self.updater.relay(new.values())
            self.engine = self._make_engine()
        except BaseException:
            self.close()
            raise
        self.plan = plan

    def close(self) -> None:
        """Make the module ordinary again: fp32 parameters on the CPU, no hooks, no threads."""
        try:
            self._close()
        finally:
            if self._device_memory is not None:
                self._device_memory.close()

    def _close(self) -> None:
        engine, updater, buffers = self.engine, self.updater, self._buffers
        self.engine = self.updater = self._buffers = None
        if engine is not None:
            engine.close()
        if updater is not None:
            updater.close()
        del engine, updater  # with their views of the arenas, so that these go group by group
        self.store.release()
        if buffers is not None:
            buffers.restore()
            _say_device(self._module, torch.device("cpu"))


def _check_formats(settings: Settings, store_format: StoreFormat) -> None:
    if settings.stochastic_rounding and store_format is not StoreFormat.BF16:
        raise MisconfigurationException(
            "stochastic_rounding is for weights kept in bf16, and this precision keeps an exact fp32 master; "
            "set precision='bf16-true' or stochastic_rounding=False."
        )
    if settings.moments_dtype != torch.float32 and store_format is StoreFormat.FP32:
        raise MisconfigurationException(
            "moments_dtype='bfloat16' is not possible with precision='32-true', which gives the stock strategy's "
            "bits; set precision='bf16-mixed' or moments_dtype='float32'."
        )


def _say_device(module: nn.Module, device: torch.device) -> None:
    """``LightningModule.device`` is where batches go and tensors are made."""
    for child in module.modules():
        if isinstance(child, _DeviceDtypeModuleMixin):
            child._device = device


def _smaller(store_format: StoreFormat) -> str:
    if store_format is StoreFormat.BF16:
        return "use a smaller model, or raise host_memory if more is free than was found"
    return "set precision='bf16-true', use a smaller model, or raise host_memory if more is free than was found"
