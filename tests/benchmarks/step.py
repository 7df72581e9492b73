"""Times training steps of a Qwen2-shaped model with random weights through `Trainer(strategy="megatrain")`.

    python tests/benchmarks/step.py --shape 7b --rows 4,8,16,32 --microbatch 8 --update next_forward --clip 1.0

Prints one JSON line for each batch size of `--rows`, all from one fit: tokens per second (no padding), model TFLOP/s
(6 x block and head parameters + causal attention, no recompute), the median step after the first of its size, peak
device memory, peak host RSS, and host bytes per parameter.
"""

import argparse
import contextlib
import json
import resource
import statistics
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

import lightning_megatrain
from lightning_megatrain.stream.engine import Engine
from lightning_megatrain.update.optimizers import AdamUpdate

SHAPES: dict[str, dict[str, int]] = {
    "0.5b": {"hidden": 896, "inner": 4864, "layers": 24, "heads": 14, "kv": 2, "vocab": 151936},
    "3b": {"hidden": 2048, "inner": 11008, "layers": 36, "heads": 16, "kv": 2, "vocab": 151936},
    "7b": {"hidden": 3584, "inner": 18944, "layers": 28, "heads": 28, "kv": 4, "vocab": 152064},
    "14b": {"hidden": 5120, "inner": 13824, "layers": 48, "heads": 40, "kv": 8, "vocab": 152064},
}


