"""Continue a sequence by sampling from a causal language model."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How to draw a continuation.

    Args:
        max_new_tokens: tokens to add.
        temperature: logits are divided by it; 0 takes the most probable token.
        top_k: draw among this many most probable tokens; None draws among all.
        seed: of the generator used for drawing; the global one is left alone.

    Raises:
        ValueError: if a value is out of range.
    """

    max_new_tokens: int = 160
    temperature: float = 0.7
    top_k: int | None = 40
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must not be negative.")
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} must not be negative.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1, or null for no limit.")


def continue_tokens(
    forward: Callable[[Tensor], Tensor],
    prompt: Tensor,
    sampling: Sampling,
    *,
    context: int,
    stop: Collection[int] = (),
) -> Tensor:
    """Extend each row of `prompt` by `sampling.max_new_tokens` sampled tokens, or fewer if all rows have stopped.

    Every token costs one full forward over at most `context` tokens. That needs nothing of the model but its ordinary
    forward, so it runs under any strategy; a key-value cache would save arithmetic but, with weights streamed from
    the host, none of the traffic that decides the speed there.

    Args:
        forward: maps token ids, int64 of shape (batch, time), to logits of shape (batch, time, vocabulary).
        prompt: int64 of shape (batch, time), time >= 1.
        sampling: how to draw.
        context: tokens that the model can look back on.
        stop: tokens that end a row; it is filled up with the one that ended it while others go on.

    Returns:
        int64 of shape (batch, time + new), new at most max_new_tokens: prompt and continuation, on the prompt's device.

    Raises:
        ValueError: if the prompt is empty.
    """
    if prompt.shape[1] == 0:
        raise ValueError(f"The prompt has shape {tuple(prompt.shape)}, and must hold at least one token.")
    # Drawing on the CPU makes the result independent of the device for equal logits.
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens = prompt
    ends = torch.tensor(sorted(stop), dtype=torch.int64)
    last, stopped = prompt[:, -1:].cpu(), torch.zeros(len(prompt), 1, dtype=torch.bool)
    for _ in range(sampling.max_new_tokens):
        logits = forward(tokens[:, -context:])[:, -1].float().cpu()
        last = torch.where(stopped, last, _draw(logits, sampling, generator))
        tokens = torch.cat([tokens, last.to(tokens.device)], dim=1)
        stopped |= torch.isin(last, ends)
        if stopped.all():
            break
    return tokens


def _draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Draw one token per row: (batch, vocabulary) fp32 logits to (batch, 1) int64."""
    if sampling.temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        threshold = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
