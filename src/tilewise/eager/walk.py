"""The walk: a chunk of query rows visits a list of key tiles and folds each into its state."""

from __future__ import annotations

from torch import Tensor

from tilewise.eager.membership import Membership
from tilewise.eager.ops import walk_forward
from tilewise.state import AttentionState


def walk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    first: Tensor,
    end: Tensor,
    scale: float,
    key_bias: Tensor | None = None,
    membership: Membership | None = None,
) -> AttentionState:
    """Attend each query row to its range of keys, tile by tile; memory O(T * block).

    `S = scale * q . k + key_bias`; `lse = log sum_j exp(S_j)`, `out = sum_j exp(S_j - lse) v_j` over the keys j of
    `[first, end)` that the membership lets count.

    Args:
        q: `[B, T_q, H_q, d_k]`, any floating dtype and strides.
        k: `[B, T_k, H_kv, d_k]`; query head h reads KV head `h // (H_q / H_kv)`.
        v: `[B, T_k, H_kv, d_v]`.
        first: int64 `[T_q]`, first key of each row.
        end: int64 `[T_q]`, one past its last key; `first >= end` for a row that sees nothing.
        scale: factor of the products, any sign.
        key_bias: `[B, H_kv, T_k]` added to the logits (natural logarithm, not scaled), or None.
        membership: block lists that the pairs must also satisfy, or None.

    Returns:
        AttentionState in fp32 (fp64 for fp64 inputs), natural log; a row that sees no key holds (0, -inf). Differentiable
        once, in q, k, v and key_bias, through both out and lse. The order of every sum is fixed.

    Source: docs/methods/dense.md.
    """
    lists = (None, None, None, 0, False)
    if membership is not None:
        lists = (
            membership.ids,
            membership.row_tile,
            membership.key_block,
            membership.blocks,
            membership.complement,
        )
    out, lse = walk_forward(q, k, v, first, end, scale, key_bias, *lists)
    return AttentionState(out, lse)
