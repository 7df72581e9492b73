"""Conversations from files to batches: split, truncation, bad lines, order, resuming, training."""

import json
from pathlib import Path

import lightning as L
import pytest
import torch
from fitting import QUIET, MegaTrainStrategy
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatrain.callbacks.throughput import NUM_TOKENS
from lightning_megatrain.recipes.bytes_data import StdlibBytes
from lightning_megatrain.recipes.causal_lm import CausalLM
from lightning_megatrain.recipes.chat_data import ChatJsonl
from lightning_megatrain.recipes.offline_model import make_offline_model

VOCABULARY = 400


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("chat") / "model"
    return str(make_offline_model(path, vocab_size=VOCABULARY, hidden_size=32, layers=1))


def record(number, words=3):
    return {"instruction": f"Question {number}?", "output": " ".join([f"answer-{number}"] * words)}


def write(path, records):
    lines = [entry if isinstance(entry, str) else json.dumps(entry) for entry in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


@pytest.fixture
def train_path(tmp_path):
    return write(tmp_path / "train.jsonl", [record(n, words=1 + n % 7) for n in range(120)])


def make(train_path, tokenizer, **kwargs):
    settings = {"seq_len": 128, "batch_size": 2, "val_fraction": 0.2, **kwargs}
    return ChatJsonl(train_path=train_path, tokenizer=tokenizer, **settings)


def ready(*args, **kwargs):
    data = make(*args, **kwargs)
    data.setup("fit")
    return data


def texts(data, loader):
    """What the model is to say, over all batches, one string for each answer."""
    labels = torch.cat([batch["labels"].flatten() for batch in loader])
    return sorted(data.decode(labels[labels >= 0]).split("<|im_end|>")[:-1])


@pytest.mark.parametrize("packing", [True, False])
def test_every_answer_is_learned_once_and_nothing_else(train_path, tokenizer, packing):
    data = ready(train_path, tokenizer, packing=packing, val_fraction=0.0, batch_size=1)
    assert texts(data, data.train_dataloader()) == sorted(record(n, words=1 + n % 7)["output"] for n in range(120))
    assert data.val_dataloader() == []
    report = data.report.train
    batches = list(data.train_dataloader())
    assert len(batches) == len(data.train_dataloader()) == report.rows
    assert (report.records, report.truncated, report.dropped, report.tokens_lost) == (120, 0, 0, 0)
    assert sum(batch[NUM_TOKENS] for batch in batches) == report.tokens
    assert sum(int((batch["labels"] >= 0).sum()) for batch in batches) == report.targets


def test_packing_fills_rows(train_path, tokenizer):
    full, single = (ready(train_path, tokenizer, packing=packing).report.train for packing in (True, False))
    assert full.tokens == single.tokens
    assert single.rows == single.records
    assert full.tokens / (full.rows * 128) > 0.9


def test_the_split_depends_on_content_alone(tmp_path, train_path, tokenizer):
    one = ready(train_path, tokenizer)
    lines = list(reversed(Path(train_path).read_text().splitlines()))
    other = ready(write(tmp_path / "reversed.jsonl", lines + lines), tokenizer)
    val = texts(one, one.val_dataloader())
    assert 10 < len(val) < 40
    assert texts(other, other.val_dataloader()) == sorted(val + val)
    assert not set(val) & set(texts(one, one.train_dataloader()))


def test_a_validation_file_takes_the_fraction_s_place(tmp_path, train_path, tokenizer):
    val_path = write(tmp_path / "val.jsonl", [record(900), record(901)])
    data = ready([train_path, train_path], tokenizer, val_path=val_path)
    assert data.report.train.records == 240
    assert texts(data, data.val_dataloader()) == [record(900)["output"], record(901)["output"]]


def test_what_is_too_long_is_cut_and_counted(tmp_path, tokenizer):
    long_question = {"instruction": "why " * 100, "output": "lost"}
    path = write(tmp_path / "long.jsonl", [record(1), record(2, words=100), long_question])
    data = ready(path, tokenizer, val_fraction=0.0, seq_len=64, batch_size=1)
    report = data.report.train
    assert (report.records, report.truncated, report.dropped) == (2, 1, 1)
    whole = sum(len(data.chat.tokens(messages)[0]) for _, _, messages in data.records())
    assert report.tokens + report.tokens_lost == whole
    assert "1 truncated, 1 dropped" in str(data.report)
    [learned] = texts(data, data.train_dataloader())  # the cut answer has no end
    assert learned.endswith(record(1)["output"]) or learned.startswith(record(1)["output"])
    assert "lost" not in learned


BAD = [record(1), "{broken", {"text": "?"}, record(2), {"instruction": "Hi", "output": ""}, record(3)]


def test_a_bad_line_is_refused_with_its_place(tmp_path, tokenizer):
    path = write(tmp_path / "bad.jsonl", BAD)
    with pytest.raises(ValueError, match=rf"{path}:2: needed one JSON object.*data\.on_bad_record=skip"):
        ready(path, tokenizer)


def test_bad_lines_are_skipped_counted_and_named(tmp_path, tokenizer):
    path = write(tmp_path / "bad.jsonl", BAD + ["[]"] * 6)
    data = ready(path, tokenizer, on_bad_record="skip", val_fraction=0.0, batch_size=1)
    assert data.report.train.records == 3
    assert data.report.bad_records == 9
    assert [place.split(": ")[0] for place in data.report.bad_places] == [f"{path}:{line}" for line in (2, 3, 5, 7, 8)]
    assert "Skipped 9 bad records" in str(data.report)
    assert "and 4 more" in str(data.report)


def test_max_records_bounds_the_good_ones(tmp_path, tokenizer):
    path = write(tmp_path / "bad.jsonl", BAD)
    data = ready(path, tokenizer, on_bad_record="skip", val_fraction=0.0, batch_size=1, max_records=2)
    assert (data.report.train.records, data.report.bad_records) == (2, 2)


def test_order_is_a_function_of_seed_and_epoch(train_path, tokenizer):
    def order(seed, epoch):
        loader = ready(train_path, tokenizer, seed=seed).train_dataloader()
        loader.sampler.set_epoch(epoch)
        return [batch["input_ids"] for batch in loader]

    def same(a, b):
        return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    assert same(order(1, 0), order(1, 0))
    assert not same(order(1, 0), order(1, 1))
    assert not same(order(1, 0), order(2, 0))


def module():
    config = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128}
    return CausalLM("llama", config, lr=3e-3)


