"""Values that enter or leave a block by a side door would have wrong gradients: they are refused, or supported."""

import dataclasses
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import zoo
from fitting import SCHEDULES, MegaTrainStrategy, assert_same_bits, fit, stock, under
from torch import Tensor, nn


@pytest.fixture(params=["always", "never"], autouse=True)
def recompute(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it holds for graphs that are computed again and for graphs that are kept."""
    make = MegaTrainStrategy.__init__
    monkeypatch.setattr(
        MegaTrainStrategy, "__init__", lambda self, **kw: make(self, **{"recompute": request.param, **kw})
    )


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.relu(self.a(x)))


class Plain(zoo.Zoo):
    block: type[nn.Module] = Block

    def __init__(self, **kw: Any) -> None:
        super().__init__(**{"log_norm": False, "optimizer": "sgd", "lr": 0.1, **kw})
        self.embed, self.head = nn.Embedding(zoo.VOCAB, 32), nn.Linear(32, zoo.VOCAB)
        self.blocks = nn.ModuleList(self.block() for _ in range(4))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, batch: Tensor) -> Tensor:
        return zoo.token_loss(self.head(self.body(self.embed(batch))), batch)


def same(make: Any, **arguments: Any) -> None:
    update = arguments.pop("update", "auto")
    a, _ = fit(make, stock(), max_steps=4, **arguments)
    b, _ = fit(make, MegaTrainStrategy(update=update), max_steps=4, **arguments)
    assert_same_bits(a, b)


class LeavesAuxiliary(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.aux = h.square().mean()
        return x + self.b(torch.relu(h))


class Auxiliary(Plain):
    block = LeavesAuxiliary

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + sum(b.aux for b in self.blocks)


class Hooked(Plain):
    """What `output_router_logits` does: a hook inside the block collects, and the loss uses what it collected."""

    def loss(self, batch: Tensor) -> Tensor:
        kept: list[Tensor] = []
        handles = [b.a.register_forward_hook(lambda m, i, o: kept.append(o)) for b in self.blocks]
        loss = super().loss(batch)
        for handle in handles:
            handle.remove()
        return loss + sum(k.square().mean() for k in kept)


@pytest.mark.parametrize("update", SCHEDULES)
@pytest.mark.parametrize("make", [Auxiliary, Hooked])
def test_a_tensor_that_leaves_by_a_side_door(make: Any, update: str) -> None:
    with pytest.raises(RuntimeError, match=r"made inside unit 'blocks.\d' reached the loss by another way"):
        fit(make, MegaTrainStrategy(update=update), max_steps=2)


@dataclasses.dataclass
class State:
    x: Tensor


class TakesState(Block):
    def forward(self, x: Tensor, state: State) -> Tensor:
        return super().forward(x) + state.x


class WithState(Plain):
    block = TakesState

    def body(self, x: Tensor) -> Tensor:
        state = State(x)
        for block in self.blocks:
            x = block(x, state)
        return x


class ReadsAttribute(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.context


class WithContext(Plain):
    block = ReadsAttribute

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.context = x
        return super().body(x)


@pytest.mark.parametrize("make", [WithState, WithContext])
def test_a_tensor_that_enters_by_a_side_door(make: Any) -> None:
    with pytest.raises(RuntimeError, match=r"'blocks.0' uses a tensor that requires a gradient and is neither"):
        fit(make, MegaTrainStrategy(), max_steps=2)


class ReturnsState(Block):
    def forward(self, state: State) -> State:
        return State(super().forward(state.x))


class ThroughState(Plain):
    block = ReturnsState

    def body(self, x: Tensor) -> Tensor:
        state = State(x)
        for block in self.blocks:
            state = block(state)
        return state.x


def test_a_result_without_tensors() -> None:
    with pytest.raises(RuntimeError, match=r"'blocks.0' returns no tensor that autograd could follow"):
        fit(ThroughState, MegaTrainStrategy(), max_steps=2)


class Reassigns(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) + self.ema
        if self.training:
            self.ema = 0.5 * self.ema + 0.5 * y.detach().mean((0, 1))
        return y


class Reassigning(Plain):
    block = Reassigns


def test_buffers_that_are_replaced() -> None:
    same(Reassigning)


class NormalisesInside(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.norm(x.flatten(0, 1)).view_as(x)


class PartlyTraining(Plain):
    """Blocks are in evaluation mode, their batch norms in training mode from the second step on."""

    block = NormalisesInside

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.blocks.eval()
        for block in self.blocks:
            block.norm.train(batch_idx > 0)


def test_buffers_of_a_submodule_in_training_mode() -> None:
    a, _ = fit(PartlyTraining, stock(), max_steps=4)
    b, _ = fit(PartlyTraining, MegaTrainStrategy(), max_steps=4)
    for key, value in a.state_dict().items():  # the block's input feeds three places, so the last bit may differ
        torch.testing.assert_close(value, b.state_dict()[key], rtol=1e-4, atol=1e-5)
    assert b.blocks[0].norm.num_batches_tracked == 3


class Complex(Block):
    def forward(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)) if not x.is_complex() else x
        y = super().forward(torch.view_as_real(z).flatten(-2))
        return torch.view_as_complex(y.view(*y.shape[:-1], -1, 2))


class ComplexStream(Plain):
    block = Complex

    def body(self, x: Tensor) -> Tensor:
        return torch.view_as_real(super().body(x)).flatten(-2)


def test_complex_activations() -> None:
    same(ComplexStream)


class Adversarial(Plain):
    """Takes a gradient with respect to its input first, as FGSM does; parameters must not see it."""

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch)
        first = zoo.token_loss(self.head(self.body(x)), batch)
        (g,) = torch.autograd.grad(first, x)
        return zoo.token_loss(self.head(self.body(x + 0.1 * g.sign())), batch)


@pytest.mark.parametrize(
    ("update", "accumulate"), [("blocking", 1), ("blocking", 2), ("next_forward", 2), ("in_backward", 1)]
)
def test_gradients_with_respect_to_inputs_leave_parameters_alone(update: str, accumulate: int) -> None:
    same(Adversarial, update=update, accumulate_grad_batches=accumulate)


class Manual(Plain):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.automatic_optimization, self.how = False, how

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer, loss = self.optimizers(), self.loss(batch)
        optimizer.zero_grad()
        loss.backward() if self.how == "raw" else self.manual_backward(loss)
        optimizer.step()


def test_a_backward_behind_the_strategys_back() -> None:
    same(partial(Manual, "manual"))
    with pytest.raises(RuntimeError, match=r"call self.manual_backward\(loss\)"):
        fit(partial(Manual, "raw"), MegaTrainStrategy(), max_steps=2)


class Surgery(Plain):
    """Keeps the gradients of one loss, without copying them, while another is differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        kept = [p.grad for p in self.parameters()]
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch.flip(1)))
        for p, g in zip(self.parameters(), kept, strict=True):
            p.grad = p.grad + 0.5 * g
        optimizer.step()


