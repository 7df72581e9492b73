"""Long inputs: what units saved waits on the host, feed-forward parts run in slices, batches are cut as memory asks."""

import weakref
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import zoo
from fitting import QUIET, MegaTrainStrategy, assert_same_bits, assert_same_optimizer_bits, fit, loader, stock
from torch import Tensor, nn

import lightning_megatrain.session
from lightning_megatrain.memory.arena import Arena
from lightning_megatrain.memory.device import DeviceMemory
from lightning_megatrain.stream import engine, microbatch, saved
from lightning_megatrain.stream.microbatch import SliceRows, rows_of_slices
from lightning_megatrain.stream.saved import SavedInputs
from lightning_megatrain.stream.streams import HostStreams


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every input is large enough; the bytes of those that went to the host."""
    monkeypatch.setattr(saved, "_SMALLEST", 1)
    sizes: list[int] = []
    push = SavedInputs._push
    monkeypatch.setattr(SavedInputs, "_push", lambda self, i, t: (sizes.append(t.nbytes), push(self, i, t))[1])
    return sizes


@pytest.mark.parametrize("name", zoo.ALL)
def test_inputs_on_the_host_change_no_bit(name: str, pushed: list[int]) -> None:
    make = partial(zoo.ALL[name], scheduler=True, log_norm=False)
    arguments = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "max_steps": 4}
    a, trainer_a = fit(make, stock(), **arguments)
    b, trainer_b = fit(make, MegaTrainStrategy(activations="host"), **arguments)
    assert pushed
    assert_same_bits(a, b)
    assert_same_optimizer_bits(trainer_a, trainer_b)


class Device(DeviceMemory):
    def __init__(self, limit: int) -> None:
        self.limit = limit

    def allocated(self) -> int:
        return 100_000

    def reset_peak(self) -> None: ...

    def peak(self) -> int:
        return 200_000


# Three units' inputs of 64 rows, 7 positions and 32 fp32 numbers.
@pytest.mark.parametrize(("limit", "goes"), [(100_000 + 4 * 3 * 64 * 7 * 32 * 4 + d, d < 0) for d in (-1, 0)])
def test_auto_sends_what_would_take_a_quarter(
    limit: int, goes: bool, pushed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lightning_megatrain.session, "device_memory", lambda *_: Device(limit))
    make = partial(zoo.Encoder, log_norm=False)
    fit(make, MegaTrainStrategy(recompute="always"), max_steps=1, batch_size=64)
    assert bool(pushed) is goes


def test_host_memory_is_used_again(pushed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Six steps of four units take four buffers, and validation in between none."""
    made = []
    buffer = saved._Buffer

    def counted(arena: Arena) -> Any:
        made.append(arena.nbytes)
        return buffer(arena)

    monkeypatch.setattr(saved, "_Buffer", counted)
    fit(partial(zoo.Encoder, layers=4, log_norm=False), MegaTrainStrategy(activations="host"), max_steps=6)
    assert len(pushed) == 6 * 4
    assert len(made) == 4


class Twice(zoo.Encoder):
    """Two backwards through one graph."""

    def __init__(self) -> None:
        super().__init__(layers=3, dropout=0.0, log_norm=False)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss)
        optimizer.step()
        self.losses.append(loss.detach())


def test_a_graph_that_is_used_twice(pushed: list[int]) -> None:
    a, _ = fit(Twice, stock(), max_steps=4)
    b, _ = fit(Twice, MegaTrainStrategy(activations="host"), max_steps=4)
    assert pushed
    assert_same_bits(a, b)


class Shared(zoo.Zoo):
    """Every block is given what the first made."""

    def __init__(self) -> None:
        super().__init__(log_norm=False)
        self.embed, self.head = nn.Embedding(zoo.VOCAB, 32), nn.Linear(32, zoo.VOCAB)
        self.blocks = nn.ModuleList(nn.TransformerDecoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(4))

    def loss(self, batch: Tensor) -> Tensor:
        memory = x = torch.tanh(self.embed(batch))
        for block in self.blocks:
            x = block(x, memory)
        return zoo.token_loss(self.head(x), batch)


def test_what_many_units_are_given_is_sent_once(pushed: list[int]) -> None:
    a, _ = fit(Shared, MegaTrainStrategy(activations="device"), max_steps=4)
    b, _ = fit(Shared, MegaTrainStrategy(activations="host"), max_steps=4)
    assert len(pushed) == 4 * 4  # the embedding's output once, and three blocks' outputs
    assert_same_bits(a, b)


class InPlace(zoo.Encoder):
    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch)
        for layer in self.net.layers:
            y = layer(x)
            x.data.mul_(1.0)  # not seen, and harmless
            with torch.no_grad():
                x.add_(0.0)
            x = y
        return zoo.token_loss(self.head(x), batch)


def test_an_input_that_is_changed_while_it_is_sent_is_refused(pushed: list[int]) -> None:
    with pytest.raises(RuntimeError, match=r"changed in place while it was being saved.*activations='device'"):
        fit(partial(InPlace, log_norm=False), MegaTrainStrategy(activations="host"), max_steps=2)


