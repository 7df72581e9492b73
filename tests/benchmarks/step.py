"""Times training steps of a Qwen2-shaped model with random weights through `Trainer(strategy="megatrain")`.

    python tests/benchmarks/step.py --shape 7b --batch 16 --length 2048 --microbatch 8 --host-memory 120GiB

Prints one JSON line: tokens per second (no padding), model TFLOP/s (6 x block and head parameters + causal attention,
no recompute), the median step after warm-up, peak device memory, peak host RSS, and host bytes per parameter.
"""

import argparse
import json
import resource
import statistics
import time
import warnings
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
    """Seconds of each step, to the end of its update."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        torch.cuda.synchronize()
        self.started = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *args: Any) -> None:
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.started)
        self.losses.append(float(outputs["loss"]))
        print(f"step {len(self.seconds)}: {self.seconds[-1]:.3f} s, loss {self.losses[-1]:.4f}", flush=True)


class RandomTokens(Dataset[Tensor]):
    """Rows of random tokens."""

    def __init__(self, rows: int, length: int, vocab: int) -> None:
        self.rows, self.length, self.vocab = rows, length, vocab

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(0, self.vocab, (self.length,), generator=torch.Generator().manual_seed(index))


def model_flops(shape: dict[str, int], parameters: int, tokens: int, length: int) -> float:
    """6 x (block and head parameters) per token, and causal attention forward and backward."""
    embedding = shape["vocab"] * shape["hidden"]
    attention = 3 * 4 * shape["layers"] * shape["hidden"] * length * tokens / 2
    return 6 * (parameters - embedding) * tokens + attention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--microbatch", type=int)
    parser.add_argument("--prefetch", type=int, default=2)
    parser.add_argument("--update", default="auto")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--clip", type=float)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--host-memory", default="auto")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    shape = {**SHAPES[given.shape], **({"layers": given.layers} if given.layers else {})}
    started = time.perf_counter()
    # A bf16 start halves what the host holds before the store takes over; its master is fp32 all the same.
    module = Step(build(shape, torch.bfloat16))
    parameters = sum(p.numel() for p in module.parameters())
    built = time.perf_counter()
    strategy = lightning_megatrain.MegaTrainStrategy(
        prefetch=given.prefetch,
        microbatch=given.microbatch,
        update=given.update,
        host_memory=given.host_memory,
    )
    clock = Clock()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="gpu",
        devices=1,
        precision=given.precision,
        max_steps=given.steps,
        gradient_clip_val=given.clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    torch.cuda.reset_peak_memory_stats()
    data = RandomTokens(given.batch * given.steps, given.length, shape["vocab"])
    schedule: list[str | None] = []
    clock.on_train_start = lambda *args: schedule.append(strategy.update_schedule)  # type: ignore[method-assign]
    fit_started = time.perf_counter()
    trainer.fit(module, DataLoader(data, batch_size=given.batch))
    tokens = given.batch * given.length
    step = statistics.median(clock.seconds[2:] or clock.seconds)
    assert strategy.plan is not None
    result = {
        **{k: v for k, v in vars(given).items() if v is not None},
        "schedule": schedule[0],
        "parameters": parameters,
        "tokens": tokens,
        "step_s": round(step, 3),
        "tokens_per_s": round(tokens / step),
        "model_tflops": round(model_flops(shape, parameters, tokens, given.length) / step / 1e12, 1),
        "peak_allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 1),
        "peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1),
        "planned_host_gib": round(strategy.plan.host_bytes / 2**30, 1),
        "host_bytes_per_parameter": round(strategy.plan.host_bytes_per_parameter, 2),
        "build_s": round(built - started, 1),
        "fit_s": round(time.perf_counter() - fit_started, 1),
        "losses": [round(x, 4) for x in clock.losses],
        "steps_s": [round(x, 3) for x in clock.seconds],
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
