"""Next-token training of any causal language model that transformers can build from a configuration."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics.text import Perplexity
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lightning_megatrain.callbacks.throughput import NUM_TOKENS, count_tokens
from lightning_megatrain.recipes.optim import cosine_with_warmup, decay_groups
from lightning_megatrain.recipes.sampling import Sampling, continue_tokens

IGNORE_INDEX = -100
"""Label of a position that carries no loss, as in transformers and in `F.cross_entropy`."""


class CausalLM(L.LightningModule):
    """A causal language model with random weights, its loss and its optimizer.

    Batches are mappings with `input_ids`, int64 (batch, time), and optionally `labels` of the same shape, aligned with
    `input_ids` (the shift by one happens here; -100 carries no loss; absent means `input_ids`). Every other entry,
    such as `attention_mask` or `position_ids`, is passed to the model.

    The model is built in the constructor and on the CPU, so that a seed gives the same weights whatever the strategy
    and the device; build it under `torch.device("meta")` to learn its shapes without its memory.

    Args:
        arch: model type as `transformers.AutoConfig` names it, for instance "llama", "qwen2" or "gpt2".
        config: keyword arguments of that type's configuration class.
        seed: of the random weights; the global generator is left as it was.
        lr: peak learning rate.
        betas: AdamW's decay rates of the first and second moment.
        eps: AdamW's denominator term.
        weight_decay: decoupled weight decay of parameters with two or more dimensions.
        warmup_steps: optimizer steps of linear warm-up.
        min_lr_ratio: learning rate at the end of the cosine, as a fraction of `lr`.

    Raises:
        ValueError: if `arch` is not a causal language model that transformers knows, or `config` does not suit it.
    """

    model: PreTrainedModel

    def __init__(
        self,
        arch: str,
        config: Mapping[str, Any] | None = None,
        *,
        seed: int = 0,
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        warmup_steps: int = 0,
        min_lr_ratio: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = build_model(arch, config or {}, seed=seed)
        self.val_perplexity = Perplexity(ignore_index=IGNORE_INDEX)
        self.sampling = Sampling()

    def forward(self, input_ids: Tensor, **model_inputs: Any) -> Tensor:
        """Return logits of shape (batch, time, vocabulary) in the compute dtype."""
        return self.model(input_ids=input_ids, use_cache=False, **model_inputs).logits

    def on_before_batch_transfer(self, batch: dict[str, Any], dataloader_idx: int) -> dict[str, Any]:
        """Count the batch's real tokens while its mask is still on the host, where counting waits for nobody."""
        return {**batch, NUM_TOKENS: count_tokens(batch)}

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return the mean loss in nats per target token, a scalar."""
        logits, targets = self._predict_next(batch)
        loss = _cross_entropy(logits, targets)
        self.log("train_loss", loss.detach(), prog_bar=True)
        return loss

    def on_validation_epoch_start(self) -> None:
        """Give the metric fresh counters that any later loop may update.

        `validate()` runs in inference mode, and counters reset there could not be updated by the validation inside
        `fit()`, which does not.
        """
        with torch.inference_mode(False):
            self.val_perplexity.reset()

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Log `val_loss` (nats per target token) and `val_perplexity`, both over the whole validation set."""
        logits, targets = self._predict_next(batch)
        # Weighting by targets makes the epoch's mean the mean over tokens, however rows and padding vary.
        weight = int((targets != IGNORE_INDEX).sum())
        self.log("val_loss", _cross_entropy(logits, targets), prog_bar=True, batch_size=weight)
        self.val_perplexity.update(logits.float(), targets)
        self.log("val_perplexity", self.val_perplexity, batch_size=weight)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Continue `input_ids` as `self.sampling` says; int64 of shape (batch, time + new)."""
        context = self.model.config.max_position_embeddings
        return continue_tokens(self, batch["input_ids"], self.sampling, context=context)

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

    def _predict_next(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return logits (batch, time - 1, vocabulary) and the tokens they should predict (batch, time - 1)."""
        inputs = {key: value for key, value in batch.items() if key not in ("labels", NUM_TOKENS)}
        labels = batch.get("labels", batch["input_ids"])
        return self(**inputs)[:, :-1], labels[:, 1:]


def build_model(arch: str, config: Mapping[str, Any], *, seed: int) -> PreTrainedModel:
    """Build a causal language model with random weights, without touching the network or the global generator.

    Args:
        arch: model type as `transformers.AutoConfig` names it.
        config: keyword arguments of that type's configuration class.
        seed: of the weights.

    Raises:
        ValueError: if transformers does not know `arch` or no causal language model of that type, or if its
            configuration class refuses `config`.
    """
    if arch not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        close = difflib.get_close_matches(arch, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "take one like llama, qwen2 or gpt2."
        raise ValueError(f"model.arch={arch!r} is no causal language model that transformers knows; {hint}")
    try:
        model_config = AutoConfig.for_model(arch, **config)
    except Exception as error:  # its type differs between releases of transformers
        raise ValueError(f"model.config does not suit model.arch={arch!r}: {error.__cause__ or error}") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(model_config)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log-likelihood in fp32, whatever the dtype of `logits` (batch, time, vocabulary)."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX)
