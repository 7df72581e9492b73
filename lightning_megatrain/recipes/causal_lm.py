"""Next-token training of any causal language model that transformers can build from a configuration."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics.text import Perplexity
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lightning_megatrain.callbacks.throughput import NUM_TOKENS, count_tokens
from lightning_megatrain.checkpoint.loading import widen
from lightning_megatrain.recipes.flops import mean_length, token_flops
from lightning_megatrain.recipes.loss import (
    IGNORE_INDEX,
    logits_in_chunks,
    makes_plain_logits,
    next_token_loss,
    stood_in,
)
from lightning_megatrain.recipes.optim import cosine_with_warmup, decay_groups
from lightning_megatrain.recipes.pretrained import Pretrained
from lightning_megatrain.recipes.sampling import Sampling, continue_tokens
from lightning_megatrain.strategy import MegaTrainStrategy


class CausalLM(L.LightningModule):
    """A causal language model with random or pretrained weights, its loss and its optimizer.

    Batches are mappings with `input_ids`, int64 (batch, time), and optionally `labels` of the same shape, aligned with
    `input_ids` (the shift by one happens here; -100 carries no loss; absent means `input_ids`). Every other entry,
    such as `attention_mask` or `position_ids`, is passed to the model.

    The model is built in the constructor and on the CPU, so that a seed gives the same weights whatever the strategy
    and the device; build it under `torch.device("meta")` to learn its shapes without its memory. Pretrained weights
    keep their files' dtype until a strategy takes them, and stay in the files until they are read. A checkpoint holds
    the whole configuration, so that `load_from_checkpoint` needs no such files.

    Args:
        arch: model type as `transformers.AutoConfig` names it, for instance "llama", "qwen2" or "gpt2"; with
            `pretrained`, None or the type that the model must have.
        config: keyword arguments of that type's configuration class; with `pretrained`, values that the model must
            have.
        pretrained: where weights and configuration come from: a Hugging Face folder with safetensors files, or a name
            on the Hub. None gives random weights.
        origin: where a checkpoint's model began, which an export takes its tokenizer from; set by `pretrained`.
        seed: of the random weights; the global generator is left as it was.
        lr: peak learning rate.
        betas: AdamW's decay rates of the first and second moment.
        eps: AdamW's denominator term.
        weight_decay: decoupled weight decay of parameters with two or more dimensions.
        warmup_steps: optimizer steps of linear warm-up.
        min_lr_ratio: learning rate at the end of the cosine, as a fraction of `lr`.

    Raises:
        ValueError: if `arch` is not a causal language model that transformers knows, or `config` does not suit it; if
            `pretrained` is not there, not whole, or differs from `arch` and `config`.
    """

    model: PreTrainedModel

    def __init__(
        self,
        arch: str | None = None,
        config: Mapping[str, Any] | None = None,
        *,
        pretrained: str | None = None,
        origin: str | None = None,
        seed: int = 0,
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        warmup_steps: int = 0,
        min_lr_ratio: float = 0.1,
    ) -> None:
        super().__init__()
        source = None
        if pretrained is not None:
            on_meta = torch.empty(0).is_meta
            source = Pretrained(pretrained, arch=arch, config=config, weights=not on_meta)
            arch, config, origin = source.arch, source.config, source.origin
            source = None if on_meta else source
        self.save_hyperparameters()
        # What a checkpoint needs to be loaded without the folder, whoever called: a subclass, LightningCLI.
        for hparams in (self._hparams, self._hparams_initial):
            hparams.update({"arch": arch, "config": config, "origin": origin, "pretrained": None})
        self.model = build_model(arch, config or {}, seed=seed) if source is None else source.load()
        self.val_perplexity = Perplexity(ignore_index=IGNORE_INDEX)
        self.sampling = Sampling()
        self._seq_len: float | None = None  # of the last batch, the mean over its tokens

    def configure_model(self) -> None:
        """Make fp32 parameters of pretrained 16-bit ones for strategies that train parameters as they are.

        The megatrain strategy takes them over as they are, part by part, and keeps exact masters.
        """
        if self._trainer is not None and not isinstance(self._trainer.strategy, MegaTrainStrategy):
            self.model.float()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Outside a trainer: make room for the checkpoint's fp32 values in parameters that are 16-bit."""
        if self._trainer is None:
            widen(self, checkpoint["state_dict"])

    def forward(self, input_ids: Tensor, **model_inputs: Any) -> Tensor:
        """Return logits of shape (batch, time, vocabulary) in the compute dtype."""
        return self.model(input_ids=input_ids, use_cache=False, **model_inputs).logits

    def on_before_batch_transfer(self, batch: dict[str, Any], dataloader_idx: int) -> dict[str, Any]:
        """Count the batch's real tokens while its mask is still on the host, where counting waits for nobody."""
        self._seq_len = mean_length(batch)
        return {**batch, NUM_TOKENS: count_tokens(batch)}

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return the mean loss in nats per target token, a scalar."""
        loss = self.loss(batch)
        self.log("train_loss", loss.detach(), prog_bar=True)
        return loss

    def loss(self, batch: Mapping[str, Any]) -> Tensor:
        """The mean loss of a batch in nats per target token, a scalar in fp32.

        Logits are made chunk by chunk where the model takes them straight from its head.
        """
        inputs, targets = _inputs_and_targets(batch)
        if not self._plain_logits:
            logits = self(**inputs).float()
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX)
        head = self.model.get_output_embeddings()
        with stood_in(head, lambda hidden: next_token_loss(hidden, head, targets)):
            return self(**inputs)

    def on_validation_epoch_start(self) -> None:
        """Give the metric fresh counters that any later loop may update.

        `validate()` runs in inference mode, and counters reset there could not be updated by the validation inside
        `fit()`, which does not.
        """
        with torch.inference_mode(False):
            self.val_perplexity.reset()

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Log `val_loss` (nats per target token) and `val_perplexity`, both over the whole validation set."""
        inputs, targets = _inputs_and_targets(batch)
        if self._plain_logits:
            head = self.model.get_output_embeddings()
            with stood_in(head, lambda hidden: self._judge(logits_in_chunks(hidden, head, targets))):
                total = self(**inputs)
        else:
            total = self._judge((row.float(), wanted) for row, wanted in zip(self(**inputs), targets, strict=True))
        # Weighting by targets makes the epoch's mean the mean over tokens, however rows and padding vary.
        weight = int((targets != IGNORE_INDEX).sum())
        self.log("val_loss", (total / max(1, weight)).float(), prog_bar=True, batch_size=weight)
        self.log("val_perplexity", self.val_perplexity, batch_size=weight)

    def _judge(self, chunks: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """Sum of the loss over logits (rows, vocabulary) and targets (rows,), fp64; the metric sees them too."""
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        for logits, wanted in chunks:
            total = total + F.cross_entropy(logits, wanted, ignore_index=IGNORE_INDEX, reduction="sum")
            self.val_perplexity.update(logits[None], wanted[None])
        return total

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Continue `input_ids` as `self.sampling` says, or up to the end; int64 of shape (batch, time + new)."""
        config = self.model.config.get_text_config()
        ends = self.model.generation_config.eos_token_id if self.model.generation_config else config.eos_token_id
        stop = ends if isinstance(ends, list) else [ends] if ends is not None else []
        return continue_tokens(
            self, batch["input_ids"], self.sampling, context=config.max_position_embeddings, stop=stop
        )

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW with decay groups, and a warm-up and cosine schedule that moves every optimizer step."""
        hparams = self.hparams
        optimizer = AdamW(
            decay_groups(self.model, hparams["weight_decay"]),
            lr=hparams["lr"],
            betas=tuple(hparams["betas"]),
            eps=hparams["eps"],
        )
        factor = cosine_with_warmup(
            warmup_steps=hparams["warmup_steps"],
            total_steps=int(self.trainer.estimated_stepping_batches),
            min_ratio=hparams["min_lr_ratio"],
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step", "name": "lr"},
        }

    @property
    def flops_per_token(self) -> float | None:
        """FLOPs of forward and backward per token in sequences as long as the last batch's; None before there is one.

        Recompute is left out, and so is attention across the sequences of a packed row; see :func:`token_flops`.
        """
        return None if self._seq_len is None else token_flops(self.model, self._seq_len).model

    @property
    def _plain_logits(self) -> bool:
        """Whether logits are a plain product with the head, which an adapter or a wrapper may change at any time."""
        head = self.model.get_output_embeddings()
        return type(head) is nn.Linear and type(head.weight) is nn.Parameter and self._leaves_logits_alone

    @cached_property
    def _leaves_logits_alone(self) -> bool:
        return makes_plain_logits(self.model)


def _inputs_and_targets(batch: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """What the model is given, and the tokens to predict, int64 (batch, time), -100 at the end of each row."""
    inputs = {key: value for key, value in batch.items() if key not in ("labels", NUM_TOKENS)}
    labels = batch.get("labels", batch["input_ids"])
    # Labels are shifted and not the hidden states, of which a shift would be a copy.
    return inputs, F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def build_model(arch: str | None, config: Mapping[str, Any], *, seed: int) -> PreTrainedModel:
    """Build a causal language model with random weights, without touching the network or the global generator.

    Args:
        arch: model type as `transformers.AutoConfig` names it.
        config: keyword arguments of that type's configuration class; its `dtype` says how weights are published and is
            not that of these, which have torch's default dtype.
        seed: of the weights.

    Raises:
        ValueError: if transformers does not know `arch` or no causal language model of that type, or if its
            configuration class refuses `config`.
    """
    if arch is None:
        raise ValueError(
            "model.pretrained or model.arch is needed, and neither is set; set model.pretrained=PATH_OR_NAME to a "
            "Hugging Face folder or a name on the Hub."
        )
    if arch not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        close = difflib.get_close_matches(arch, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "take one like llama, qwen2 or gpt2."
        raise ValueError(f"model.arch={arch!r} is no causal language model that transformers knows; {hint}")
    try:
        model_config = AutoConfig.for_model(arch, **config)
    except Exception as error:  # its type differs between releases of transformers
        reason = error.__cause__ or error
        raise ValueError(f"model.config does not suit model.arch={arch!r} ({reason}); correct it.") from error
    model_config.dtype = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(model_config)
