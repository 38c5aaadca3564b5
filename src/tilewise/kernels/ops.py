"""Schemas, fakes and autograd of the kernels' operators. Imports torch only; a kernel is imported when it first runs."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from tilewise.layout import Visibility

FORWARD_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? cu_q, Tensor? cu_k, Tensor? sink, bool causal, int window, float scale)"
    " -> (Tensor, Tensor)"
)
BACKWARD_SCHEMA = (
    "(Tensor dout, Tensor dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? cu_q, Tensor? cu_k,"
    " Tensor? sink, bool causal, int window, float scale) -> (Tensor, Tensor, Tensor, Tensor)"
)


def interpreted() -> bool:
    """Whether Triton kernels run on the CPU in this process (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


# define and impl, not custom_op: the same operator at half the host time of a call
torch.library.define("tilewise::dense_forward", FORWARD_SCHEMA)
torch.library.define("tilewise::dense_backward", BACKWARD_SCHEMA)


@torch.library.impl("tilewise::dense_forward", ("cpu", "cuda"))
def _forward(q, k, v, cu_q, cu_k, sink, causal, window, scale):
    """Out `[B, T_q, H_q, d_v]` and lse `[B, H_q, T_q]` (fp32, natural log, without the sink). `window` 0 means none."""
    from tilewise.kernels.triton import dense

    return dense.forward(q, k, v, cu_q, cu_k, sink, causal, window, scale)


@torch.library.register_fake("tilewise::dense_forward")
def _forward_fake(q, k, v, cu_q, cu_k, sink, causal, window, scale):
    batch, query_length, heads, _ = q.shape
    out = q.new_empty((batch, query_length, heads, v.shape[3]))
    return out, q.new_empty((batch, heads, query_length), dtype=torch.float32)


@torch.library.impl("tilewise::dense_backward", ("cpu", "cuda"))
def _backward(dout, dlse, q, k, v, out, lse, cu_q, cu_k, sink, causal, window, scale):
    """Gradients of q, k, v and of the sink (fp32 `[H_q]`; empty without a sink)."""
    from tilewise.kernels.triton import dense

    return dense.backward(dout, dlse, q, k, v, out, lse, cu_q, cu_k, sink, causal, window, scale)


@torch.library.register_fake("tilewise::dense_backward")
def _backward_fake(dout, dlse, q, k, v, out, lse, cu_q, cu_k, sink, causal, window, scale):
    heads = q.shape[2] if sink is not None else 0
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), q.new_empty((heads,), dtype=torch.float32)


class _DenseAttention(torch.autograd.Function):
    """Autograd of `tilewise::dense_forward`.

    Registered for the Autograd key rather than through register_autograd, which fills in defaults and wraps metadata in
    Python on every call: twice the host time of the operator.
    """

    @staticmethod
    def forward(ctx, q, k, v, cu_q, cu_k, sink, causal, window, scale):
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = torch.ops.tilewise.dense_forward(q, k, v, cu_q, cu_k, sink, causal, window, scale)
        ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k, sink)
        ctx.arguments = (causal, window, scale)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse, cu_q, cu_k, sink = ctx.saved_tensors
        dq, dk, dv, dsink = torch.ops.tilewise.dense_backward(
            dout, dlse, q, k, v, out, lse, cu_q, cu_k, sink, *ctx.arguments
        )
        return dq, dk, dv, None, None, dsink if sink is not None else None, None, None, None


def forbid_second_derivative(operator: str, path: str) -> None:
    """Register the autograd of a backward operator: it has none, and says so instead of returning constants.

    Args:
        operator: name in the namespace tilewise.
        path: what the message calls the implementation.
    """
    call = getattr(torch.ops.tilewise, operator)

    class OnceDifferentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *arguments):
            with torch._C._AutoDispatchBelowAutograd():
                return call(*arguments)

        @staticmethod
        def backward(ctx, *gradients):
            raise NotImplementedError(
                f"attend: expected one differentiation, got a second one through the {path} backward; "
                "impl='reference' is differentiable twice"
            )

    @torch.library.impl(f"tilewise::{operator}", "Autograd")
    def differentiate(*arguments):
        if torch.is_grad_enabled():
            return OnceDifferentiable.apply(*arguments)
        return OnceDifferentiable.forward(None, *arguments)


@torch.library.impl("tilewise::dense_forward", "Autograd")
def _forward_autograd(*arguments):
    return _DenseAttention.apply(*arguments)


forbid_second_derivative("dense_backward", "Triton")


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visibility: Visibility,
    scale: float,
    sink: Tensor | None,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor]:
    """Exact attention through the Triton kernels; differentiable in q, k, v, sink and through both results.

    Args:
        q: `[B, T_q, H_q, d_k]` fp16, bf16 or fp32 on a GPU (on a CPU under TRITON_INTERPRET=1); any strides.
        k: `[B, T_k, H_kv, d_k]`.
        v: `[B, T_k, H_kv, d_v]`; both head dims up to 256.
        visibility: what each row sees; lengths must be those of q and k.
        scale: factor on the logits; negative is legal.
        sink: `[H_q]` fp32 or None.
        deterministic: accepted for the common signature; this path is always repeatable.

    Returns:
        `(out, lse)`: `[B, T_q, H_q, d_v]` in q's dtype and `[B, T_q, H_q]` fp32, natural log, without the sink. A row that
        sees no key holds 0 and -inf.
    """
    if scale < 0:
        # the kernels take the row maximum before the scale, which needs scale >= 0
        q, scale = -q, -scale
    out, lse = torch.ops.tilewise.dense_forward(
        q,
        k,
        v,
        visibility.cu_seqlens_q,
        visibility.cu_seqlens_k,
        sink,
        visibility.causal,
        visibility.window or 0,
        scale,
    )
    return out, lse.transpose(1, 2)
