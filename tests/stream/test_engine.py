"""The engine by itself: slots, order, microbatches, odd calls."""

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import zoo
from fitting import MegaTrainStrategy, assert_same_bits, fit, stock
from torch import Tensor, nn

from lightning_megatrain.memory.slots import SlotRing
from lightning_megatrain.stream import patch
from lightning_megatrain.stream.gradients import ParameterGradients
from lightning_megatrain.stream.microbatch import Slices
from lightning_megatrain.stream.order import UseOrder
from lightning_megatrain.stream.streams import HostStreams


def test_order_is_learned_and_a_loop_predicts_itself() -> None:
    order = UseOrder()
    for unit in (0, 1, 2):
        assert order.observe(unit, 2) == []
    order.begin()
    assert order.observe(0, 2) == [1, 2]
    assert order.observe(2, 2) == []  # 1 was skipped
    order.begin()
    assert order.observe(0, 2) == [2]
    for unit in (1, 0, 1, 0):
        order.observe(unit, 1)
    assert order.observe(1, 3) == [0]


def test_the_slot_unused_for_longest_is_recycled() -> None:
    ring = SlotRing(2, 8, torch.float32, torch.device("cpu"))
    a, b = ring.take(0, 0), ring.take(1, 0)
    assert a is not None
    assert b is not None
    ring.touch(a)
    assert ring.take(2, 0) is b
    assert ring.find(0, 0) is a
    assert ring.find(0, 1) is None
    a.users = b.users = 1
    assert ring.take(3, 0) is None


class CountedStreams(L.Callback):
    """Counts fetches and pushes of a fit, per step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copies: list[str] = []
        original = HostStreams.copy

        def copy(streams: HostStreams, lane: Any, target: Tensor, source: Tensor, after: Any = ()) -> Any:
            self.copies.append(lane)
            return original(streams, lane, target, source, after)

        monkeypatch.setattr(HostStreams, "copy", copy)
        self.steps: list[tuple[int, int]] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.copies.clear()

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps.append((self.copies.count("fetch"), self.copies.count("push")))


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_units_still_in_slots_are_not_fetched_again(prefetch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = CountedStreams(monkeypatch)
    layers, residents = 6, 4 + 2 + 1  # residents: embedding, norm and head in one group
    make = partial(zoo.Llama, layers=layers, log_norm=False)
    fit(make, MegaTrainStrategy(prefetch=prefetch), callbacks=[counted], max_steps=4)
    slots = min(prefetch + 1, layers)
    for fetches, pushes in counted.steps:
        assert fetches == 1 + layers + (layers - slots)  # residents, forward, backward
        assert layers < pushes <= layers + residents


@pytest.mark.parametrize("size", [1, 3, 4, 9])
@pytest.mark.parametrize("name", ["llama", "gpt2", "encoder"])
def test_microbatch_gives_the_gradients_of_the_whole_batch(name: str, size: int) -> None:
    make = {
        "llama": partial(zoo.Llama, optimizer="sgd"),
        "gpt2": partial(zoo.Gpt2, optimizer="sgd"),
        "encoder": partial(zoo.Encoder, dropout=0.0, optimizer="sgd"),
    }[name]

    def without_dropout() -> zoo.Zoo:
        module = make()
        for m in module.modules():
            if isinstance(m, nn.Dropout):
                m.p = 0.0
            if hasattr(m, "attn_dropout") and isinstance(m.attn_dropout, nn.Dropout):
                m.attn_dropout.p = 0.0
        return module

    a, _ = fit(without_dropout, MegaTrainStrategy(), max_steps=3, batch_size=7)
    b, _ = fit(without_dropout, MegaTrainStrategy(microbatch=size), max_steps=3, batch_size=7)
    for (key, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6, msg=key)
    assert a.losses[0].allclose(b.losses[0])


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_gradients_of_slices_are_added_in_fp32_and_rounded_once(count: int) -> None:
    slices = Slices("unit", [torch.empty(count, 3)], 1)
    parts = (torch.randn(count, 1000) * torch.exp2(torch.randint(-20, 20, (count, 1000)).float())).bfloat16()
    before = parts.clone()
    sums = ParameterGradients(3, slices)
    for index, part in enumerate(parts):
        sums.add([part, part if index == 0 else None, None])
    whole, once, never = sums.result()
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part.float()
    assert whole is not None
    assert once is not None
    assert never is None
    assert torch.equal(whole.bfloat16(), expected.bfloat16())
    assert torch.equal(once.bfloat16(), parts[0])
    assert torch.equal(parts, before)


def test_microbatch_with_dropout_recomputes_what_forward_saw() -> None:
    """The loss of a step falls along its own gradient only if the recompute drew the forward's masks."""
    a, _ = fit(partial(zoo.Encoder, dropout=0.5), MegaTrainStrategy(microbatch=2), max_steps=3, precision="32-true")
    b, _ = fit(partial(zoo.Encoder, dropout=0.5), MegaTrainStrategy(microbatch=2, prefetch=0), max_steps=3)
    assert_same_bits(a, b)


