"""The true softmax mass of each block: what every other selector estimates. For diagnosis and tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tilewise.layout import BlockTable, Visibility, block_table
from tilewise.selection import Selection
from tilewise.selectors.base import BlockOptions, SelectorCard
from tilewise.selectors.choose import TileTable, choose_blocks

# elements of a [B, H_q, rows, T_k] piece of logits: 16 MiB in fp32
LOGIT_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Oracle(BlockOptions):
    """Top blocks by true mass: the mean over the tile's rows and the group's heads of the row's softmax mass per block.

    No selection of the same size and forced blocks keeps more mass, summed over the rows and heads that share a list.
    Costs the dense logits. Arguments: see `BlockOptions`.
    """

    card: ClassVar[SelectorCard] = SelectorCard(
        name="oracle",
        granularity="block",
        causality="tile",
        cost="the dense logits",
    )

    @torch.no_grad()
    def select(self, q: Tensor, k: Tensor, visibility: Visibility, scale: float) -> Selection:
        """Choose blocks for `q [B, T_q, H_q, d_k]` against `k [B, T_k, H_kv, d_k]`; see `Selector.select`."""
        batch, kv_heads = q.shape[0], k.shape[2]

        def score(tiles: TileTable, piece: slice) -> Tensor:
            token, inside = tiles.rows.slots()
            token, inside = token[piece], inside[piece]
            log_mass = block_logmass(q, k, visibility, scale, self.block_k, rows=token.reshape(-1), table=tiles.keys)
            mass = torch.softmax(log_mass.double(), dim=-1).nan_to_num(nan=0.0)  # dead rows: 0
            mass = mass.unflatten(1, (token.shape[0], -1)).unflatten(3, (kv_heads, -1))
            mass = torch.where(inside[None, :, :, None, None, None], mass, 0.0).sum((2, 4))
            return mass.float()

        scratch = batch * self.block_q * q.shape[2] * k.shape[1]
        return choose_blocks(self, visibility, batch, kv_heads, q.device, score, scratch)


def block_logmass(
    q: Tensor,
    k: Tensor,
    visibility: Visibility,
    scale: float,
    block_k: int,
    *,
    rows: slice | Tensor | None = None,
    table: BlockTable | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Logarithm of the mass of every key block: `log Z_ib = log sum_{j in b, j visible to i} exp(scale q_i . k_j)`.

    Args:
        q: `[B, T_q, H_q, d_k]`.
        k: `[B, T_k, H_kv, d_k]`.
        visibility: which keys each row of the call may see.
        scale: factor of the logits.
        block_k: tokens per key block.
        rows: the query rows wanted, a slice or int64 `[R]`; None: all of them.
        table: the key blocks, where the caller has them already.
        dtype: of the products and of the result, fp32 or fp64.

    Returns:
        `[B, R, H_q, M]`, natural logarithm, blocks counted through the call; -inf where the row sees no key of it.
        `torch.logsumexp` over the last dimension is the row's dense LSE. Logits are held for a few rows at a time.
    """
    device = q.device
    row = chosen_rows(rows, visibility.query_length, device)
    if table is None:
        table = block_table(visibility.boundaries(device)[1], visibility.key_length, block_k)
    first, end = visibility.key_range(device)
    batch, heads = q.shape[0], q.shape[2]
    result = torch.full((batch, row.shape[0], heads, table.count), float("-inf"), dtype=dtype, device=device)
    if table.count == 0 or result.numel() == 0:
        return result
    token, inside = table.slots()
    keys = k[:, token.reshape(-1)].to(dtype).permute(0, 2, 3, 1)  # [B, H_kv, d_k, M * block_k]
    step = max(1, LOGIT_ELEMENTS // (batch * heads * token.numel()))
    for begin in range(0, row.shape[0], step):
        piece = row[begin : begin + step]
        logits = grouped_logits(q[:, piece].to(dtype), keys, scale).unflatten(-1, token.shape)
        seen = inside & (token >= first[piece, None, None]) & (token < end[piece, None, None])  # [R, M, block_k]
        log_mass = torch.logsumexp(logits.masked_fill_(~seen, float("-inf")), dim=-1)  # [B, H_kv, G, R, M]
        result[:, begin : begin + step] = log_mass.flatten(1, 2).transpose(1, 2)
    return result


def grouped_logits(q: Tensor, keys: Tensor, scale: float) -> Tensor:
    """`scale * q . k` of `q [B, R, H_q, d]` and `keys [B, H_kv, d, S]`: `[B, H_kv, G, R, S]`."""
    batch, rows, heads, width = q.shape
    kv_heads = keys.shape[1]
    query = (q * scale).view(batch, rows, kv_heads, heads // kv_heads, width).permute(0, 2, 3, 1, 4)
    return (query.flatten(2, 3) @ keys).unflatten(2, (heads // kv_heads, rows))


def chosen_rows(rows: slice | Tensor | None, length: int, device: torch.device) -> Tensor:
    """int64 `[R]` of the rows that a slice (None: all) names."""
    if isinstance(rows, Tensor):
        return rows.to(device=device, dtype=torch.int64)
    begin, stop, stride = (rows if rows is not None else slice(None)).indices(length)
    return torch.arange(begin, stop, stride, device=device)
