"""One pass for each block list that is shared, so that a tile is visited only for the heads that selected it.

Heads that select different blocks have few skippable tiles in common: walked together, each would pay for the union.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tilewise.eager import passes
from tilewise.eager.membership import Membership, readable

Part = tuple[slice, slice, slice, Membership]


def parts(q: Tensor, k: Tensor, membership: Membership | None) -> Iterator[Part] | None:
    """Batch entries, KV heads and query heads `[b, h_kv, h_q]` with lists of their own; None: one pass does it all.

    A complement hides few blocks, and where values are not read nothing is skipped: there splitting gains nothing.
    """
    if membership is None or membership.complement or not readable(membership.ids):
        return None
    batch, kv_heads, list_heads = q.shape[0], k.shape[2], membership.ids.shape[2]
    if batch == 1 and (list_heads == 1 or kv_heads == 1):
        return None
    return _parts(batch, kv_heads, q.shape[2] // kv_heads, membership)


def _parts(batch: int, kv_heads: int, groups: int, membership: Membership) -> Iterator[Part]:
    list_heads = membership.ids.shape[2]
    step = kv_heads if list_heads == 1 else 1
    for b in range(batch):
        for h in range(0, kv_heads, step):
            # lists per query head: those of this KV head's group
            lists = (
                slice(0, 1) if list_heads == 1 else slice(h * list_heads // kv_heads, (h + 1) * list_heads // kv_heads)
            )
            own = replace(membership, ids=membership.ids[b : b + 1, :, lists])
            yield slice(b, b + 1), slice(h, h + step), slice(h * groups, (h + step) * groups), own


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
    """As `passes.forward`."""
    pieces = parts(q, k, membership)
    if pieces is None:
        return passes.forward(q, k, v, first, end, scale, key_bias, membership)
    dtype = passes.accumulation_dtype(q.dtype)
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=dtype, device=q.device)
    for b, h_kv, h_q, lists in pieces:
        bias = None if key_bias is None else key_bias[b, h_kv]
        out[b, :, h_q], lse[b, :, h_q] = passes.forward(
            q[b, :, h_q], k[b, :, h_kv], v[b, :, h_kv], first, end, scale, bias, lists
        )
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
    """As `passes.backward`."""
    pieces = parts(q, k, membership)
    if pieces is None:
        return passes.backward(dout, dlse, q, k, v, out, lse, first, end, scale, key_bias, membership)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    dbias = q.new_empty(0) if key_bias is None else torch.empty(key_bias.shape, dtype=key_bias.dtype, device=q.device)
    for b, h_kv, h_q, lists in pieces:
        bias = None if key_bias is None else key_bias[b, h_kv]
        dq[b, :, h_q], dk[b, :, h_kv], dv[b, :, h_kv], piece = passes.backward(
            dout[b, :, h_q],
            dlse[b, :, h_q],
            q[b, :, h_q],
            k[b, :, h_kv],
            v[b, :, h_kv],
            out[b, :, h_q],
            lse[b, :, h_q],
            first,
            end,
            scale,
            bias,
            lists,
        )
        if key_bias is not None:
            dbias[b, h_kv] = piece
    return dq, dk, dv, dbias