class Seen(L.Callback):
    """The batches and losses of a fit."""

    def __init__(self):
        self.batches, self.losses = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches.append(batch["input_ids"].clone())
        self.losses.append(float(outputs["loss"]))


def fit(data, folder, steps, ckpt_path=None, **kwargs):
    seen = Seen()
    save = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=steps)
    trainer = L.Trainer(
        strategy=MegaTrainStrategy(),
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        callbacks=[seen, save],
        **{**QUIET, "enable_checkpointing": True, "limit_val_batches": 0, **kwargs},
    )
    trainer.fit(module(), data, ckpt_path=ckpt_path)
    return seen


@pytest.mark.parametrize("kind", ["chat", "bytes"])
def test_a_fit_that_stops_within_an_epoch_goes_on_with_the_next_batch(tmp_path, train_path, tokenizer, kind):
    def data():
        if kind == "bytes":
            return StdlibBytes(seq_len=32, batch_size=4, max_train_bytes=32 * 4 * 6, val_windows=4)
        return make(train_path, tokenizer)

    probe = data()
    probe.setup("fit")
    batches = len(probe.train_dataloader())
    whole = fit(data(), tmp_path / "a", 2 * batches + 2)
    assert whole.losses[-1] < whole.losses[0]
    for stop in (3, batches, batches + 2):
        folder = tmp_path / str(stop)
        first = fit(data(), folder, stop)
        rest = fit(data(), folder, 2 * batches + 2, ckpt_path=folder / f"step={stop}.ckpt")
        got = first.batches + rest.batches
        assert all(torch.equal(a, b) for a, b in zip(got, whole.batches, strict=True))


def test_validation_loss_is_the_same_packed_or_not(train_path, tokenizer):
    def loss(packing):
        trainer = L.Trainer(strategy=MegaTrainStrategy(microbatch=1), accelerator="cpu", devices=1, **QUIET)
        return trainer.validate(module(), make(train_path, tokenizer, packing=packing), verbose=False)[0]["val_loss"]

    assert loss(True) == pytest.approx(loss(False), abs=1e-6)


def test_a_model_that_mixes_sequences_is_refused_before_it_trains(train_path, tokenizer):
    mamba = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
    trainer = L.Trainer(accelerator="cpu", max_steps=1, **QUIET)
    with pytest.raises(ValueError, match=r"'mamba' does not.*data\.packing=false"):
        trainer.fit(CausalLM("mamba", mamba), make(train_path, tokenizer))


def test_text_becomes_a_prompt_and_tokens_text(train_path, tokenizer):
    data = make(train_path, tokenizer)
    tokens = data.encode("Hi")
    assert tokens.dtype == torch.int64
    assert data.decode(tokens) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "wrong",
    [
        {"seq_len": 1},
        {"batch_size": 0},
        {"on_bad_record": "warn"},
        {"val_fraction": 1.0},
        {"max_records": 0},
        {"vocab_size": 300},
        {"batch_size": 1000},
        {"chat_template": "nowhere.jinja"},
    ],
)
def test_settings_that_cannot_be_are_refused(train_path, tokenizer, wrong):
    with pytest.raises((ValueError, RuntimeError), match=rf"data\.{next(iter(wrong))}"):
        ready(train_path, tokenizer, **wrong)


def test_paths_that_were_not_given_are_asked_for(train_path, tokenizer):
    with pytest.raises(ValueError, match=r"data\.train_path is null"):
        ready(None, tokenizer)
    with pytest.raises(ValueError, match=r"data\.tokenizer is null"):
        ready(train_path, None)
