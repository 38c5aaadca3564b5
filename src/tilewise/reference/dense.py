"""Dense attention from its equations, with whole logit matrices: `P = exp(S - lse)`, `O = P V` (docs/methods/dense.md).

Visibility is worked out here again, sequence by sequence, so that this file can judge the layout module.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tilewise.layout import Visibility

NEGATIVE_INFINITY = float("-inf")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visibility: Visibility,
    scale: float,
    sink: Tensor | None,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute exact attention; differentiable by plain autograd in q, k, v and the sink.

    Args:
        q: `[B, T_q, H_q, d_k]`; fp64 is computed in fp64, everything else in fp32.
        k: `[B, T_k, H_kv, d_k]`.
        v: `[B, T_k, H_kv, d_v]`.
        visibility: lengths, causal, window and cu_seqlens of the call (its own methods are not used).
        scale: factor of the logits.
        sink: `[H_q]` logit with a zero value, or None.
        deterministic: changes nothing.

    Returns:
        `(out, lse)`: `[B, T_q, H_q, d_v]` in q's dtype and `[B, T_q, H_q]` fp32 (fp64), natural log, without the sink. A
        row that sees no key: 0 and -inf. Memory B * H_q * T_q * T_k.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:3], NEGATIVE_INFINITY, dtype=dtype, device=q.device)
    for rows, keys in sequences(visibility):
        if rows.start == rows.stop or keys.start == keys.stop:
            continue
        visible = visible_pairs(rows.stop - rows.start, keys.stop - keys.start, visibility, q.device)
        query, key, value = clean(q[:, rows], k[:, keys], v[:, keys], visible, dtype)
        logits = torch.einsum("bihd,bjhd->bhij", query, key) * scale
        logits = logits.masked_fill(~visible, NEGATIVE_INFINITY)
        dead = (logits == NEGATIVE_INFINITY).all(-1)  # [B, H_q, L_q]
        logits = logits.masked_fill(dead[..., None], 0.0)
        row_lse = torch.logsumexp(logits, -1)
        total = row_lse if sink is None else torch.logaddexp(row_lse, sink.to(dtype)[:, None])
        weights = torch.exp(logits - total[..., None]).masked_fill(dead[..., None], 0.0)
        out[:, rows] = torch.einsum("bhij,bjhd->bihd", weights, value)
        lse[:, rows] = row_lse.masked_fill(dead, NEGATIVE_INFINITY).transpose(1, 2)
    zero = connected_zero(q, k, v, sink)
    return (out + zero).to(q.dtype), lse + zero


def connected_zero(*tensors: Tensor | None) -> Tensor:
    """A zero that depends on its arguments: where no row sees a key their gradients are 0, not missing."""
    return torch.stack([x.flatten()[:0].sum() for x in tensors if x is not None]).sum()


def sequences(visibility: Visibility) -> Iterator[tuple[slice, slice]]:
    """Query rows and keys of each sequence of the call (reads cu_seqlens)."""
    if visibility.cu_seqlens_q is None or visibility.cu_seqlens_k is None:
        yield slice(0, visibility.query_length), slice(0, visibility.key_length)
        return
    cu_q, cu_k = visibility.cu_seqlens_q.tolist(), visibility.cu_seqlens_k.tolist()
    for i in range(len(cu_q) - 1):
        yield slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])


def visible_pairs(queries: int, keys: int, visibility: Visibility, device: torch.device) -> Tensor:
    """bool `[L_q, L_k]` of one sequence: row t stands at `p = t + L_k - L_q` and sees `p-w+1 .. p` (causal, window w)."""
    position = torch.arange(queries, device=device)[:, None] + (keys - queries)
    key = torch.arange(keys, device=device)[None, :]
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if visibility.causal:
        visible &= key <= position
    if visibility.window is not None:
        visible &= key > position - visibility.window
    return visible


def clean(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Cast, zero what sees nothing or is seen by nobody (it may hold NaN), and repeat K and V for their query heads."""
    row, token = visible.any(1)[:, None, None], visible.any(0)[:, None, None]
    groups = q.shape[2] // k.shape[2]
    query = torch.where(row, q.to(dtype), 0.0)
    key = torch.where(token, k.to(dtype), 0.0).repeat_interleave(groups, dim=2)
    value = torch.where(token, v.to(dtype), 0.0).repeat_interleave(groups, dim=2)
    return query, key, value
