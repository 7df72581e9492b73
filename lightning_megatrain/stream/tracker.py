"""Counts the device memory that a computation would take, on the meta device, where it takes none."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BLOCK_BYTES = 512
"""What CUDA's caching allocator rounds up to."""

_TILE = 128
"""Rows to which flash attention's kernels round a sequence for their statistics."""


class MemoryTracker(TorchDispatchMode):
    """Follows every storage made inside: what is alive, and the most that ever was.

    What kernels take for themselves while they run is not seen, except for attention inside
    :class:`OnDevice`.

    Attributes:
        live: bytes alive now, rounded as CUDA's allocator does.
        peak: the most so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: set[int] = set()

    def leave_out(self, tensor: Tensor) -> None:
        """Do not count the memory of a tensor, which stands for host memory, nor what is a view of it."""
        self._known.add(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then look for storages not seen yet."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        size = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size)  # torch keeps the object as long as the memory

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


class OnDevice(TorchFunctionMode):
    """Inside, the meta device behaves as the device that it stands for.

    Scaled dot product attention has the memory of a fused kernel where CUDA has one: for all but fp32 with heads that
    share keys and values. By itself it would take the form that writes out all scores. And a condition on values, which
    are not there, holds.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace what differs."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and args[0].is_meta:
            fused = not (kwargs.get("enable_gqa") and args[0].dtype == torch.float32)
            return (_Attention if fused else _WrittenOut).apply(*args[:3])
        if func is Tensor.__bool__ and args[0].is_meta:
            return True
        return func(*args, **kwargs)


class _Attention(torch.autograd.Function):
    """Shapes of flash attention (as in torch's own kernels): output and row statistics are kept for the backward.

    q is (batch, heads, time, width), k and v may have fewer heads.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, time, _ = q.shape
        output = q.new_empty(batch, time, heads, v.shape[-1]).transpose(1, 2)
        statistics = q.new_empty(batch, heads, time, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, output, statistics)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, _, _ = ctx.saved_tensors
        batch, heads, time, width = q.shape
        rows = -(-time // _TILE) * _TILE
        # Held while the kernel runs: sums of the queries' gradient, row statistics, and the gradients of keys and
        # values for each head of the queries, where several share theirs.
        held = [q.new_empty(batch, rows, heads, width, dtype=torch.float32), q.new_empty(batch, heads, rows)]
        made = [torch.empty_like(t) for t in (q, k, v)]
        if k.shape[1] != heads:
            held += [t.new_empty(batch, t.shape[2], heads, t.shape[3]) for t in (k, v)]
        del held
        return made[0], made[1], made[2]


class _WrittenOut(torch.autograd.Function):
    """Attention that writes out the scores of all pairs, and keeps what their softmax made of them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q.new_empty(*q.shape[:3], k.shape[2])
        ctx.save_for_backward(q, k, v, scores)
        return q.new_empty(*q.shape[:3], v.shape[-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, scores = ctx.saved_tensors
        held = [torch.empty_like(scores) for _ in range(3)]  # 3.8 were measured at once, with the one that is kept
        made = [torch.empty_like(t) for t in (q, k, v)]
        del held
        return made[0], made[1], made[2]