def test_microbatch_refuses_outputs_without_a_batch() -> None:
    with pytest.raises(
        RuntimeError, match=r"'blocks.0' returns a tensor of shape \(\).*set MegaTrainStrategy\(microbatch=None\)"
    ):
        fit(zoo.Moe, MegaTrainStrategy(microbatch=2))


class Cached(zoo.Llama):
    """Trains with the key-value cache left on, as `transformers` does by default."""

    def __init__(self, **kw: Any) -> None:
        super().__init__(**kw)
        self.model.config.use_cache = True


def test_key_value_caches_are_not_filled_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    make = partial(Cached, log_norm=False)
    a, _ = fit(make, stock())
    monkeypatch.setattr(patch, "_cache_warned", False)
    with pytest.warns(UserWarning, match="set use_cache=False"):
        b, _ = fit(make, MegaTrainStrategy())
    assert_same_bits(a, b)


class Generating(zoo.Llama):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.generated = self.model.generate(batch[:2, :3], max_new_tokens=5, do_sample=False, use_cache=True)


def test_generation_inside_validation() -> None:
    outputs = []
    for strategy in (stock(), MegaTrainStrategy()):
        L.seed_everything(1, verbose=False)
        module = Generating(log_norm=False)
        trainer = L.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=1,
            max_steps=3,
            val_check_interval=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        from fitting import loader

        trainer.fit(module, loader(), loader(4))
        outputs.append(module.generated)
    assert torch.equal(*outputs)


class ReturnsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32))
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + torch.relu(self.linear(x)), self.weight


class Aliasing(zoo.Zoo):
    """Blocks that hand out their weights, which must not be the slot's memory."""

    def __init__(self) -> None:
        super().__init__(log_norm=False)
        self.embed, self.head = nn.Embedding(zoo.VOCAB, 32), nn.Linear(32, zoo.VOCAB)
        self.blocks = nn.ModuleList(ReturnsWeight() for _ in range(6))

    def loss(self, batch: Tensor) -> Tensor:
        x, weights = self.embed(batch), []
        for block in self.blocks:
            x, w = block(x)
            weights.append(w)
        return zoo.token_loss(self.head(x), batch) + sum((i + 1) * w.square().sum() for i, w in enumerate(weights))


def test_outputs_that_alias_weights_survive_their_slot() -> None:
    a, _ = fit(Aliasing, stock())
    b, _ = fit(Aliasing, MegaTrainStrategy(prefetch=0))
    assert_same_bits(a, b)


class Regularised(zoo.Encoder):
    """Uses unit weights outside their unit."""

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + 0.01 * sum(p.square().sum() for p in self.parameters())


def test_weights_used_outside_their_unit_get_their_gradient() -> None:
    a, _ = fit(partial(Regularised, optimizer="sgd"), stock(), max_steps=3)
    b, _ = fit(partial(Regularised, optimizer="sgd"), MegaTrainStrategy(), max_steps=3)
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(x, y)
    with pytest.raises(RuntimeError, match=r"used outside its unit.*update='blocking'"):
        fit(partial(Regularised, log_norm=False), MegaTrainStrategy(update="in_backward"))


class Autocasting(zoo.Encoder):
    """Switches autocast on for some blocks by hand, in a `32-true` fit."""

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch)
        for i, block in enumerate(self.net.layers):
            with torch.autocast("cpu", torch.bfloat16, enabled=i == 1):
                x = block(x)
        return zoo.token_loss(self.head(x.float()), batch)


def test_recompute_sees_the_autocast_of_each_block() -> None:
    a, _ = fit(partial(Autocasting, optimizer="sgd"), stock(), max_steps=3)
    b, _ = fit(partial(Autocasting, optimizer="sgd"), MegaTrainStrategy(), max_steps=3)
    assert_same_bits(a, b)
