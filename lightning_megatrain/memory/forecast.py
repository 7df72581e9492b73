"""Seconds of a step, predicted from what a machine can do: the other half of the plan."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lightning_megatrain.memory.layout import Group
from lightning_megatrain.memory.store import StoreFormat

Schedule = Literal["blocking", "next_forward", "in_backward"]

UPDATE_BYTES = {StoreFormat.SPLIT: 26, StoreFormat.BF16: 22, StoreFormat.FP32: 28}
"""Host memory traffic of AdamW per parameter and step with fp32 moments: master, both moments read and written, the
gradient read. bf16 moments take 8 less."""


@dataclass(frozen=True)
class Machine:
    """What a machine can do.

    Attributes:
        host_bytes: host memory a run may take.
        dram_bytes_per_s: host memory traffic that all cores together sustain.
        link_bytes_per_s: between host and device, in each direction at once; None where the host itself computes.
        flops_per_s: arithmetic that training sustains, recompute counted.
        device_bytes_per_s: memory traffic of the device; None where it is not known, and its updates count as nothing.
    """

    host_bytes: int
    dram_bytes_per_s: float
    link_bytes_per_s: float | None
    flops_per_s: float
    device_bytes_per_s: float | None = None


@dataclass(frozen=True)
class Work:
    """What one step asks of a machine.

    Attributes:
        tokens: tokens of the whole step.
        batches: batches whose gradients are accumulated for it; each streams the weights again.
        model_flops: arithmetic of forward and backward, without recompute.
        block_flops: the part of it that units do whose forward is computed twice.
        fetched_bytes: bytes of all units on the wire, crossing once in the forward and once in the backward.
        pushed_bytes: bytes of all gradients.
        update_bytes: host memory traffic of the update.
        last_bytes: of ``pushed_bytes``, those of the parameters whose gradients come last, which are needed first: the
            embedding's. Where the update runs in the backward, nothing hides theirs.
        saved_bytes: inputs of units that wait on the host, pushed in a batch's forward and fetched in its backward.
        device_update_bytes: device memory traffic of the updates that are made there.
    """

    tokens: int
    batches: int
    model_flops: float
    block_flops: float
    fetched_bytes: int
    pushed_bytes: int
    update_bytes: int
    last_bytes: int = 0
    saved_bytes: int = 0
    device_update_bytes: int = 0


@dataclass(frozen=True)
class Forecast:
    """Predicted seconds of one step, by what takes them, and of the whole; they overlap, so they do not add up.

    Attributes:
        fetch: weights to the device, forward and backward, and saved inputs.
        compute: arithmetic, recompute included, and updates on the device.
        push: gradients to the host, and saved inputs.
        update: the host optimizer.
        step: the whole step.
        binds: what the step waits for most: ``"fetch"``, ``"compute"``, ``"push"`` or ``"update"``.
    """

    fetch: float
    compute: float
    push: float
    update: float
    step: float
    binds: str


def work_of(
    groups: Sequence[Group],
    store_format: StoreFormat,
    *,
    tokens: int,
    batches: int,
    flops_per_token: float,
    block_flops_per_token: float,
    moment_bytes: int = 8,
) -> Work:
    """What a step of this model asks for.

    Args:
        groups: units and resident groups.
        store_format: how masters are kept.
        tokens: tokens of one step, over all accumulated batches.
        batches: accumulated batches.
        flops_per_token: arithmetic of forward and backward per token: 6 for each parameter that a token meets, and
            causal attention.
        block_flops_per_token: the part of it that lies in units that are recomputed.
        moment_bytes: bytes of optimizer state per parameter.
    """
    wire = store_format.wire_dtype.itemsize
    trainable = sum(g.layout.trainable_numel for g in groups)
    return Work(
        tokens=tokens,
        batches=batches,
        model_flops=flops_per_token * tokens,
        block_flops=block_flops_per_token * tokens,
        fetched_bytes=sum(g.layout.numel for g in groups if not g.resident) * wire,
        pushed_bytes=trainable * wire,
        update_bytes=trainable * (UPDATE_BYTES[store_format] - 2 * (8 - moment_bytes)),
        last_bytes=max((g.layout.trainable_numel for g in groups if g.resident), default=0) * wire,
    )


def waited_update(
    work: Work, machine: Machine, schedule: Schedule, measured: tuple[float, float] | None = None
) -> float:
    """Which part of the host's update a step would wait for, 0 to 1; arguments as of :func:`forecast`."""
    whole = forecast(work, machine, schedule, measured)
    without = forecast(replace(work, update_bytes=0, last_bytes=0), machine, schedule, measured)
    return min(1.0, (whole.step - without.step) / whole.update) if whole.update else 0.0