def test_what_went_to_the_host_is_gone_from_the_device(pushed: list[int]) -> None:
    inputs = SavedInputs("host", HostStreams(torch.device("cpu")), None, 8, pin=False, host_limit=None)
    inputs.begin()
    sources, kept = [], []
    for _ in range(8):
        tensor = torch.ones(1000, requires_grad=True) * 1.0
        kept.append(inputs.put([tensor]))
        sources.append(weakref.ref(tensor))
        del tensor
    assert sum(source() is not None for source in sources) <= 2  # their copies may be under way
    assert all(inputs.get(one, [])[0].sum() == 1000 for one in kept)


def test_what_the_host_has_no_room_for_stays_unless_it_was_told_to_go(pushed: list[int]) -> None:
    streams = HostStreams(torch.device("cpu"))
    for where, most in (("auto", 3), ("host", 0)):
        inputs = SavedInputs(where, streams, Device(1000), 8, pin=False, host_limit=12_000)
        for _ in range(2):
            inputs.begin()
            tensors = [torch.ones(1000, requires_grad=True) * 1.0 for _ in range(5)]
            if where == "host":
                with pytest.raises(
                    RuntimeError, match=r"0 bytes are left; set MegaTrainStrategy\(activations='device'"
                ):
                    kept = [inputs.put([tensor]) for tensor in tensors]
                break
            kept = [inputs.put([tensor]) for tensor in tensors]
            assert [len(one) for one in kept] == [1] * most + [0] * (5 - most)
            del kept


@pytest.mark.parametrize(
    "form",
    [
        lambda t: t,
        lambda t: t.transpose(1, 2),
        lambda t: t.permute(2, 0, 1),
        lambda t: t[:, ::2, 1:],
        lambda t: t[:, :1].expand(4, 5, 6),
        lambda t: t[:1].expand(4, 5, 6),
        lambda t: t[0, 0, 0],
    ],
)
def test_saved_inputs_lie_as_torch_would_lay_them(form: Any) -> None:
    tensor = form(torch.randn(4, 5, 6))
    assert saved._strides_without_gaps(tensor) == list(torch.empty_like(tensor).stride())


def test_inputs_of_changing_length_share_memory(pushed: list[int]) -> None:
    inputs = SavedInputs("host", HostStreams(torch.device("cpu")), None, 4, pin=False, host_limit=20_000)
    for length in [*range(100, 4000, 300), *range(4000, 100, -300)]:
        inputs.begin()
        one = inputs.put([torch.ones(length, requires_grad=True) * 1.0])
        assert one[0].host.shape == (length,)
        assert inputs.nbytes <= 20_000
        del one


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        """``[time, batch, width]``, a view of what lies batch first."""
        flat = x.transpose(0, 1).view(-1, 32)
        return x + torch.tanh(self.inner(flat)).view(x.shape[1], x.shape[0], 32).transpose(0, 1)


class Strided(zoo.Zoo):
    def __init__(self) -> None:
        super().__init__(log_norm=False)
        self.embed, self.head = nn.Embedding(zoo.VOCAB, 32), nn.Linear(32, zoo.VOCAB)
        self.blocks = nn.ModuleList(TimeFirst() for _ in range(3))

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch).transpose(0, 1)
        for block in self.blocks:
            x = block(x)
        return zoo.token_loss(self.head(x.transpose(0, 1)), batch)


class Later(zoo.Encoder):
    """A graph whose backward is run in a later step than the one in which its inputs began to come back."""

    def __init__(self) -> None:
        super().__init__(layers=3, dropout=0.0, log_norm=False)
        self.automatic_optimization = False
        self.old: Tensor | None = None

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self.loss(batch)
        if self.old is None:
            self.old = loss
            self.manual_backward(self.loss(batch.flip(1)))
        else:
            self.manual_backward(self.old)
            self.old = None
        self.optimizers().zero_grad()


@pytest.mark.parametrize("make", [Strided, Later])
def test_inputs_come_back_as_they_were(make: Any, pushed: list[int]) -> None:
    arguments = {"max_steps": -1, "max_epochs": 1, "limit_train_batches": 4}
    a, _ = fit(make, MegaTrainStrategy(activations="device"), **arguments)
    b, _ = fit(make, MegaTrainStrategy(activations="host"), **arguments)
    assert pushed
    assert_same_bits(a, b)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_an_error_while_the_engine_is_made_leaves_no_stand_in(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "Residents", full)
        module = zoo.Llama(log_norm=False)
        trainer = L.Trainer(strategy=MegaTrainStrategy(sequence_chunks=2), accelerator="cpu", devices=1, **QUIET)
        with pytest.raises(torch.OutOfMemoryError):
            trainer.fit(module, loader())
        assert not any("forward" in vars(child) for child in module.modules())
    fit(partial(zoo.Llama, log_norm=False), MegaTrainStrategy(sequence_chunks=2), precision=precision, max_steps=2)


