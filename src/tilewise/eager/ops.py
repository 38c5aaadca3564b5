"""Schemas, fakes and autograd of the walk's two operators."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.eager import passes, split
from tilewise.eager.membership import Membership


@torch.library.custom_op("tilewise::walk_forward", mutates_args=())
def walk_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    end: Tensor,
    scale: float,
    key_bias: Tensor | None,
    ids: Tensor | None,
    row_tile: Tensor | None,
    key_block: Tensor | None,
    blocks: int,
    complement: bool,
) -> tuple[Tensor, Tensor]:
    """Out `[B, T_q, H_q, d_v]` and lse `[B, T_q, H_q]` in fp32 (fp64 for fp64 inputs); see `tilewise.eager.walk`."""
    lists = _membership(ids, row_tile, key_block, blocks, complement)
    return split.forward(q, k, v, first, end, scale, key_bias, lists)


@walk_forward.register_fake
def _(q, k, v, first, end, scale, key_bias, ids, row_tile, key_block, blocks, complement):
    dtype = passes.accumulation_dtype(q.dtype)
    batch, rows, heads, _ = q.shape
    return q.new_empty((batch, rows, heads, v.shape[3]), dtype=dtype), q.new_empty((batch, rows, heads), dtype=dtype)


@torch.library.custom_op("tilewise::walk_backward", mutates_args=())
def walk_backward(
    dout: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    first: Tensor,
    end: Tensor,
    scale: float,
    key_bias: Tensor | None,
    ids: Tensor | None,
    row_tile: Tensor | None,
    key_block: Tensor | None,
    blocks: int,
    complement: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and key_bias (empty without one)."""
    lists = _membership(ids, row_tile, key_block, blocks, complement)
    return split.backward(dout, dlse, q, k, v, out, lse, first, end, scale, key_bias, lists)


@walk_backward.register_fake
def _(dout, dlse, q, k, v, out, lse, first, end, scale, key_bias, ids, row_tile, key_block, blocks, complement):
    dbias = q.new_empty(0) if key_bias is None else key_bias.new_empty(key_bias.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dbias


def _save(ctx, inputs, output):
    q, k, v, first, end, scale, key_bias, ids, row_tile, key_block, blocks, complement = inputs
    ctx.save_for_backward(q, k, v, *output, first, end, key_bias, ids, row_tile, key_block)
    ctx.arguments = (scale, blocks, complement)


def _backward(ctx, dout, dlse):
    q, k, v, out, lse, first, end, key_bias, ids, row_tile, key_block = ctx.saved_tensors
    scale, blocks, complement = ctx.arguments
    dq, dk, dv, dbias = torch.ops.tilewise.walk_backward(
        dout, dlse, q, k, v, out, lse, first, end, scale, key_bias, ids, row_tile, key_block, blocks, complement
    )
    return dq, dk, dv, None, None, None, dbias if key_bias is not None else None, None, None, None, None, None


walk_forward.register_autograd(_backward, setup_context=_save)


def _membership(
    ids: Tensor | None, row_tile: Tensor | None, key_block: Tensor | None, blocks: int, complement: bool
) -> Membership | None:
    if ids is None or row_tile is None or key_block is None:
        return None
    return Membership(ids, row_tile, key_block, blocks, complement)