def test_gradients_that_somebody_keeps_stay_what_they_were() -> None:
    same(Surgery)


class ForeignParameter(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.outside = [nn.Parameter(torch.zeros(zoo.VOCAB))]

    def loss(self, batch: Tensor) -> Tensor:
        return zoo.token_loss(self.head(self.body(self.embed(batch))) + self.outside[0], batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.outside], lr=0.1)


def test_a_parameter_outside_the_module_is_stepped_too() -> None:
    a, _ = fit(ForeignParameter, stock(), max_steps=4)
    b, _ = fit(ForeignParameter, MegaTrainStrategy(), max_steps=4)
    assert_same_bits(a, b)
    assert torch.equal(a.outside[0], b.outside[0])


class LateHead(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.head.requires_grad_(batch_idx > 1)


def test_a_resident_parameter_unfrozen_between_steps() -> None:
    a, _ = fit(LateHead, stock())
    for update in SCHEDULES:
        with under(update):
            b, _ = fit(LateHead, MegaTrainStrategy(update=update))
            assert_same_bits(a, b)


class TooLate(LateHead):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass

    def loss(self, batch: Tensor) -> Tensor:
        self.head.requires_grad_()
        return super().loss(batch)


def test_a_parameter_unfrozen_within_a_step() -> None:
    with pytest.raises(RuntimeError, match=r"'head.weight' was frozen when this step began"):
        fit(TooLate, MegaTrainStrategy())


class Clamped(Plain):
    twice = False

    def __init__(self) -> None:
        super().__init__()
        for p in self.parameters():
            p.register_hook(lambda g: g.clamp(-1e-3, 1e-3))

    def body(self, x: Tensor) -> Tensor:
        return super().body(super().body(x)) if self.twice else super().body(x)


class ClampedTwice(Clamped):
    twice = True


def test_gradient_hooks_on_parameters() -> None:
    same(Clamped)
    with pytest.raises(RuntimeError, match=r"used twice in one step and a parameter of it has a gradient hook"):
        fit(ClampedTwice, MegaTrainStrategy())


class TwoClipped(zoo.Zoo):
    """Clips both optimizers before it steps either."""

    def __init__(self) -> None:
        super().__init__(log_norm=False)
        self.automatic_optimization = False
        self.nets = nn.ModuleDict({"x": Plain(), "y": Plain()})

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        x, y = self.optimizers()
        self.manual_backward(self.nets["x"].loss(batch) + 3.0 * self.nets["y"].loss(batch))
        self.clip_gradients(x, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        if self.together:
            self.clip_gradients(y, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            x.step()
        else:
            x.step()
            self.clip_gradients(y, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        y.step()
        x.zero_grad()
        y.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(n.parameters(), lr=1e-3) for n in self.nets.values()], []


def test_clipping_two_optimizers_before_stepping_either() -> None:
    runs = []
    for together in (True, False):
        TwoClipped.together = together
        runs.append(fit(TwoClipped, MegaTrainStrategy(), precision="bf16-mixed", max_steps=4)[0])
    assert_same_bits(*runs)


class Sampling(Plain):
    """A forward outside any step, then a write to the weights: neither may be lost."""

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.losses.append(self.loss(torch.zeros(2, 4, dtype=torch.long)))


class Halves(L.Callback):
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        with torch.no_grad():
            for p in pl_module.parameters():
                p.data.mul_(0.5)


def test_weights_written_after_a_forward_outside_a_step() -> None:
    a, _ = fit(Sampling, stock(), max_steps=-1, max_epochs=3, samples=16, callbacks=[Halves()])
    b, _ = fit(Sampling, MegaTrainStrategy(), max_steps=-1, max_epochs=3, samples=16, callbacks=[Halves()])
    assert_same_bits(a, b)


class StepHook(Plain):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

        def shrink(*args: Any) -> None:
            for p in self.parameters():
                if p.grad is not None:
                    p.grad.mul_(0.1)

        optimizer.register_step_pre_hook(shrink)
        return optimizer


class SmallStep(Plain):
    def __init__(self) -> None:
        super().__init__(lr=0.01)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_optimizer_step_hooks_see_and_change_final_gradients(precision: str) -> None:
    a, _ = fit(SmallStep, MegaTrainStrategy(), precision=precision, max_steps=3)
    b, _ = fit(StepHook, MegaTrainStrategy(), precision=precision, max_steps=3)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


def test_batch_and_sequence_of_one_size_are_refused_with_a_mask() -> None:
    class Masked(zoo.Encoder):
        def loss(self, batch: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(batch.shape[1], device=batch.device)
            return zoo.token_loss(self.head(self.net(self.embed(batch), mask=mask)), batch)

    make = partial(Masked, dropout=0.0)
    with pytest.raises(RuntimeError, match=r"7 rows of 7 positions"):
        fit(make, MegaTrainStrategy(microbatch=3), batch_size=7, max_steps=2)
    fit(make, MegaTrainStrategy(microbatch=3), batch_size=6, max_steps=2)
