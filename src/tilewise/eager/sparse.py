"""Selected blocks exactly, the rest through its stand-ins: two walks and a merge."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tilewise.eager.membership import Membership
from tilewise.eager.walk import walk
from tilewise.layout import BlockTable, Visibility, sequence_of
from tilewise.selection import Selection
from tilewise.state import merge


class VirtualKeys(Protocol):
    """One key per block: k `[B, M, H_kv, d_k]`, v `[B, M, H_kv, d_v]`, bias `[B, H_kv, M]` or `[M]`, natural log."""

    k: Tensor
    v: Tensor
    bias: Tensor


class Remainder(Protocol):
    """What this file needs of a remainder."""

    def virtual_keys(self, k: Tensor, v: Tensor, table: BlockTable) -> VirtualKeys | None: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visibility: Visibility,
    scale: float,
    sink: Tensor | None,
    selection: Selection,
    remainder: Remainder | None = None,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attend the selected blocks exactly and merge what the remainder says about the others.

    Args:
        q: `[B, T_q, H_q, d_k]`.
        k: `[B, T_k, H_kv, d_k]`.
        v: `[B, T_k, H_kv, d_v]`.
        visibility: which keys each row may see, selected or not.
        scale: factor of the logits.
        sink: fp32 `[H_q]` or None; applied once, after the merge.
        selection: the block lists.
        remainder: gives the virtual keys; None drops what was not selected.
        deterministic: changes nothing: this path always is.

    Returns:
        `(out, lse)`: `[B, T_q, H_q, d_v]` in q's dtype and `[B, T_q, H_q]` fp32 (fp64), natural log, without the sink. A
        row that neither selects nor covers a visible key holds 0 and -inf.

    Source: docs/methods/block-sparse.md.
    """
    selection = selection.bound_to(visibility)
    rows, keys = selection.tables()
    first, end = visibility.key_range(q.device)
    last_block = max(keys.count - 1, 0)
    # a key of no sequence is in no row's range, so that its block does not matter
    key_block = keys.local[keys.of_token.clamp(max=last_block)]
    listed = Membership(selection.ids, rows.of_token, key_block, keys.count)
    state = walk(q, k, v, first=first, end=end, scale=scale, membership=listed)
    stand_in = None if remainder is None else remainder.virtual_keys(k, v, keys)
    if stand_in is not None:
        first_block, end_block = covered_blocks(visibility, keys, first, end)
        unlisted = Membership(selection.ids, rows.of_token, keys.local, keys.count, complement=True)
        bias = stand_in.bias.expand(k.shape[0], k.shape[2], keys.count)
        rest = walk(
            q,
            stand_in.k,
            stand_in.v,
            first=first_block,
            end=end_block,
            scale=scale,
            key_bias=bias,
            membership=unlisted,
        )
        state = merge(state, rest)
    return state.finish(sink).to(q.dtype), state.lse


def covered_blocks(visibility: Visibility, keys: BlockTable, first: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of which a row sees every key: they are one range, int64 `[T_q]` first and end, numbered through the call.

    `first`, `end`: the row's key range. A partly visible block at either edge is left out.
    """
    cu_q, cu_k = visibility.boundaries(first.device)
    sequences = cu_q.shape[0] - 1
    row = torch.arange(visibility.query_length, device=first.device)
    sequence = sequence_of(row, cu_q).clamp(max=max(sequences - 1, 0))
    start, stop, offset = cu_k[sequence], cu_k[sequence + 1], keys.offset[sequence]
    first_block = offset + (first - start + keys.block - 1) // keys.block
    # the last block of a sequence may be short: it is whole for a row that sees the sequence's end
    end_block = torch.where(end == stop, keys.offset[sequence + 1], offset + (end - start) // keys.block)
    return first_block, torch.where(end > first, torch.maximum(end_block, first_block), first_block)