def test_too_little_host_memory_is_one_sentence(pushed: list[int]) -> None:
    inputs = SavedInputs("host", HostStreams(torch.device("cpu")), None, 4, pin=False, host_limit=1000)
    first = inputs.put([torch.ones(200, requires_grad=True)])
    with pytest.raises(RuntimeError, match=r"takes 400 bytes on the host, beside 800 bytes .* 200 bytes are left; set"):
        inputs.put([torch.ones(100, requires_grad=True)])
    assert first[0].host.sum() == 200
    inputs.close()


@pytest.mark.parametrize("recompute", ["always", "never"])
@pytest.mark.parametrize("chunks", [2, 3, 50])
def test_feed_forward_parts_in_slices(chunks: int, recompute: str) -> None:
    make = partial(zoo.Llama, log_norm=False)
    a, _ = fit(make, stock(), max_steps=5)
    b, _ = fit(make, MegaTrainStrategy(sequence_chunks=chunks, recompute=recompute), max_steps=5)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-4)
    assert all("forward" not in vars(m) for m in b.modules())


def test_slices_are_gone_before_the_next() -> None:
    """What the feed-forward part makes is there for one slice: its saved tensors are counted in the forward."""
    most = 0

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 256), nn.Linear(256, 32)

        def forward(self, x: Tensor) -> Tensor:
            nonlocal most
            most = max(most, x.shape[1])
            return self.down(torch.relu(self.up(x)))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Counts()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mlp(x)

    class Model(zoo.Zoo):
        def __init__(self) -> None:
            super().__init__(log_norm=False)
            self.embed, self.head = nn.Embedding(zoo.VOCAB, 32), nn.Linear(32, zoo.VOCAB)
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def loss(self, batch: Tensor) -> Tensor:
            x = self.embed(batch)
            for block in self.blocks:
                x = block(x)
            return zoo.token_loss(self.head(x), batch)

    fit(Model, MegaTrainStrategy(sequence_chunks=4), max_steps=2)
    assert most == 2  # of 7 positions


def test_units_without_a_feed_forward_part_are_refused_before_anything() -> None:
    with pytest.raises(ValueError, match=r"child 'mlp' in slices, and unit 'net.layers.0' has none; set"):
        fit(zoo.Encoder, MegaTrainStrategy(sequence_chunks=2), max_steps=2)


@pytest.mark.parametrize(
    ("rows", "tokens", "expected"),
    [(16, 2048, 8), (20, 2048, 7), (8, 2048, None), (3, 131072, 1), (1, 262144, None), (64, 1, None)],
)
def test_rows_that_fill_a_slice(rows: int, tokens: int, expected: int | None) -> None:
    assert rows_of_slices(rows, tokens) == expected
    assert SliceRows("auto").of([torch.empty(rows, tokens, 4, device="meta")]) == expected


class Cramped(zoo.Encoder):
    """A device on which more than three rows at once do not fit a block's backward, or forward."""

    def __init__(self, where: str, dropout: float = 0.0) -> None:
        super().__init__(layers=3, dropout=dropout, log_norm=False)
        self.largest: list[int] = []
        for layer in self.net.layers:
            inner = layer.linear1.forward

            def forward(x: Tensor, inner: Any = inner) -> Tensor:
                self.largest.append(x.shape[0])
                if where == "forward" and x.shape[0] > 3:
                    raise torch.OutOfMemoryError("planted")
                out = inner(x)
                if out.requires_grad and where == "backward":
                    out.register_hook(self.check)
                return out

            layer.linear1.forward = forward

    def check(self, gradient: Tensor) -> Tensor:
        if gradient.shape[0] > 3:
            raise torch.OutOfMemoryError("planted")
        return gradient


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_slices_shrink_until_they_fit(where: str, dropout: float) -> None:
    if where == "backward" and dropout:
        # Other slices would draw other random numbers than the forward did.
        with pytest.raises(torch.OutOfMemoryError):
            fit(partial(Cramped, where, dropout), MegaTrainStrategy(microbatch="auto"), max_steps=3, batch_size=8)
        return
    b, _ = fit(partial(Cramped, where, dropout), MegaTrainStrategy(microbatch="auto"), max_steps=3, batch_size=8)
    a, _ = fit(partial(Cramped, "nowhere", dropout), MegaTrainStrategy(microbatch=2), max_steps=3, batch_size=8)
    assert b.largest[-1] == 2
    if where == "forward":  # and so everything is as if it had been asked for
        assert_same_bits(a, b)
    for x, y in zip(a.losses, b.losses, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)


def test_one_row_that_does_not_fit_is_the_users_error() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        fit(partial(Cramped, "forward"), MegaTrainStrategy(microbatch=None), max_steps=2, batch_size=8)


@pytest.mark.parametrize("name", ["moe", "odd"])
def test_batches_that_cannot_be_cut_go_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their blocks return a number for the whole batch."""
    monkeypatch.setattr(microbatch, "TOKENS", 14)
    make = partial(zoo.ALL[name], log_norm=False)
    a, _ = fit(make, stock(), max_steps=4)
    b, _ = fit(make, MegaTrainStrategy(microbatch="auto"), max_steps=4)
    assert_same_bits(a, b)
    with pytest.raises(RuntimeError, match="cannot be joined"):
        fit(make, MegaTrainStrategy(microbatch=2), max_steps=4)
