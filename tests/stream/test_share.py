"""Groups that are updated on the device: the bits of the host's update, wherever and whenever they move."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import zoo
from devices import Room
from fitting import (
    QUIET,
    SCHEDULES,
    MegaTrainStrategy,
    assert_same_bits,
    assert_same_optimizer_bits,
    fit,
    loader,
    stock,
    under,
)
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import lightning_megatrain.session
from lightning_megatrain.stream import share, staging
from lightning_megatrain.stream.budget import Budget
from lightning_megatrain.stream.share import DeviceShare
from lightning_megatrain.stream.streams import HostStreams
from lightning_megatrain.update.optimizers import AdamUpdate


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Every update is waited for and there is room: by the fourth step `part` of the host's updates move."""
    seen: dict[str, Any] = {"part": 1.0, "held": set(), "recalled": 0}
    monkeypatch.setattr(lightning_megatrain.session, "device_memory", lambda *_: Room())
    monkeypatch.setattr(DeviceShare, "_last_step", lambda self: (1.0, seen["part"] / 1.15, 1.0))
    take, recall = DeviceShare._take, DeviceShare.recall

    def noted(self: DeviceShare, group: Any, staging: Any) -> None:
        take(self, group, staging)
        seen["held"].add(group.name)

    def counted(self: DeviceShare, groups: Any = None) -> None:
        seen["recalled"] += bool(self.held)
        recall(self, groups)

    monkeypatch.setattr(DeviceShare, "_take", noted)
    monkeypatch.setattr(DeviceShare, "recall", counted)
    return seen


def both(make: Any, shared: dict[str, Any], **arguments: Any) -> None:
    strategy = {"update": arguments.pop("update"), **arguments.pop("strategy", {})}
    arguments = {"precision": "bf16-mixed", "max_steps": 7, **arguments}
    a, trainer_a = fit(make, MegaTrainStrategy(device_update="never", **strategy), **arguments)
    assert not shared["held"]
    b, trainer_b = fit(make, MegaTrainStrategy(**strategy), **arguments)
    assert shared["held"]
    assert_same_bits(a, b)
    assert_same_optimizer_bits(trainer_a, trainer_b)


# A schedule collects a group's gradients or uses them at once. What is hard about that is in the four models: shared,
# frozen, missing and repeated parameters; the others bring other layers, and no more of these.
@pytest.mark.parametrize(
    ("name", "update"),
    [
        *((name, "next_forward") for name in zoo.ALL),
        *((name, "in_backward") for name in ("tied", "frozen", "moe", "odd")),
        *((name, "blocking") for name in ("tied", "moe")),
    ],
)
def test_the_bits_of_the_hosts_update(name: str, update: str, shared: dict[str, Any]) -> None:
    clip = {} if update == "in_backward" else {"gradient_clip_val": 0.3}
    both(partial(zoo.ALL[name], scheduler=True, log_norm=False), shared, update=update, **clip)


@pytest.mark.parametrize("update", SCHEDULES)
def test_a_part_of_the_groups(update: str, shared: dict[str, Any]) -> None:
    shared["part"] = 0.3
    both(partial(zoo.Encoder, layers=4, log_norm=False), shared, update=update)
    assert shared["held"] != {"resident"}
    assert len(shared["held"]) < 5


@pytest.mark.parametrize("strategy", [{"moments_dtype": "bfloat16"}, {"microbatch": 2}, {"recompute": "always"}])
def test_with_other_settings(strategy: dict[str, Any], shared: dict[str, Any]) -> None:
    make = partial(zoo.Encoder, layers=3, log_norm=False)
    both(make, shared, update="next_forward", gradient_clip_val=0.3, strategy=strategy)


class Repeats(zoo.Zoo):
    """Each block is used twice, and the last only now and then."""

    def __init__(self) -> None:
        super().__init__(log_norm=False)
        self.embed, self.head = nn.Embedding(zoo.VOCAB, 32), nn.Linear(32, zoo.VOCAB)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))
        self.steps = 0

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch)
        self.steps += 1
        for block in list(self.blocks[:3]) * 2 + ([self.blocks[3]] if self.steps % 3 else []):
            x = x + block(x)
        return zoo.token_loss(self.head(x), batch)