def build(shape: dict[str, int], dtype: torch.dtype) -> Qwen2ForCausalLM:
    """Random weights, filled by blocks: a normal draw per tensor would take minutes."""
    config = Qwen2Config(
        hidden_size=shape["hidden"],
        intermediate_size=shape["inner"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv"],
        vocab_size=shape["vocab"],
        max_position_embeddings=262144,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
    )
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    model = model.to(dtype).to_empty(device="cpu")
    model.model.rotary_emb = Qwen2RotaryEmbedding(config)
    noise = torch.randn(1 << 24) * 0.02
    for name, p in model.named_parameters():
        if "norm" in name:
            p.data.fill_(1.0)
        elif name.endswith("bias"):
            p.data.zero_()
        else:
            flat = p.data.view(-1)
            for start in range(0, flat.numel(), noise.numel()):
                part = flat[start : start + noise.numel()]
                part.copy_(noise[: part.numel()])
    return model


def chunked_loss(head: torch.nn.Linear, hidden: Tensor, labels: Tensor, rows: int = 4096) -> Tensor:
    """Mean next-token loss without ever holding the logits of all tokens."""
    hidden, labels = hidden[:, :-1].flatten(0, 1), labels[:, 1:].flatten()

    def part(h: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(head(h).float(), y, reduction="sum")

    parts = [
        checkpoint(part, hidden[i : i + rows], labels[i : i + rows], use_reentrant=False)
        for i in range(0, len(labels), rows)
    ]
    return torch.stack(parts).sum() / len(labels)


class Step(L.LightningModule):
    """Trains on random tokens and keeps the time of every step."""

    def __init__(self, model: Qwen2ForCausalLM) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.model.model(input_ids=batch).last_hidden_state
        return chunked_loss(self.model.lm_head, hidden, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.01)


class Clock(L.Callback):
    """Seconds from the end of one step's Python to the end of the next one's, without waiting for the device or host.

    A step that leaves work behind is charged for it in the next one, which has to wait: over several equal steps the
    median is what a step costs. The backward is timed on the device.
    """

    reads_weights = False

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.allocated: list[int] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.schedule: str | None = None

    @property
    def backward(self) -> list[float]:
        return [a.elapsed_time(b) / 1e3 for a, b in self._events]

    def on_train_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.schedule = trainer.strategy.update_schedule
        torch.cuda.synchronize()
        self.last = time.perf_counter()

    def on_before_backward(self, *args: Any) -> None:
        self._start = torch.cuda.Event(enable_timing=True)
        self._start.record()

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *args: Any) -> None:
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        self._events.append((self._start, end))
        self.losses.append(float(outputs["loss"]))  # waits for this step's forward and backward, not for its update
        now = time.perf_counter()
        self.seconds.append(now - self.last)
        self.last = now
        self.allocated.append(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        print(f"step {len(self.seconds)}: {self.seconds[-1]:.3f} s, loss {self.losses[-1]:.4f}", flush=True)


class RandomTokens(Dataset[Tensor]):
    """Batches of random tokens, `steps` of each size."""

    def __init__(self, rows: list[int], steps: int, length: int, vocab: int) -> None:
        self.sizes = [r for r in rows for _ in range(steps)]
        self.length, self.vocab = length, vocab

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, self.vocab, (self.sizes[index], self.length), generator=generator)


def model_flops(shape: dict[str, int], parameters: int, tokens: int, length: int) -> float:
    """6 x (block and head parameters) per token, and causal attention forward and backward."""
    embedding = shape["vocab"] * shape["hidden"]
    attention = 3 * 4 * shape["layers"] * shape["hidden"] * length * tokens / 2
    return 6 * (parameters - embedding) * tokens + attention


class Trace(L.Callback):
    """Writes a Chrome trace of the last step of each size: blocks on the GPU, updates on the host."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.blocks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self.updates: list[tuple[str, float, float]] = []
        bound, update = Engine._bound, AdamUpdate.update

        @contextlib.contextmanager
        def timed_bound(engine: Engine, unit: Any, expected: Any) -> Iterator[Any]:
            kind = "backward" if threading.current_thread() is not threading.main_thread() else "forward"
            with bound(engine, unit, expected) as slot:
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                yield slot
                end.record()
            self.blocks.append((f"{kind} {unit.name}", start, end))

        def timed_update(self_: AdamUpdate, group: Any, *args: Any) -> None:
            start = time.perf_counter()
            update(self_, group, *args)
            self.updates.append((f"update {group.name}", start, time.perf_counter()))

        Engine._bound = timed_bound  # type: ignore[method-assign]
        AdamUpdate.update = timed_update  # type: ignore[method-assign]

    def on_train_start(self, *args: Any) -> None:
        torch.cuda.synchronize()
        self.zero, self.origin = torch.cuda.Event(enable_timing=True), time.perf_counter()
        self.zero.record()

    def on_train_end(self, *args: Any) -> None:
        torch.cuda.synchronize()
        events = [
            {
                "name": n,
                "ph": "X",
                "pid": 0,
                "tid": "gpu",
                "ts": self.zero.elapsed_time(a) * 1e3,
                "dur": a.elapsed_time(b) * 1e3,
            }
            for n, a, b in self.blocks
        ] + [
            {"name": n, "ph": "X", "pid": 0, "tid": "host update", "ts": (a - self.origin) * 1e6, "dur": (b - a) * 1e6}
            for n, a, b in self.updates
        ]
        Path(self.path).write_text(json.dumps({"traceEvents": events}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rows", default="16", help="batch sizes, separated by commas")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--microbatch", type=int)
    parser.add_argument("--prefetch", type=int, default=2)
    parser.add_argument("--update", default="auto", help="a schedule, or `none`: the same step without an optimizer")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--clip", type=float)
    parser.add_argument("--steps", type=int, default=5, help="steps of each batch size")
    parser.add_argument("--host-memory", default="auto")
    parser.add_argument("--trace", help="file for a Chrome trace")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    shape = {**SHAPES[given.shape], **({"layers": given.layers} if given.layers else {})}
    started = time.perf_counter()
    # A bf16 start halves what the host holds before the store takes over; its master is fp32 all the same.
    module = Step(build(shape, torch.bfloat16))
    parameters = sum(p.numel() for p in module.parameters())
    if given.update == "none":
        AdamUpdate.update = lambda self, *args, **kwargs: None  # type: ignore[method-assign]
    strategy = lightning_megatrain.MegaTrainStrategy(
        prefetch=given.prefetch,
        microbatch=given.microbatch,
        update="in_backward" if given.update == "none" else given.update,
        host_memory=given.host_memory,
    )
    rows = [int(r) for r in given.rows.split(",")]
    clock = Clock()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="gpu",
        devices=1,
        precision=given.precision,
        max_steps=given.steps * len(rows),
        gradient_clip_val=given.clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock, *([Trace(given.trace)] if given.trace else [])],
    )
    torch.cuda.reset_peak_memory_stats()
    data = RandomTokens(rows, given.steps, given.length, shape["vocab"])
    trainer.fit(module, DataLoader(data, batch_size=None))
    assert strategy.plan is not None
    for i, size in enumerate(rows):
        own = slice(i * given.steps, (i + 1) * given.steps)
        tokens, seconds = size * given.length, clock.seconds[own]
        step = statistics.median(seconds[1:] or seconds)
        result = {
            "shape": given.shape,
            "parameters": parameters,
            "tokens": tokens,
            "update": given.update,
            "schedule": clock.schedule,
            "clip": given.clip,
            "microbatch": given.microbatch,
            "step_s": round(step, 3),
            "tokens_per_s": round(tokens / step),
            "model_tflops": round(model_flops(shape, parameters, tokens, given.length) / step / 1e12, 1),
            "backward_s": round(statistics.median(clock.backward[own][1:] or clock.backward[own]), 3),
            "peak_allocated_gib": round(max(clock.allocated[own]) / 2**30, 1),
            "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 1),
            "peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1),
            "planned_host_gib": round(strategy.plan.host_bytes / 2**30, 1),
            "host_bytes_per_parameter": round(strategy.plan.host_bytes_per_parameter, 2),
            "losses": [round(x, 4) for x in clock.losses[own]],
            "steps_s": [round(x, 3) for x in seconds],
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
        }
        print(json.dumps(result), flush=True)
    print(f"whole run: {time.perf_counter() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main()
