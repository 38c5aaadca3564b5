"""Forward and backward of the walk, tile by tile. Plain tensors in and out; autograd lives in ops.py.

N = B * H_kv, G = query heads per KV head, R = rows of a chunk, C = keys of a tile. The G query heads of a KV head are more
rows of the same product, [N, G * R, d], so that K and V are never repeated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.eager.membership import Membership, readable
from tilewise.eager.plan import KeyTile, key_tiles, row_chunks, unseen_keys

NEGATIVE_INFINITY = float("-inf")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64 inputs, fp32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    end: Tensor,
    scale: float,
    key_bias: Tensor | None,
    membership: Membership | None,
) -> tuple[Tensor, Tensor]:
    """Out `[B, T_q, H_q, d_v]` and lse `[B, T_q, H_q]` in the accumulation dtype; a row that sees no key: (0, -inf)."""
    batch, rows, heads, _ = q.shape
    keys, kv_heads, width = v.shape[1:]
    dtype = accumulation_dtype(q.dtype)
    out = torch.zeros(batch, rows, heads, width, dtype=dtype, device=q.device)
    lse = torch.full((batch, rows, heads), NEGATIVE_INFINITY, dtype=dtype, device=q.device)
    if lse.numel() == 0:
        return out, lse
    unseen = unseen_keys(first, end, keys)
    key, value, bias = to_heads(k, unseen), to_heads(v, unseen), bias_rows(key_bias, unseen, dtype)
    for chunk in row_chunks(first, end, keys, batch * heads, membership is not None):
        part = slice(chunk.begin, chunk.stop)
        query = to_rows(q[:, part], kv_heads) * scale  # [N, G * R, d_k]
        maximum = query.new_full(query.shape[:2], NEGATIVE_INFINITY)
        total = query.new_zeros(query.shape[:2])
        accumulator = query.new_zeros(*query.shape[:2], width)
        for tile in key_tiles(chunk, first, end, kv_heads, membership):
            weights = logits(query, key, bias, tile, batch, kv_heads, chunk.stop - chunk.begin)
            new_maximum = torch.maximum(maximum, weights.amax(-1))
            # 0 stands in for -inf while a row has seen nothing: exp(-inf - 0) is the 0 that is wanted
            shift = new_maximum.masked_fill(new_maximum == NEGATIVE_INFINITY, 0.0)
            weights.sub_(shift[..., None]).exp_()
            decay = torch.exp(maximum - shift)
            total.mul_(decay).add_(weights.sum(-1))
            accumulator.mul_(decay[..., None]).baddbmm_(weights, value[:, tile.begin : tile.stop])
            maximum = new_maximum
        dead = total == 0
        divisor = total.masked_fill(dead, 1.0)
        # filled, not only divided: 0 * NaN from a value of the same tile must not reach a dead row
        accumulator.div_(divisor[..., None]).masked_fill_(dead[..., None], 0.0)
        row_lse = (maximum + torch.log(divisor)).masked_fill_(dead, NEGATIVE_INFINITY)
        out[:, part] = from_rows(accumulator, batch, kv_heads, chunk.stop - chunk.begin)
        lse[:, part] = from_rows(row_lse[..., None], batch, kv_heads, chunk.stop - chunk.begin)[..., 0]
    return out, lse


def backward(
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
    membership: Membership | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v in their dtypes and of key_bias (empty where there is none). Fixed order of every sum."""
    batch, _, heads, _ = q.shape
    keys, kv_heads = k.shape[1:3]
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if lse.numel() == 0:
        no_bias = q.new_empty(0)
        return dq, dk, dv, no_bias if key_bias is None else key_bias.new_zeros(key_bias.shape)
    unseen = unseen_keys(first, end, keys)
    dtype = accumulation_dtype(q.dtype)
    key, value, bias = to_heads(k, unseen), to_heads(v, unseen), bias_rows(key_bias, unseen, dtype)
    dkey, dvalue = torch.zeros_like(key), torch.zeros_like(value)
    dbias = None if bias is None else torch.zeros_like(bias)
    for chunk in row_chunks(first, end, keys, batch * heads, membership is not None):
        part = slice(chunk.begin, chunk.stop)
        rows = chunk.stop - chunk.begin
        row_lse = to_rows(lse[:, part, :, None], kv_heads)
        dead = row_lse == NEGATIVE_INFINITY  # [N, G * R, 1]
        any_dead = not readable(dead) or bool(dead.any())
        # whatever a dead row holds, padding or NaN, stops here
        query = (to_rows(q[:, part], kv_heads) * scale).masked_fill_(dead, 0.0)
        doutput = to_rows(dout[:, part], kv_heads).masked_fill(dead, 0.0)
        delta = (doutput * to_rows(out[:, part], kv_heads)).sum(-1, keepdim=True)
        # dS = P * (dP - Delta + dLSE)
        delta = delta - to_rows(dlse[:, part, :, None], kv_heads).masked_fill(dead, 0.0)
        shift = row_lse.masked_fill(dead, 0.0)
        dquery = torch.zeros_like(query)
        for tile in key_tiles(chunk, first, end, kv_heads, membership):
            span = slice(tile.begin, tile.stop)
            weights = logits(query, key, bias, tile, batch, kv_heads, rows).sub_(shift).exp_()
            if any_dead:
                weights.masked_fill_(dead, 0.0)
            dvalue[:, span].baddbmm_(weights.transpose(1, 2), doutput)
            dlogits = torch.bmm(doutput, value[:, span].transpose(1, 2)).sub_(delta).mul_(weights)
            if any_dead:
                dlogits.masked_fill_(dead, 0.0)
            dquery.baddbmm_(dlogits, key[:, span])
            dkey[:, span].baddbmm_(dlogits.transpose(1, 2), query)
            if dbias is not None:
                dbias[:, span] += dlogits.sum(1)
        # filled: 0 * NaN from a key of the same tile must not reach a dead row
        dquery.mul_(scale).masked_fill_(dead, 0.0)
        dq[:, part] = from_rows(dquery, batch, kv_heads, rows)
    if unseen is not None:
        # a NaN gradient of a row may have met a key of its tile that nobody sees
        dkey.masked_fill_(unseen[:, None], 0.0)
        dvalue.masked_fill_(unseen[:, None], 0.0)
    dk.transpose(1, 2).copy_(dkey.unflatten(0, (batch, kv_heads)))
    dv.transpose(1, 2).copy_(dvalue.unflatten(0, (batch, kv_heads)))
    if dbias is None or key_bias is None:
        return dq, dk, dv, q.new_empty(0)
    if unseen is not None:
        dbias.masked_fill_(unseen, 0.0)
    return dq, dk, dv, dbias.to(key_bias.dtype).view(key_bias.shape)