@pytest.mark.parametrize("update", SCHEDULES)
def test_units_used_twice_or_not_at_all(update: str, shared: dict[str, Any]) -> None:
    both(Repeats, shared, update=update, max_steps=9)


def resumable(tmp_path: Path, **strategy: Any) -> tuple[zoo.Zoo, L.Trainer]:
    saving = L.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1)
    return fit(
        partial(zoo.Encoder, layers=3, log_norm=False, scheduler=True),
        MegaTrainStrategy(update="next_forward", **strategy),
        precision="bf16-mixed",
        max_steps=12,
        gradient_clip_val=0.3,
        enable_checkpointing=True,
        callbacks=[saving],
    )


def test_checkpoints_hold_what_the_device_had(tmp_path: Path, shared: dict[str, Any]) -> None:
    a, _ = resumable(tmp_path / "a", device_update="never")
    b, _ = resumable(tmp_path / "b")
    assert shared["recalled"] == 3  # two saves after it began, and the end
    assert_same_bits(a, b)
    for name in sorted(p.name for p in (tmp_path / "a").iterdir()):
        saved = [torch.load(tmp_path / run / name, weights_only=False) for run in "ab"]
        states = [s["state_dict"] for s in saved]
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
        moments = [s["optimizer_states"][0]["state"] for s in saved]
        for key, state in moments[0].items():
            assert all(torch.equal(state[n], moments[1][key][n]) for n in state)


class Validated(zoo.Encoder):
    """Validates, and in between looks at weights and runs the model as people do."""

    def __init__(self) -> None:
        super().__init__(layers=3, log_norm=False)
        self.seen: list[Tensor] = []

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append(self.loss(batch).detach())

    def on_train_epoch_end(self) -> None:
        self.seen += [p.detach().float().norm().cpu() for p in self.parameters()]
        with torch.no_grad():
            self.seen.append(self.loss(torch.zeros(2, 4, dtype=torch.long)))

    def val_dataloader(self) -> Any:
        return loader(8)


def test_whoever_looks_sees_the_devices_weights(shared: dict[str, Any]) -> None:
    runs = [
        fit(
            Validated,
            MegaTrainStrategy(update="next_forward", device_update=device_update),
            precision="bf16-mixed",
            max_steps=12,
            samples=16,
            gradient_clip_val=0.3,
        )[0]
        for device_update in ("never", "auto")
    ]
    assert shared["held"]
    assert len(runs[0].seen) > 50
    assert all(torch.equal(x, y) for x, y in zip(runs[0].seen, runs[1].seen, strict=True))
    assert_same_bits(*runs)


class Writes(zoo.Encoder):
    """Puts other tensors in the place of weights when an epoch ends."""

    def __init__(self) -> None:
        super().__init__(layers=3, log_norm=False)

    def on_train_epoch_end(self) -> None:
        for p in self.parameters():
            p.data = p.data * 0.5


def test_assigned_weights_count(shared: dict[str, Any]) -> None:
    both(Writes, shared, update="next_forward", max_steps=14, samples=20)


class Outside(zoo.Encoder):
    """A penalty on the weights, which reads them outside their units."""

    def __init__(self, after: int = 0) -> None:
        super().__init__(layers=3, log_norm=False)
        self.after, self.steps = after, 0

    def loss(self, batch: Tensor) -> Tensor:
        self.steps += 1
        loss = super().loss(batch)
        if self.steps > self.after:
            loss = loss + 1e-2 * sum(p.to(loss.device).float().pow(2).sum() for p in self.net.parameters())
        return loss


def test_groups_that_are_used_outside_their_unit_stay(shared: dict[str, Any]) -> None:
    both(Outside, shared, update="next_forward")
    assert len(shared["held"]) == 1  # the residents


def test_a_first_use_outside_comes_too_late(shared: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=r"for the first time since .*device_update='never'"):
        fit(partial(Outside, 5), MegaTrainStrategy(update="blocking"), precision="bf16-mixed", max_steps=9)