def on_device(work: Work, part: float) -> Work:
    """The work with ``part`` of the parameters, those that are updated last among them, living on the device."""
    host = 1 - part
    return replace(
        work,
        fetched_bytes=int(work.fetched_bytes * host),
        pushed_bytes=int(work.pushed_bytes * host),
        update_bytes=int(work.update_bytes * host),
        last_bytes=0 if part else work.last_bytes,
        device_update_bytes=int(work.update_bytes * part),
    )


def forecast(work: Work, machine: Machine, schedule: Schedule, measured: tuple[float, float] | None = None) -> Forecast:
    """Predict a step.

    A pass over the model takes as long as the slowest of what runs in it: in the forward fetch, compute and the push of
    saved inputs, with ``next_forward`` also the update of the step before; in the backward fetch, compute (a forward
    again, and twice as much for the gradients) and push, with ``in_backward`` also the update, after which the
    embedding's is left. ``blocking`` adds the update to both. What the device updates is computed in the same pass.

    Args:
        work: the step.
        machine: the machine.
        schedule: when the update runs.
        measured: seconds of one batch's forward and of its backward, copies included, where they were measured; they
            take the place of the compute time that ``machine`` would give.
    """
    link = machine.link_bytes_per_s
    fetch = work.fetched_bytes / link if link else 0.0
    push = work.pushed_bytes / link if link else 0.0
    update = work.update_bytes / machine.dram_bytes_per_s
    forward_flops = work.model_flops / 3 / work.batches
    backward_flops = (2 * work.model_flops + work.block_flops) / 3 / work.batches
    computes = measured or (forward_flops / machine.flops_per_s, backward_flops / machine.flops_per_s)
    saved = work.saved_bytes / link if link else 0.0
    forward = {"fetch": fetch, "compute": computes[0], "push": saved}
    backward = {"fetch": fetch + saved, "compute": computes[1], "push": push}
    own = work.device_update_bytes / machine.device_bytes_per_s if machine.device_bytes_per_s else 0.0
    passes = [forward, backward] * work.batches
    if schedule == "next_forward":
        passes = [{**forward, "compute": computes[0] + own, "update": update}, *passes[1:]]
    elif schedule == "in_backward":
        share = work.last_bytes / max(1, work.pushed_bytes)
        last = {**backward, "compute": computes[1] + own, "update": update}
        passes = [*passes[:-1], last, {"update": share * (update + push)}]
    else:
        passes = [*passes, {"compute": own, "update": update}]
    waits: dict[str, float] = {}
    for one in passes:
        slowest = max(one, key=lambda what: one[what])
        waits[slowest] = waits.get(slowest, 0.0) + one[slowest]
    return Forecast(
        fetch=(forward["fetch"] + backward["fetch"]) * work.batches,
        compute=(forward["compute"] + backward["compute"]) * work.batches + own,
        push=(forward["push"] + backward["push"]) * work.batches,
        update=update,
        step=sum(waits.values()),
        binds=max(waits, key=lambda what: waits[what]),
    )


def tokens_to_hide(work: Work, machine: Machine, schedule: Schedule) -> dict[str, int]:
    """Tokens per batch from which link and update take no longer than the arithmetic beside them.

    Returns:
        By ``"link"`` and ``"update"``; the first is left out where there is no link, or where inputs that wait on the
        host take longer on it than their tokens' arithmetic.
    """
    forward = work.model_flops / 3 / work.tokens / machine.flops_per_s  # seconds a token
    backward = (2 * work.model_flops + work.block_flops) / 3 / work.tokens / machine.flops_per_s
    found = {}
    if machine.link_bytes_per_s:
        fetch, push, saved = (
            b / machine.link_bytes_per_s
            for b in (work.fetched_bytes, work.pushed_bytes, work.saved_bytes * work.batches / work.tokens)
        )
        if saved < forward:
            found["link"] = int(max(fetch / forward, fetch / (backward - saved), push / backward)) + 1
    if schedule != "blocking":
        beside = forward if schedule == "next_forward" else backward
        found["update"] = int(work.update_bytes / machine.dram_bytes_per_s / beside) + 1
    return found
