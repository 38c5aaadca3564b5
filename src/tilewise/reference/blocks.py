"""Block-sparse attention from its equations (docs/methods/block-sparse.md), with whole masks and explicit block sums.

    D = sum_{j in E} exp(s_ij) + sum_{b in U} Zh_ib,    N = sum_{j in E} exp(s_ij) v_j + sum_{b in U} Zh_ib vbar_b
    Zh_ib = B_b exp(scale q_i . kbar_b)                 (Taylor of order 0; Drop has no second sum)

E: the visible keys of the selected blocks; U: the unselected blocks of which row i sees every key.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.layout import Visibility
from tilewise.reference.dense import NEGATIVE_INFINITY, clean, connected_zero, sequences, visible_pairs
from tilewise.selection import Selection


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visibility: Visibility,
    scale: float,
    sink: Tensor | None,
    selection: Selection,
    remainder: str,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute block-sparse attention; differentiable by plain autograd.

    Args:
        q: `[B, T_q, H_q, d_k]`; fp64 is computed in fp64, everything else in fp32.
        k: `[B, T_k, H_kv, d_k]`.
        v: `[B, T_k, H_kv, d_v]`.
        visibility: of the call.
        scale: factor of the logits.
        sink: `[H_q]` or None.
        selection: only `ids`, `block_q` and `block_k` are used.
        remainder: "drop" or "taylor0".
        deterministic: changes nothing.

    Returns:
        `(out, lse)` as `reference.dense.attention`; `lse = log D`.

    Raises:
        ValueError: any other remainder.
    """
    if remainder not in ("drop", "taylor0"):
        raise ValueError(f"remainder: expected 'drop' or 'taylor0', got {remainder!r}")
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:3], NEGATIVE_INFINITY, dtype=dtype, device=q.device)
    first_tile = 0
    for rows, keys in sequences(visibility):
        queries, length = rows.stop - rows.start, keys.stop - keys.start
        tiles = -(-queries // selection.block_q)
        ids = selection.ids[:, first_tile : first_tile + tiles]
        first_tile += tiles
        if queries == 0 or length == 0:
            continue
        visible = visible_pairs(queries, length, visibility, q.device)
        query, key, value = clean(q[:, rows], k[:, keys], v[:, keys], visible, dtype)
        chosen = selected_blocks(ids, queries, selection.block_q, -(-length // selection.block_k), q.shape[2])
        block_of_key = torch.arange(length, device=q.device) // selection.block_k
        exact = torch.einsum("bihd,bjhd->bhij", query, key) * scale
        exact = exact.masked_fill(~(visible & chosen[..., block_of_key]), NEGATIVE_INFINITY)

        means, values, sizes, whole = block_sums(key, value, visible, selection.block_k)
        rest = torch.einsum("bihd,bmhd->bhim", query, means) * scale
        covered = whole & ~chosen if remainder == "taylor0" else torch.zeros_like(chosen)
        rest = rest.masked_fill(~covered, NEGATIVE_INFINITY)

        peak = torch.maximum(exact.amax(-1, keepdim=True), rest.amax(-1, keepdim=True)).detach()
        peak = peak.masked_fill(peak == NEGATIVE_INFINITY, 0.0)
        weights, masses = torch.exp(exact - peak), sizes * torch.exp(rest - peak)
        denominator = weights.sum(-1) + masses.sum(-1)  # [B, H_q, L_q]
        numerator = torch.einsum("bhij,bjhd->bhid", weights, value) + torch.einsum("bhim,bmhd->bhid", masses, values)
        dead = denominator == 0
        denominator = denominator.masked_fill(dead, 1.0)
        row_lse = peak[..., 0] + torch.log(denominator)
        result = numerator / denominator[..., None]
        if sink is not None:
            result = result * torch.sigmoid(row_lse - sink.to(dtype)[:, None])[..., None]
        out[:, rows] = result.masked_fill(dead[..., None], 0.0).transpose(1, 2)
        lse[:, rows] = row_lse.masked_fill(dead, NEGATIVE_INFINITY).transpose(1, 2)
    zero = connected_zero(q, k, v, sink)
    return (out + zero).to(q.dtype), lse + zero


def launch(q: Tensor, k: Tensor, v: Tensor, *, remainder: object | None, **arguments: Any) -> tuple[Tensor, Tensor]:
    """Call `attention` with the name on the remainder's law card; None means drop."""
    name = "drop" if remainder is None else remainder.card.name  # type: ignore[attr-defined]
    return attention(q, k, v, remainder=name, **arguments)


def selected_blocks(ids: Tensor, queries: int, block_q: int, blocks: int, heads: int) -> Tensor:
    """bool `[B, H_q, L_q, M]` of one sequence from its lists `[B, tiles, H_sel, n]`."""
    listed = (ids[..., None] == torch.arange(blocks, device=ids.device)).any(-2)  # [B, tiles, H_sel, M]
    listed = listed.repeat_interleave(block_q, dim=1)[:, :queries].transpose(1, 2)
    return listed.repeat_interleave(heads // ids.shape[2], dim=1)


def block_sums(key: Tensor, value: Tensor, visible: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean keys and values `[B, M, H, d]`, sizes `[M]`, and bool `[L_q, M]`: the row sees every key of the block."""
    keys, values = key.split(block, dim=1), value.split(block, dim=1)
    sizes = torch.tensor([part.shape[1] for part in keys], dtype=key.dtype, device=key.device)
    whole = torch.stack([part.all(-1) for part in visible.split(block, dim=-1)], dim=-1)
    means = torch.stack([part.mean(1) for part in keys], dim=1)
    return means, torch.stack([part.mean(1) for part in values], dim=1), sizes, whole