class EpochEnds(zoo.Encoder):
    """Does something to the optimizer's state when an epoch ends."""

    def __init__(self, what: str) -> None:
        super().__init__(layers=3, log_norm=False, dropout=0.0)
        self.what = what

    def on_train_epoch_end(self) -> None:
        optimizer = self.trainer.optimizers[0]
        if self.what == "clear":
            optimizer.state.clear()
        elif self.what == "halve":
            for state in optimizer.state.values():
                state["exp_avg"].mul_(0.5)
        elif self.what == "reload":
            optimizer.load_state_dict(optimizer.state_dict())
        else:
            for state in optimizer.state.values():
                state["exp_avg"] = state["exp_avg"] * 0.5


@pytest.mark.parametrize("update", ["next_forward", "in_backward"])
@pytest.mark.parametrize("what", ["clear", "halve", "reload", "replace"])
def test_changes_of_optimizer_state_between_epochs_count(what: str, update: str, shared: dict[str, Any]) -> None:
    both(partial(EpochEnds, what), shared, update=update, max_steps=13, samples=20)


class StopsGradients(zoo.Zoo):
    """The head's weight is read once more in the backward after its own gradient is there."""

    def __init__(self) -> None:
        super().__init__(log_norm=False)
        self.embed, self.head = nn.Embedding(zoo.VOCAB, 32), nn.Linear(32, zoo.VOCAB)
        self.embed.requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch)
        for i, block in enumerate(self.blocks):
            x = x + block(x)
            if i == 1:
                x = x + nn.functional.linear(x, self.head.weight[:32].detach().to(x.dtype))
        return zoo.token_loss(self.head(x), batch)


class Teaches(zoo.Encoder):
    """Learns from a teacher whose units it assigns to after their use, late in the run."""

    def __init__(self) -> None:
        super().__init__(layers=3, log_norm=False, dropout=0.0)
        self.teacher = zoo.Encoder(layers=3, log_norm=False, dropout=0.0).requires_grad_(False)
        self.steps = 0

    def loss(self, batch: Tensor) -> Tensor:
        self.steps += 1
        with torch.no_grad():
            aim = self.teacher.head(self.teacher.net(self.teacher.embed(batch)))
        found = self.head(self.net(self.embed(batch)))
        if self.steps > 5:
            for parameter in self.teacher.net.parameters():
                parameter.data = parameter.data * 0.99
        return (found.float() - aim.float()).square().mean() + zoo.token_loss(found, batch)


@pytest.mark.parametrize("update", SCHEDULES)
def test_an_assignment_to_others_within_a_step_loses_no_update(update: str, shared: dict[str, Any]) -> None:
    both(Teaches, shared, update=update, max_steps=8)


class MovedInBackward(zoo.Encoder):
    """Assigns to weights of a unit in the backward, when its gradients are there."""

    def __init__(self) -> None:
        super().__init__(layers=3, log_norm=False, dropout=0.0)
        self.steps = 0
        self.embed.register_forward_hook(lambda *args: args[2].register_hook(self.move) and None)

    def move(self, gradient: Tensor) -> None:
        self.steps += 1
        if self.steps > 5:
            weight = self.net.layers[1].linear2.weight
            weight.data = weight.data * 0.9


@pytest.mark.parametrize("update", ["blocking", "next_forward"])
def test_a_group_that_goes_home_with_its_gradients_is_updated_there(update: str, shared: dict[str, Any]) -> None:
    both(MovedInBackward, shared, update=update, max_steps=8)


class UsedTwice(zoo.Zoo):
    """Uses its units twice, but for one of the two uses in later steps."""

    def __init__(self, skipped: int) -> None:
        super().__init__(log_norm=False)
        self.embed, self.head = nn.Embedding(zoo.VOCAB, 32), nn.Linear(32, zoo.VOCAB)
        self.blocks = nn.ModuleList(MayBeSkipped() for _ in range(3))
        self.skipped, self.steps = skipped, 0

    def loss(self, batch: Tensor) -> Tensor:
        self.steps += 1
        x = self.embed(batch)
        for turn in range(2):
            for block in self.blocks:
                x = block(x, skip=turn == self.skipped and self.steps > 5)
        return zoo.token_loss(self.head(x), batch)


