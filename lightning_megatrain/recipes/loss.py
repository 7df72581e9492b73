"""The loss over a large vocabulary, without ever holding the logits of all tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

IGNORE_INDEX = -100
"""Label of a position that carries no loss, as in transformers and in `F.cross_entropy`."""

CHUNK_BYTES = 2**30
"""Most bytes of fp32 logits that are held at once."""


def makes_plain_logits(model: PreTrainedModel) -> bool:
    """Whether the model's logits are what its head returns, with nothing done to them (soft-capping, scaling).

    Asks the model's own ``forward``, with stand-ins for the decoder and the head: no weight is read.
    """
    head, decoder = model.get_output_embeddings(), model.base_model
    if type(head) is not nn.Linear or decoder is model:
        return False
    states = _Anything(last_hidden_state=torch.zeros(1, 2, head.in_features, device="cpu"))
    made = torch.zeros(1, 2, head.out_features, device="cpu")
    with ExitStack() as stack:
        stack.enter_context(stood_in(decoder, lambda *_, **__: states))
        stack.enter_context(stood_in(head, lambda _: made))
        stack.enter_context(torch.no_grad())
        try:
            output = model.forward(input_ids=torch.zeros(1, 2, dtype=torch.int64, device="cpu"), use_cache=False)
        except Exception:  # a decoder that returns something else: whole logits are always right
            return False
    return output.logits is made


class _Anything(BaseModelOutput):
    """A decoder's result, whatever else of its kind is asked for: None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextmanager
def stood_in(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, `module` runs `forward` in place of its own, hooks and all: a head's weights are where it needs them.

    A model of plain logits returns what its head's stand-in does.
    """
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def next_token_loss(hidden: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    """Mean negative log-likelihood in nats per target token, a scalar in fp32; without targets NaN, its gradients zero.

    The same as `F.cross_entropy(head(hidden).float(), targets)`, with gradients of the head summed in fp32 and rounded
    once. torch 2.13 has `F.linear_cross_entropy`, whose chunked form rounds the sum of a bf16 head's gradients after
    each chunk: with 32 chunks its error is three to four times this one's, in every `acc_policy`.

    Args:
        hidden: (batch, time, width), any float dtype; under autocast it is cast to that.
        head: its weight is (vocabulary, width).
        targets: int64 (batch, time), :data:`IGNORE_INDEX` where there is no loss.
    """
    hidden, weight, bias = _cast(hidden, head)
    with _no_autocast(hidden.device):
        return ChunkedLoss.apply(hidden.flatten(0, -2), weight, bias, targets.flatten())


def logits_in_chunks(hidden: Tensor, head: nn.Linear, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits (rows, vocabulary) in fp32 and their targets (rows,), chunk by chunk; without gradients.

    Args:
        hidden: (batch, time, width).
        head: its weight is (vocabulary, width).
        targets: int64 (batch, time).
    """
    hidden, weight, bias = _cast(hidden.detach(), head)
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    with torch.no_grad(), _no_autocast(hidden.device):
        rows = chunk_rows(len(hidden), weight.shape[0])
        for some, wanted in zip(hidden.split(rows), targets.split(rows), strict=True):
            yield F.linear(some, weight, bias).float(), wanted


def chunk_rows(count: int, vocabulary: int) -> int:
    """Tokens of a chunk: chunks are of one size but for the last, and hold no more than :data:`CHUNK_BYTES`."""
    most = max(1, CHUNK_BYTES // (4 * vocabulary))
    chunks = -(-count // most)
    return max(1, -(-count // max(1, chunks)))


class ChunkedLoss(torch.autograd.Function):
    """Loss and gradients, chunk by chunk in the forward: logits are computed once and never kept.

    Inputs are hidden states (tokens, width), the head's weight (vocabulary, width) and bias (vocabulary) or None, all
    of one dtype, and targets (tokens). The gradient of the mean loss with respect to a row of logits is softmax minus
    one-hot, over the number of targets.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:  # noqa: D102
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        wide = torch.float32 if hidden.dtype != torch.float64 else torch.float64
        total = hidden.new_zeros((), dtype=wide)
        valid = targets != IGNORE_INDEX
        count = valid.sum()
        some = count.clamp_min(1)  # no target: no gradient, as in torch
        # Half precision cannot hold a token's share of the mean, before a gradient scaler has made it larger.
        late = hidden.dtype == torch.float16
        grad_hidden = torch.empty_like(hidden) if for_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if for_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and for_bias else None
        rows = chunk_rows(len(hidden), weight.shape[0])
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logits = F.linear(hidden[part], weight, bias).to(wide)
            # Any other label that is no token stays one, so that it is refused here as it is by torch.
            wanted, counts = targets[part].masked_fill(~valid[part], 0)[:, None], valid[part][:, None].to(wide)
            # Step by step and in place: torch's logsumexp would hold the exponentials beside the logits.
            true, highest = logits.gather(1, wanted), logits.amax(1, keepdim=True)
            sums = logits.sub_(highest).exp_().sum(1, keepdim=True)
            total += ((sums.log() + highest - true) * counts).sum()
            if not (for_hidden or for_weight or for_bias):
                continue
            share = counts if late else counts / some
            logits.mul_(share / sums)
            logits.scatter_(1, wanted, logits.gather(1, wanted) - share)
            if grad_bias is not None:
                grad_bias += logits.sum(0)
            narrow = logits.to(hidden.dtype)
            del logits
            if grad_hidden is not None:
                torch.mm(narrow, weight, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight += _wide_mm(narrow.t(), hidden[part], wide)
            del narrow
        ctx.gradients, ctx.rows, ctx.dtype = (grad_hidden, grad_weight, grad_bias), rows, hidden.dtype
        ctx.divisor = some if late else None
        return total / count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        if ctx.gradients is None:
            raise RuntimeError("The loss's gradients were used already; compute it again for another backward().")
        (hidden, *of_head), ctx.gradients = ctx.gradients, None
        gradient = gradient if ctx.divisor is None else gradient / ctx.divisor
        # In fp32, and the head's are rounded once: a third of the loss is no third in bf16.
        for part in () if hidden is None else hidden.split(ctx.rows):
            part.copy_(part.to(gradient.dtype).mul_(gradient))
        weight, bias = (None if g is None else g.mul_(gradient).to(ctx.dtype) for g in of_head)
        return hidden, weight, bias, None


def _wide_mm(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """`a @ b` in `dtype`, as the product was summed where the device can say so."""
    if a.dtype == dtype or not (a.is_cuda or a.is_meta):
        return torch.mm(a, b)
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype) if a.is_meta else torch.mm(a, b, out_dtype=dtype)


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def _cast(hidden: Tensor, head: nn.Linear) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden states, weight and bias in the dtype in which `head` would compute."""
    kind = hidden.device.type
    autocasts = kind != "meta" and torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if autocasts else head.weight.dtype
    bias = None if head.bias is None else head.bias.to(dtype)
    return hidden.to(dtype), head.weight.to(dtype), bias
