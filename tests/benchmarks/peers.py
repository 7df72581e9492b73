"""One training step beside DeepSpeed's, on one GPU, in one run: ZeRO-3 with parameters and optimizer in host memory.

    python tests/benchmarks/peers.py FOLDER [model=qwen2_5_3b] [rows=16] [steps=4] [key=value ...]

Writes FOLDER/ours.json and FOLDER/deepspeed.json, each from a process of its own, and FOLDER/peers.json with both,
their ratios and what they were measured on; prints them too. By default a model of 3.4 billion parameters (Qwen2.5-3B
with a head of its own), 16 rows of 2,048 random tokens, clipping to 1.0, bf16-mixed here and bf16 with fp32 masters
there. Other arguments are overrides of `megatrain bench step`. Needs deepspeed, which compiles its CPU optimizer when
it is first used, and 25 bytes of host memory per parameter for it.
"""

import copy
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from lightning_megatrain.callbacks.measure import peak_host_rss
from lightning_megatrain.cli.app import config_dir
from lightning_megatrain.cli.bench_result import circumstances
from lightning_megatrain.recipes.flops import token_flops
from lightning_megatrain.recipes.random_weights import fill_weights, without_weights

SEQ, CLIP, WARMUP = 2048, 1.0, 2
UNTIED = "model.config.tie_word_embeddings=false"
DEEPSPEED = {
    "stage": 3,
    "offload_param": {"device": "cpu", "pin_memory": True},
    "offload_optimizer": {"device": "cpu", "pin_memory": True},
    "overlap_comm": True,
    "contiguous_gradients": True,
    "stage3_max_live_parameters": 1e9,
    "stage3_prefetch_bucket_size": 5e8,
    "stage3_param_persistence_threshold": 1e5,
    "reduce_bucket_size": 5e8,
}
"""Its `zero_optimization`: the prefetch bucket is ten times the default's, so that blocks are fetched ahead of use."""

TARGETS = {"speed": 2.2, "memory": 0.6}
"""Of DeepSpeed's tokens per second at least, and of its resident host memory at most."""


def deepspeed_step(model: str, rows: int, steps: int, device: torch.device) -> dict[str, Any]:
    """Median seconds of a step of DeepSpeed's, and the memory that it takes."""
    import deepspeed

    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        cfg = compose("train", overrides=[f"model={model}", UNTIED])
    module = without_weights(lambda: instantiate(cfg.model))
    fill_weights(module, torch.device("cpu"), torch.bfloat16)
    flops = token_flops(module.model, SEQ).model
    network = module.model.train()
    network.config.use_cache = False
    network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    settings = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.01}},
        "zero_optimization": copy.deepcopy(DEEPSPEED),
    }
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29501")
    engine, *_ = deepspeed.initialize(model=network, model_parameters=network.parameters(), config=settings)
    tokens = torch.randint(0, cfg.model.config.vocab_size, (rows, SEQ), device=device)
    torch.cuda.reset_peak_memory_stats()
    seconds: list[float] = []
    for step in range(WARMUP + steps):
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        print(f"deepspeed, step {step + 1}: {seconds[-1]:.3f} s, loss {loss.item():.4f}", file=sys.stderr, flush=True)
    median = statistics.median(seconds[WARMUP:])
    return {
        "what": f"DeepSpeed {deepspeed.__version__}, ZeRO-3, parameters and optimizer on the CPU",
        "zero_optimization": DEEPSPEED,
        "step_s": median,
        "steps_s": seconds,
        "tokens_per_s": rows * SEQ / median,
        "model_tflops": rows * SEQ / median * flops / 1e12,
        "peak_device_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_host_rss_bytes": peak_host_rss(),
    }


def main() -> int:
    """Measure both; 1 if one failed or a target was missed."""
    if sys.argv[1] == "--deepspeed":
        _, _, target, model, rows, steps = sys.argv
        Path(target).write_text(json.dumps(deepspeed_step(model, int(rows), int(steps), torch.device("cuda", 0))))
        os._exit(0)  # its threads do not end by themselves
    folder, given = Path(sys.argv[1]), dict(argument.split("=", 1) for argument in sys.argv[2:])
    folder.mkdir(parents=True, exist_ok=True)
    model, rows, steps = given.pop("model", "qwen2_5_3b"), given.pop("rows", "16"), given.pop("steps", "4")
    ours, theirs = folder / "ours.json", folder / "deepspeed.json"
    for file in (ours, theirs, folder / "peers.json"):
        file.unlink(missing_ok=True)
    settings = {
        "precision": "bf16_mixed",
        "strategy.microbatch": "8",
        "strategy.compile": "true",
        "warmup": "8",
        **given,
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    command = ["-m", "lightning_megatrain.cli.main", "bench", "step", f"model={model}", UNTIED, f"rows={rows}"]
    command += [f"seq_len={SEQ}", f"clip={CLIP}", f"steps={steps}", *overrides, f"to={ours}"]
    for arguments, file in ((command, ours), ([__file__, "--deepspeed", str(theirs), model, rows, steps], theirs)):
        done = subprocess.run([sys.executable, *arguments], stdout=sys.stderr)
        if done.returncode or not file.exists():
            print(f"{file.stem}: failed")
            return 1
    [mine], peer = json.loads(ours.read_text())["sizes"], json.loads(theirs.read_text())
    for name, row in (("ours", mine), (peer["what"], peer)):
        gpu, host = row["peak_device_allocated_bytes"] / 2**30, row["peak_host_rss_bytes"] / 2**30
        print(
            f"{name}: {row['step_s']:.3f} s, {row['tokens_per_s']:,.0f} tokens/s, {row['model_tflops']:.0f} TFLOP/s, "
            f"{gpu:.1f} GiB of the GPU, {host:.1f} GiB of the host"
        )
    speed = mine["tokens_per_s"] / peer["tokens_per_s"]
    memory = mine["peak_host_rss_bytes"] / peer["peak_host_rss_bytes"]
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    both = {
        "ours": json.loads(ours.read_text()),
        "deepspeed": peer,
        "ratios": {"speed": speed, "memory": memory},
        "targets": TARGETS,
        **circumstances("python tests/benchmarks/peers.py", device, arguments=sys.argv[1:], packages=("deepspeed",)),
    }
    (folder / "peers.json").write_text(json.dumps(both, indent=1) + "\n")
    print(f"{speed:.2f} x its tokens/s (wanted {TARGETS['speed']}), {memory:.2f} x its memory ({TARGETS['memory']})")
    return 0 if speed >= TARGETS["speed"] and memory <= TARGETS["memory"] else 1


if __name__ == "__main__":
    sys.exit(main())