class MayBeSkipped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor, skip: bool) -> Tensor:
        return x * 1.0 if skip else x + torch.tanh(self.linear(x))


@pytest.mark.parametrize("update", SCHEDULES)
@pytest.mark.parametrize("skipped", [0, 1])
def test_a_use_without_a_gradient(skipped: int, update: str, shared: dict[str, Any]) -> None:
    both(partial(UsedTwice, skipped), shared, update=update, max_steps=9)


class Rescue(OnExceptionCheckpoint):
    """Notes why it could not save, so that the trainer goes on to tear down."""

    refused = ""

    def on_exception(self, *arguments: Any) -> None:
        try:
            super().on_exception(*arguments)
        except RuntimeError as error:
            self.refused = str(error)


@pytest.mark.parametrize("update", SCHEDULES)
def test_a_step_that_fails_on_the_device_is_not_saved(
    update: str, tmp_path: Path, shared: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, runs = AdamUpdate._run, []

    def failing(self: AdamUpdate, *arguments: Any) -> None:
        if arguments[-1] is not None:  # on the device
            runs.append(1)
            if len(runs) == 6:
                raise torch.OutOfMemoryError("planted")
        run(self, *arguments)

    monkeypatch.setattr(AdamUpdate, "_run", failing)
    rescue = Rescue(tmp_path)
    with pytest.raises(torch.OutOfMemoryError, match=r"planted|ran out"):
        fit(
            partial(zoo.Encoder, layers=3, log_norm=False),
            MegaTrainStrategy(update=update),
            precision="bf16-mixed",
            callbacks=[rescue],
            enable_checkpointing=True,
        )
    assert "left half-way" in rescue.refused
    assert len(runs) == 6
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("update", SCHEDULES)
def test_weights_stay_until_the_backward_is_over(update: str, shared: dict[str, Any]) -> None:
    both(StopsGradients, shared, update=update)


class Skips(zoo.Encoder):
    """A step whose gradients are infinite, and then one without a loss."""

    def __init__(self) -> None:
        super().__init__(layers=3, log_norm=False, dropout=0.0)
        self.steps = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        self.steps += 1
        loss = super().training_step(batch, batch_idx)
        return None if self.steps == 7 else loss * float("inf") if self.steps == 6 else loss


def test_a_skipped_step_is_skipped_once(shared: dict[str, Any]) -> None:
    strategy = {"nonfinite": "skip"}
    both(Skips, shared, update="next_forward", max_steps=9, gradient_clip_val=1.0, strategy=strategy)
    _, trainer = fit(
        Skips,
        MegaTrainStrategy(update="next_forward", **strategy),
        precision="bf16-mixed",
        max_steps=9,
        gradient_clip_val=1.0,
    )
    assert trainer.strategy.skipped_steps == 1


class Hooked(zoo.Encoder):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(lambda *_: None)
        return optimizer


class ZeroesItself(zoo.Encoder):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("make", [Hooked, ZeroesItself])
def test_nothing_moves_where_gradients_are_somebodys(make: Any, shared: dict[str, Any]) -> None:
    fit(partial(make, log_norm=False), MegaTrainStrategy(), precision="bf16-mixed", max_steps=6)
    assert not shared["held"]


def test_nothing_moves_where_a_hook_is_for_all_optimizers(shared: dict[str, Any]) -> None:
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        fit(partial(zoo.Encoder, log_norm=False), MegaTrainStrategy(), precision="bf16-mixed", max_steps=6)
    finally:
        handle.remove()
    assert not shared["held"]


class Looks(L.Callback):
    def on_train_batch_end(self, *args: Any) -> None: ...


@pytest.mark.parametrize(
    ("arguments", "strategy"),
    [
        ({"precision": "32-true"}, {}),
        ({"precision": "bf16-true"}, {}),
        ({"accumulate_grad_batches": 2}, {}),
        ({"callbacks": [Looks()]}, {}),
        ({"gradient_clip_val": 1e-4, "gradient_clip_algorithm": "value"}, {}),
        ({}, {"save_async": True}),
        ({}, {"device_update": "never"}),
    ],
)
def test_nothing_moves_where_somebody_may_look(
    arguments: dict[str, Any], strategy: dict[str, Any], shared: dict[str, Any]
) -> None:
    make = partial(zoo.Encoder, layers=3, log_norm=False)
    fit(make, MegaTrainStrategy(**strategy), **{"precision": "bf16-mixed", "max_steps": 6, **arguments})
    assert not shared["held"]


def test_no_more_is_taken_than_there_is_room_for(shared: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Room, "limit", int(10**7 / 0.92) + 5 * 10**5)
    taken = []
    grow = DeviceShare._grow

    def noted(self: DeviceShare, excess: float, spare: int) -> int:
        taken.append((grow(self, excess, spare), spare))
        return taken[-1][0]

    monkeypatch.setattr(DeviceShare, "_grow", noted)
    both(partial(zoo.Encoder, layers=12, log_norm=False), shared, update="blocking", max_steps=8)
    assert 0 < len(shared["held"]) < 13
    assert all(bytes_ <= spare for bytes_, spare in taken)


def test_a_device_that_is_full_after_all_keeps_what_it_has(
    shared: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    empty, left = DeviceShare._empty, [10]

    def crowded(self: DeviceShare, like: Tensor) -> Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError("planted")
        return empty(self, like)

    monkeypatch.setattr(DeviceShare, "_empty", crowded)
    both(partial(zoo.Encoder, layers=6, log_norm=False), shared, update="blocking")
    assert len(shared["held"]) == 2  # residents with three tensors, a unit with four, and a unit that failed


class Crowded(zoo.Encoder):
    """Memory runs out in one forward or backward of a block, once."""

    def __init__(self, at: int) -> None:
        super().__init__(layers=4, log_norm=False)
        self.at, self.passes = at, 0
        for layer in self.net.layers:
            inner = layer.linear1.forward

            def forward(x: Tensor, inner: Any = inner) -> Tensor:
                out = inner(x)
                if out.requires_grad:
                    out.register_hook(self.check)
                return self.check(out)

            layer.linear1.forward = forward

    def check(self, value: Tensor) -> Tensor:
        self.passes += 1
        if self.passes == self.at:
            raise torch.OutOfMemoryError("planted")
        return value


@pytest.mark.parametrize("update", SCHEDULES)
def test_under_pressure_units_go_home_within_the_step(update: str, shared: dict[str, Any]) -> None:
    strategy = {"update": update, "recompute": "always"}
    arguments = {"precision": "bf16-mixed", "max_steps": 7}
    a, trainer_a = fit(partial(Crowded, -1), MegaTrainStrategy(device_update="never", **strategy), **arguments)
    for at in (2, 5, 9):  # of the 12 passes of a step, whose first four are forward
        with under(f"pressure in pass {at}"):
            shared["held"].clear()
            b, trainer_b = fit(partial(Crowded, 5 * 12 + at), MegaTrainStrategy(**strategy), **arguments)
            assert shared["held"]
            assert_same_bits(a, b)
            assert_same_optimizer_bits(trainer_a, trainer_b)


def test_no_more_is_taken_when_it_does_not_help(shared: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What steps wait for may be something that moving groups does not shorten."""
    shared["part"] = 0.3
    monkeypatch.setattr(DeviceShare, "_last_step", lambda self: (1.0, 0.3, 1.0))
    make = partial(zoo.Encoder, layers=6, log_norm=False)
    fit(make, MegaTrainStrategy(update="blocking"), precision="bf16-mixed", max_steps=12)
    first = len(shared["held"])
    shared["held"].clear()
    waits = iter([(1.0, w, 1.0) for w in (0, 0, 0, 0.3, 0, 0, 0.2, 0, 0, 0.1, 0, 0)])
    monkeypatch.setattr(DeviceShare, "_last_step", lambda self: next(waits))
    fit(make, MegaTrainStrategy(update="blocking"), precision="bf16-mixed", max_steps=12)
    assert 0 < first < len(shared["held"]) < 7


@pytest.mark.parametrize("update", SCHEDULES)
def test_groups_go_home_if_steps_took_longer_with_them(
    update: str, shared: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graphs that had to go for them may have saved more. What was taken before, and helped, stays."""
    seconds = (
        [(9.0, 0.0)] * 2 + [(1.0, 0.3)] * 2 + [(5.0, 0.0), (0.9, 0.2), (0.92, 0.2)] + [(5.0, 0.0), (0.95, 0.1)] * 3
    )
    steps = iter([(step, waited, 1.0) for step, waited in seconds])
    monkeypatch.setattr(DeviceShare, "_last_step", lambda self: next(steps))
    make = partial(zoo.Encoder, layers=6, log_norm=False)
    strategies = MegaTrainStrategy(update=update, device_update="never"), MegaTrainStrategy(update=update)
    held: list[int | None] = []

    class Held(L.Callback):
        reads_weights = False

        def on_train_batch_end(self, *args: Any) -> None:
            held.append(strategies[1].device_groups)

    arguments = {"precision": "bf16-mixed", "max_steps": 12}
    a, trainer_a = fit(make, strategies[0], **arguments)
    steps = iter([(step, waited, 1.0) for step, waited in seconds])
    b, trainer_b = fit(make, strategies[1], callbacks=[Held()], **arguments)
    first, second = held[3], held[6]
    assert first is not None
    assert second is not None
    assert 0 < first < second
    assert held == [0, 0, 0, *[first] * 3, *[second] * 3, *[first] * 3]
    assert_same_bits(a, b)
    assert_same_optimizer_bits(trainer_a, trainer_b)


@pytest.mark.parametrize("alike", [True, False])
def test_seconds_are_compared_of_equal_batches(
    alike: bool, shared: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = iter([(1.0 + 0.1 * i, 0.3 - 0.02 * i, 1.0) for i in range(8)])
    sizes = iter([100 + i * (not alike) for i in range(8)])
    monkeypatch.setattr(DeviceShare, "_last_step", lambda self: next(steps))
    monkeypatch.setattr(Budget, "size", property(lambda self: next(sizes)))
    homes = gone_home(monkeypatch)
    fit(partial(zoo.Encoder, log_norm=False), MegaTrainStrategy(), precision="bf16-mixed", max_steps=8)
    assert shared["held"]
    assert homes == [0] * alike


@pytest.mark.parametrize("alike", [True, False])
def test_no_more_are_taken_if_that_does_not_help(
    alike: bool, shared: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceShare, "_last_step", lambda self: (1.0, 0.2, 1.0))
    sizes = iter([100 + i * (not alike) for i in range(12)])
    monkeypatch.setattr(Budget, "size", property(lambda self: next(sizes)))
    fit(partial(zoo.Encoder, layers=8, log_norm=False), MegaTrainStrategy(), precision="bf16-mixed", max_steps=12)
    assert 0 < len(shared["held"]) <= 3


class Growing(zoo.Encoder):
    """From the seventh batch on there are four times as many rows."""

    steps = 0

    def __init__(self) -> None:
        super().__init__(layers=4, log_norm=False)

    def loss(self, batch: Tensor) -> Tensor:
        self.steps += 1
        return super().loss(batch.repeat(4, 1) if self.steps > 6 else batch)


@pytest.mark.parametrize("update", SCHEDULES)
def test_groups_go_home_before_a_batch_that_would_not_fit_beside_them(
    update: str, shared: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    returned = []
    give_back = DeviceShare.give_back
    monkeypatch.setattr(DeviceShare, "give_back", lambda self: (returned.append(give_back(self)), returned[-1])[1])
    monkeypatch.setattr(Room, "limit", int(3e7))  # a batch takes 1e7, nearly all of it its own
    both(Growing, shared, update=update, max_steps=10)
    assert len(returned) == 1
    assert returned[0] > 0


def gone_home(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    homes: list[int] = []
    give_up = DeviceShare.give_up
    monkeypatch.setattr(DeviceShare, "give_up", lambda self, groups: (homes.append(groups), give_up(self, groups))[1])
    return homes


@pytest.mark.parametrize("interval", [3, 5])
def test_what_is_done_between_steps_does_not_make_them_slower(
    interval: int, shared: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A validation, after which all groups are taken again."""
    homes = gone_home(monkeypatch)
    clean = iter([(1.0, 0.3, 1.0)] * 40)
    after = iter([(9.0, 0.3, 1.0)] * 40)
    monkeypatch.setattr(DeviceShare, "_last_step", lambda self: next(after if self._interrupted else clean))
    module, trainer = (
        zoo.Encoder(layers=3, log_norm=False),
        L.Trainer(
            strategy=MegaTrainStrategy(update="next_forward"),
            accelerator="cpu",
            precision="bf16-mixed",
            max_steps=14,
            val_check_interval=interval,
            **QUIET,
        ),
    )
    trainer.fit(module, loader(), loader(8))
    assert shared["held"]
    assert shared["recalled"] > 2
    assert not homes


@pytest.mark.parametrize(("seconds", "moves"), [(0.01, True), (0.0, False)])
def test_waiting_is_measured(seconds: float, moves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates that take long behind a forward that does not; nothing moves where the update takes no time."""
    monkeypatch.setattr(lightning_megatrain.session, "device_memory", lambda *_: Room())
    monkeypatch.setattr(share, "WORTH", 0.3)
    update = AdamUpdate.update

    def slow(self: AdamUpdate, *args: Any, **kwargs: Any) -> None:
        on_device = "memory" in kwargs or len(args) > 5
        time.sleep(0.0 if on_device else seconds)
        update(self, *args, **kwargs)

    monkeypatch.setattr(AdamUpdate, "update", slow)
    held = []
    take = DeviceShare._take
    monkeypatch.setattr(DeviceShare, "_take", lambda self, group, by: (held.append(group.name), take(self, group, by)))
    strategy = MegaTrainStrategy(update="next_forward")
    make = partial(zoo.Encoder, layers=5, log_norm=False)
    fit(make, strategy, precision="bf16-mixed", max_steps=7)
    assert bool(held) is moves


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_staged_copies_of_any_length(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_BYTES", 64)
    through = staging.Staging(HostStreams(torch.device("cpu")))
    sources = [torch.randn(size), torch.randint(-99, 99, (size,), dtype=torch.int16), torch.randn(0)]
    for move in (through.to_device, through.to_host):
        targets = [torch.zeros_like(s) for s in sources]
        move(targets, sources)
        assert all(torch.equal(t, s) for t, s in zip(targets, sources, strict=True))
    through.close()


def test_an_error_while_groups_are_away_leaves_an_ordinary_module(shared: dict[str, Any]) -> None:
    class Fails(zoo.Encoder):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            if batch_idx == 6:
                raise ZeroDivisionError("planted")

    from fitting import QUIET

    L.seed_everything(1, verbose=False)
    module = Fails(layers=3, log_norm=False)
    trainer = L.Trainer(
        strategy=MegaTrainStrategy(), accelerator="cpu", devices=1, max_steps=9, precision="bf16-mixed", **QUIET
    )
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, loader())
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in module.parameters())


def test_the_stock_strategy_is_near(shared: dict[str, Any]) -> None:
    """Not only our own two paths agree: the losses are those of plain mixed precision, to its rounding."""
    make = partial(zoo.Encoder, layers=2, dropout=0.0, log_norm=False)
    a, _ = fit(make, stock(), precision="bf16-mixed", max_steps=10)
    b, _ = fit(make, MegaTrainStrategy(), precision="bf16-mixed", max_steps=10)
    assert shared["held"]
    torch.testing.assert_close(torch.stack(a.losses), torch.stack(b.losses), rtol=1e-2, atol=1e-2)
