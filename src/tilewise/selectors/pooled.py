"""Mean-pooled block scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tilewise.layout import BlockTable, Visibility
from tilewise.selection import Selection
from tilewise.selectors.base import BlockOptions, SelectorCard
from tilewise.selectors.choose import TileTable, choose_blocks


@dataclass(frozen=True)
class Pooled(BlockOptions):
    """Top blocks by the mean key: `score_ab = scale * mean_{i in tile a, h in group} q_ih . kbar_b`, in fp32.

    The mean over rows and heads is taken of q first; by linearity that is the mean of the scores. The logarithm of the
    block's mass exceeds the score of a row (plus the log block size) by about half the variance of its logits.
    Arguments: see `BlockOptions`. Source: docs/methods/block-sparse.md, section "Selection".
    """

    card: ClassVar[SelectorCard] = SelectorCard(
        name="pooled",
        granularity="block",
        causality="tile",
        cost="1 / (2 block_q block_k) of the dense products",
    )

    @torch.no_grad()
    def select(self, q: Tensor, k: Tensor, visibility: Visibility, scale: float) -> Selection:
        """Choose blocks for `q [B, T_q, H_q, d_k]` against `k [B, T_k, H_kv, d_k]`; see `Selector.select`."""
        batch, kv_heads = q.shape[0], k.shape[2]
        summaries: list[Tensor] = []

        def score(tiles: TileTable, piece: slice) -> Tensor:
            if not summaries:  # [B, H_kv, d_k, M]
                summaries.append(mean_of_blocks(k, tiles.keys, slice(0, tiles.keys.count)).permute(0, 2, 3, 1))
            query = mean_of_blocks(q, tiles.rows, piece)  # [B, tiles, H_q, d_k]
            query = query.unflatten(2, (kv_heads, -1)).mean(3).transpose(1, 2)
            return (scale * (query @ summaries[0])).transpose(1, 2)

        scratch = batch * self.block_q * q.shape[2] * q.shape[3]  # rows of a tile in fp32
        return choose_blocks(self, visibility, batch, kv_heads, q.device, score, scratch)


def mean_of_blocks(x: Tensor, table: BlockTable, piece: slice) -> Tensor:
    """fp32 mean over the tokens of the blocks in a slice: `[B, T, H, D] -> [B, len(piece), H, D]`; empty blocks: 0."""
    token, inside = table.slots()
    token, inside = token[piece], inside[piece]
    size = (table.end - table.start)[piece].clamp(min=1)
    if x.shape[1] == 0:
        return x.new_zeros(x.shape[0], token.shape[0], *x.shape[2:], dtype=torch.float32)
    # where, not a product: a slot past the end may read a token of no sequence, which may hold NaN
    total = torch.where(inside[None, :, :, None, None], x[:, token].float(), 0.0).sum(2)
    return total / size[None, :, None, None]
