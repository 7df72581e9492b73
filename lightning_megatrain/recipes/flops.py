"""Arithmetic of a language model's training step, per token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of forward and backward per token, without recompute.

    Attributes:
        parameters: parameters that a token meets in matrix products: of all experts only those it is routed to, of the
            embedding only what also serves as the head.
        model: 6 for each of them, and causal attention.
        blocks: the part of it that lies in the decoder's blocks.
        feed_forward: the part of that which is their ``mlp``'s, experts that a token is routed to included.
    """

    parameters: int
    model: float
    blocks: float
    feed_forward: float


def token_flops(model: PreTrainedModel, seq_len: float) -> TokenFlops:
    """Count them; the model may be on the meta device.

    A product with a weight takes 2 FLOPs per parameter forward and 4 backward (Kaplan et al., arXiv 2001.08361).
    Causal attention meets half of ``seq_len`` positions on average, or a layer's sliding window if that is shorter:
    2 products, 2 FLOPs, 3 times, for each position and element of the queries.

    Args:
        model: a decoder.
        seq_len: tokens of a sequence; of different ones, their :func:`mean_length`.
    """
    config = model.config.get_text_config()
    experts = next(
        (getattr(config, n) for n in ("num_local_experts", "num_experts", "n_routed_experts") if hasattr(config, n)),
        None,
    )
    share = config.num_experts_per_tok / experts if experts else 1.0
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    lookups = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    if head is not None and head.weight is embedding.weight:
        lookups.discard(id(head.weight))
    in_blocks, elsewhere, feed_forward = 0.0, 0.0, 0.0
    for name, parameter in model.named_parameters():
        if id(parameter) in lookups:
            continue
        count = parameter.numel() * (share if ".experts." in name else 1.0)
        if ".layers." in name or ".h." in name:
            in_blocks += count
            feed_forward += count * (".mlp." in name)
        else:
            elsewhere += count
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    windows = [config.sliding_window if kind == "sliding_attention" else None for kind in _layer_types(config)]
    met = sum(min(seq_len / 2, window or seq_len) for window in windows)
    attention = 12.0 * config.num_attention_heads * head_dim * met
    return TokenFlops(
        parameters=round(in_blocks + elsewhere),
        model=6 * (in_blocks + elsewhere) + attention,
        blocks=6 * in_blocks + attention,
        feed_forward=6 * feed_forward,
    )


def mean_length(batch: Mapping[str, Any]) -> float:
    """Length, in tokens, of the sequence that a token of the batch stands in: the mean over its real tokens.

    That is what causal attention depends on: sequences in one row do not meet, and nothing meets padding.

    Args:
        batch: `input_ids` (batch, time); on the host and of the same shape, `position_ids`, which start again where a
            packed sequence begins (padding without a mask is one, too), and `attention_mask`, zero where there is
            padding. What is elsewhere is not waited for, and rows count whole.
    """
    shape = batch["input_ids"].shape
    positions, mask = (
        value if isinstance(value, Tensor) and value.device.type == "cpu" and value.shape == shape else None
        for value in (batch.get("position_ids"), batch.get("attention_mask"))
    )
    if mask is not None:
        positions = mask.bool().cumsum(1) - 1 if positions is None else positions
        positions = positions[mask.bool()]
    if positions is None or not positions.numel():
        return float(shape[1])
    return 2 * float(positions.double().mean()) + 1


def _layer_types(config: object) -> list[str]:
    """Kind of attention of each layer."""
    kinds = getattr(config, "layer_types", None)
    return list(kinds) if kinds else ["full_attention"] * config.num_hidden_layers  # type: ignore[attr-defined]
