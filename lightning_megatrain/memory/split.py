"""The split master: one fp32 value kept as two 16-bit halves, the upper of which is the wire copy.

For an fp32 bit pattern ``bits``, with 32-bit wrap-around throughout::

    low  = lower 16 bits of ``bits``, read as a signed number         (int16)
    high = (bits - low) >> 16  =  (bits + 0x8000) >> 16               (stored as bf16)
    bits = (high << 16) + low

``high`` is the value rounded to bf16, half away from zero, so a forward pass reads it as it stands and the
master costs no more than its own four bytes. Ties are rounded away from zero, not to even, because that is what makes
the remainder fit a signed 16-bit number with no case left over.

Rounding could turn a NaN into an infinity or a zero, which would hide it from the forward pass. Such a NaN
is stored as ``high = (bits >> 16) | 0x0040, low = 0``: its payload changes, that it is a NaN does not. Every
other pattern, infinities and subnormals included, is restored exactly.

Code that writes to ``high`` alone (a callback that sets weights) leaves a stale ``low``: the value is then within half
a unit in the last place of bf16. Zero is the exception that could turn into a NaN, so a negative remainder under it,
which no split produces, is read as none.

All tensors here are flat and contiguous. On the CPU the work is done in chunks, so the temporaries stay near ``CHUNK``
elements however long the tensors are; :func:`join_whole` and :func:`split_whole_` take tensors on any device as they
are, and never wait for it.
"""

import sys

import torch
from torch import Tensor

CHUNK = 1 << 20  # elements

# Positions of the two halves of an fp32 value in memory.
_LOW, _HIGH = (0, 1) if sys.byteorder == "little" else (1, 0)


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Split a master into new tensors.

    Args:
        master: fp32 ``[n]``.

    Returns:
        ``high``, bf16 ``[n]``, and ``low``, int16 ``[n]``.

    Raises:
        ValueError: ``master`` is not a flat contiguous fp32 CPU tensor.
    """
    high = torch.empty(master.numel(), dtype=torch.bfloat16)
    low = torch.empty(master.numel(), dtype=torch.int16)
    split_master_(master, high, low)
    return high, low


def split_master_(master: Tensor, high: Tensor, low: Tensor) -> None:
    """Split ``master`` (fp32 ``[n]``) into ``high`` (bf16 ``[n]``) and ``low`` (int16 ``[n]``), in place.

    ``master`` is only read. Neither output may share memory with it.

    Raises:
        ValueError: a tensor has the wrong dtype, shape or device.
    """
    _check(master, high, low)
    for start in range(0, master.numel(), CHUNK):
        part = slice(start, start + CHUNK)
        bits = master[part].view(torch.int32)
        halves = bits.view(torch.int16).view(-1, 2)
        high_bits = high[part].view(torch.int16)
        low[part].copy_(halves[:, _LOW])
        torch.sub(halves[:, _HIGH], low[part] >> 15, out=high_bits)  # >> 15: -1 where negative, else 0

        lost = master[part].isnan() & ~high[part].isnan()
        if lost.any():
            high_bits[lost] = halves[:, _HIGH][lost] | 0x0040
            low[part][lost] = 0


def join_master(high: Tensor, low: Tensor, out: Tensor | None = None) -> Tensor:
    """The fp32 master ``[n]`` that was split into ``high`` (bf16 ``[n]``) and ``low`` (int16 ``[n]``).

    Args:
        high: upper half, bf16.
        low: lower half, int16.
        out: fp32 ``[n]`` to write to; a new tensor if omitted. It may not share memory with the halves.

    Returns:
        ``out``.

    Raises:
        ValueError: a tensor has the wrong dtype, shape or device.
    """
    if out is None:
        out = torch.empty(high.numel(), dtype=torch.float32)
    _check(out, high, low)
    for start in range(0, out.numel(), CHUNK):
        part = slice(start, start + CHUNK)
        halves = out[part].view(torch.int16).view(-1, 2)
        rest = low[part]
        rest = torch.where((high[part] == 0) & (rest < 0), 0, rest)
        halves[:, _LOW].copy_(rest)
        torch.add(high[part].view(torch.int16), rest >> 15, out=halves[:, _HIGH])
    return out


def join_whole(high: Tensor, low: Tensor) -> Tensor:
    """What :func:`join_master` returns, of tensors on any device."""
    rest = torch.where((high == 0) & (low < 0), 0, low).to(torch.int32)
    return high.view(torch.int16).to(torch.int32).bitwise_left_shift_(16).add_(rest).view(torch.float32)


def split_whole_(master: Tensor, high: Tensor, low: Tensor) -> None:
    """What :func:`split_master_` does, on any device."""
    bits = master.view(torch.int32)
    rest = bits.to(torch.int16)  # the lower 16 bits, as a signed number
    upper = (bits - rest).bitwise_right_shift_(16).to(torch.int16)
    lost = master.isnan() & ~upper.view(torch.bfloat16).isnan()
    quiet = (bits >> 16).to(torch.int16) | 0x0040
    high.view(torch.int16).copy_(torch.where(lost, quiet, upper))
    low.copy_(torch.where(lost, 0, rest))


def _check(master: Tensor, high: Tensor, low: Tensor) -> None:
    for name, tensor, dtype in (
        ("master", master, torch.float32),
        ("high", high, torch.bfloat16),
        ("low", low, torch.int16),
    ):
        if tensor.dtype != dtype or tensor.device.type != "cpu" or tensor.shape != (master.numel(),):
            raise ValueError(
                f"split master: `{name}` must be a flat {dtype} CPU tensor of {master.numel()} elements, "
                f"got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; pass `tensor.view(-1)`."
            )
        if not tensor.is_contiguous():
            raise ValueError(f"split master: `{name}` must be contiguous, got strides {tensor.stride()}.")
