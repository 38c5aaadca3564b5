"""Schemas, fakes and autograd of the Hopper walk's operators. Imports torch only; the kernels are imported on first use."""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

from tilewise.kernels.ops import forbid_second_derivative
from tilewise.layout import Visibility
from tilewise.selection import Selection

FORWARD_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? cu_q, Tensor? cu_k, Tensor? sink, Tensor? ids, int block_q, bool causal,"
    " int window, float scale, bool deterministic) -> (Tensor, Tensor)"
)
BACKWARD_SCHEMA = (
    "(Tensor dout, Tensor dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? cu_q, Tensor? cu_k,"
    " Tensor? sink, Tensor? ids, int block_q, bool causal, int window, float scale, bool deterministic)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
HOPPER = (9, 0)
LISTED_ROWS = (64, 128)  # query rows of a listed tile
LISTED_KEYS = 64

# define and impl, not custom_op: the same operator at half the host time of a call
torch.library.define("tilewise::hopper_forward", FORWARD_SCHEMA)
torch.library.define("tilewise::hopper_backward", BACKWARD_SCHEMA)


@torch.library.impl("tilewise::hopper_forward", "cuda")
def _forward(q, k, v, cu_q, cu_k, sink, ids, block_q, causal, window, scale, deterministic):
    """Out `[B, T_q, H_q, d_v]` and lse `[B, H_q, T_q]` (fp32, natural log, without the sink). `window` 0 means none."""
    from tilewise.kernels.hopper import attention

    return attention.forward(q, k, v, cu_q, cu_k, sink, ids, block_q, causal, window, scale)


@torch.library.register_fake("tilewise::hopper_forward")
def _forward_fake(q, k, v, cu_q, cu_k, sink, ids, block_q, causal, window, scale, deterministic):
    batch, query_length, heads, _ = q.shape
    out = q.new_empty((batch, query_length, heads, v.shape[3]))
    return out, q.new_empty((batch, heads, query_length), dtype=torch.float32)


@torch.library.impl("tilewise::hopper_backward", "cuda")
def _backward(*arguments):
    """Gradients of q, k, v and of the sink (fp32 `[H_q]`; empty without a sink)."""
    from tilewise.kernels.hopper import attention

    return attention.backward(*arguments)


@torch.library.register_fake("tilewise::hopper_backward")
def _backward_fake(dout, dlse, q, k, v, out, lse, cu_q, cu_k, sink, *rest):
    heads = q.shape[2] if sink is not None else 0
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), q.new_empty((heads,), dtype=torch.float32)


class _WalkAttention(torch.autograd.Function):
    """Autograd of `tilewise::hopper_forward`, for the Autograd key: see kernels/ops.py."""

    @staticmethod
    def forward(ctx, q, k, v, cu_q, cu_k, sink, ids, *rest):
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = torch.ops.tilewise.hopper_forward(q, k, v, cu_q, cu_k, sink, ids, *rest)
        ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k, sink, ids)
        ctx.rest = rest
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse, cu_q, cu_k, sink, ids = ctx.saved_tensors
        dq, dk, dv, dsink = torch.ops.tilewise.hopper_backward(
            dout, dlse, q, k, v, out, lse, cu_q, cu_k, sink, ids, *ctx.rest
        )
        return dq, dk, dv, None, None, dsink if sink is not None else None, *(None,) * 6


@torch.library.impl("tilewise::hopper_forward", "Autograd")
def _forward_autograd(*arguments):
    return _WalkAttention.apply(*arguments)


forbid_second_derivative("hopper_backward", "Hopper")


@functools.cache
def _refusal_of(index: int) -> str | None:
    if not torch.cuda.is_available():
        return "device 'cuda' (none here)"
    if torch.cuda.get_device_capability(index) != HOPPER:
        return f"device {torch.cuda.get_device_name(index)} (needs compute capability 9.0)"
    try:
        from tilewise.kernels.hopper import compat
    except (ImportError, AttributeError, TypeError) as error:  # whatever another version has made of the interface
        reason = f"this triton ({error})"
    else:
        reason = compat.unsupported()
    if reason is not None:
        warnings.warn(f"the Hopper kernels are off, calls take the Triton path: {reason}", stacklevel=2)
    return reason


def refusal(index: int) -> str | None:
    """Why GPU `index` cannot run the Hopper kernels, in words; None: it can. Warns once if only the versions forbid it."""
    return _refusal_of(index)


# what torch.compiler.assume_constant_result sets, without importing the compiler (and with it Triton) here
refusal._dynamo_marked_constant = True  # type: ignore[attr-defined]


def obstacle(
    device: torch.device, head_dims: tuple[int, int], scale: float, selection: Selection | None, kv_heads: int
) -> str | None:
    """What keeps the walk from a call that its dtype and device type allow, in words; None: nothing."""
    if device.type != "cuda":
        return f"device {device.type!r} (have: cuda of compute capability 9.0)"
    d_k, d_v = head_dims
    if d_k % 8 or d_v % 8 or d_v > 128 or d_k > 192:
        return f"head dims d_k = {d_k}, d_v = {d_v} (multiples of 8, d_k up to 192 and d_v up to 128)"
    if scale == 0:
        return "scale = 0 (needs another)"
    if selection is not None:
        heads = selection.ids.shape[2]
        if selection.block_k != LISTED_KEYS or selection.block_q not in LISTED_ROWS:
            return f"blocks of {selection.block_q} x {selection.block_k} (have: 64 or 128 rows x 64 keys)"
        if heads not in (1, kv_heads):
            return f"{heads} lists a tile (have: 1, or one per KV head: {kv_heads})"
        if d_k > 128:
            return f"head dim d_k = {d_k} with lists (at most 128)"
    return refusal(device.index or 0)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visibility: Visibility,
    scale: float,
    sink: Tensor | None,
    deterministic: bool = True,
    selection: Selection | None = None,
    remainder: object | None = None,
) -> tuple[Tensor, Tensor]:
    """Exact attention, or that of the selected blocks alone, through the Hopper kernels; differentiable in q, k, v, sink.

    Args:
        q: `[B, T_q, H_q, d_k]` fp16 or bf16 on a GPU of compute capability 9.0; any strides.
        k: `[B, T_k, H_kv, d_k]`.
        v: `[B, T_k, H_kv, d_v]`. Head dims: multiples of 8 up to 128, or 192 / up to 128.
        visibility: what each row sees.
        scale: factor on the logits, not 0; negative is legal.
        sink: `[H_q]` fp32 or None.
        deterministic: False lets the backward of dense calls add the queries' gradient in no fixed order, with five
            products instead of seven.
        selection: 64-key blocks for tiles of 64 or 128 rows, one list per KV head or one for all; None: all keys.
        remainder: only one that drops what was not selected comes here.

    Returns:
        `(out, lse)`: `[B, T_q, H_q, d_v]` in q's dtype and `[B, T_q, H_q]` fp32, natural log, without the sink. A row that
        sees no key holds 0 and -inf.
    """
    if scale < 0:
        # the kernels take the row maximum before the scale, which needs scale >= 0
        q, scale = -q, -scale
    out, lse = torch.ops.tilewise.hopper_forward(
        q, k, v, visibility.cu_seqlens_q, visibility.cu_seqlens_k, sink,
        None if selection is None else selection.ids, 0 if selection is None else selection.block_q,
        visibility.causal, visibility.window or 0, scale, deterministic,
    )  # fmt: skip
    return out, lse.transpose(1, 2)