def logits(
    query: Tensor, key: Tensor, bias: Tensor | None, tile: KeyTile, batch: int, kv_heads: int, rows: int
) -> Tensor:
    """`[N, G * R, C]`, -inf where a pair is hidden. Hidden after the product: NaN in K reaches only rows that see it."""
    scores = torch.bmm(query, key[:, tile.begin : tile.stop].transpose(1, 2))
    if bias is not None:
        scores += bias[:, None, tile.begin : tile.stop]
    if tile.hidden is not None:
        pairs = scores.view(batch, kv_heads, -1, rows, tile.stop - tile.begin)
        pairs.masked_fill_(tile.hidden, NEGATIVE_INFINITY)
    return scores


def to_heads(x: Tensor, unseen: Tensor | None) -> Tensor:
    """`[B, T, H, D] -> [B * H, T, D]` contiguous in the accumulation dtype, tokens that nobody sees zeroed."""
    x = x.to(accumulation_dtype(x.dtype)).transpose(1, 2).contiguous().flatten(0, 1)
    return x if unseen is None else x.masked_fill(unseen[:, None], 0.0)


def bias_rows(key_bias: Tensor | None, unseen: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """`[B, H, T] -> [B * H, T]` in the accumulation dtype, keys that nobody sees zeroed."""
    if key_bias is None:
        return None
    bias = key_bias.to(dtype).flatten(0, 1)
    return bias if unseen is None else bias.masked_fill(unseen, 0.0)


def to_rows(x: Tensor, kv_heads: int) -> Tensor:
    """`[B, R, H_q, D] -> [B * H_kv, G * R, D]` in the accumulation dtype."""
    batch, rows, heads, width = x.shape
    x = x.to(accumulation_dtype(x.dtype)).unflatten(2, (kv_heads, heads // kv_heads)).permute(0, 2, 3, 1, 4)
    return x.reshape(batch * kv_heads, heads // kv_heads * rows, width)


def from_rows(x: Tensor, batch: int, kv_heads: int, rows: int) -> Tensor:
    """`[B * H_kv, G * R, D] -> [B, R, H_q, D]`, a view."""
    x = x.view(batch, kv_heads, -1, rows, x.shape[-1])
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)
