"""The blocks near the query, chosen by position alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tilewise.layout import Visibility
from tilewise.selection import Selection
from tilewise.selectors.base import SelectorCard, require_count
from tilewise.selectors.choose import tile_table


@dataclass(frozen=True)
class Window:
    """Whole blocks that overlap the last `w` positions of any row of the tile, rounded outward.

    Causal: blocks that overlap `[p_first - w + 1, p_last]`; not causal: `[p_first - w + 1, p_last + w - 1]`. Unlike the
    argument `window=` of a call this hides nothing: it says what is exact, and the remainder covers the rest.

    Args:
        w: positions, self included, at least 1.
        block_q: query rows per tile.
        block_k: tokens per key block.
        initial: blocks at the start of the sequence that are selected as well, where the tile sees them.

    Raises:
        ValueError, TypeError: a value out of range, or not an int.
    """

    w: int
    block_q: int = 64
    block_k: int = 64
    initial: int = 0

    card: ClassVar[SelectorCard] = SelectorCard(
        name="window",
        granularity="block",
        causality="token",  # the lists depend on positions alone
        cost="none",
    )

    def __post_init__(self) -> None:
        require_count("w", self.w, 1)
        require_count("block_q", self.block_q, 1)
        require_count("block_k", self.block_k, 1)
        require_count("initial", self.initial, 0)

    @torch.no_grad()
    def select(self, q: Tensor, k: Tensor, visibility: Visibility, scale: float) -> Selection:
        """Choose blocks for a call of these shapes; see `Selector.select`. Every KV head gets the same list."""
        tiles = tile_table(visibility, self.block_q, self.block_k, q.device)
        after = 0 if visibility.causal else self.w - 1
        low = torch.maximum(tiles.own_first - (self.w - 1), tiles.first)
        high = torch.minimum(tiles.own_end + after, tiles.end)  # exclusive
        high = torch.maximum(high, low)
        start, size = tiles.key_start, self.block_k
        low_block = (low - start) // size
        end_block = torch.where(high > low, (high - start + size - 1) // size, low_block)
        seen_block, seen_end = (tiles.first - start) // size, (tiles.end - start + size - 1) // size  # visible ones

        blocks = -(-visibility.key_length // size)
        reach = self.block_q + (self.w - 1) + after
        width = min(blocks, (reach + size - 2) // size + 1)
        near = low_block[:, None] + torch.arange(width, device=q.device)
        lead = torch.arange(min(blocks, self.initial), device=q.device).expand(near.shape[0], -1)
        outside = (lead < low_block[:, None]) | (lead >= end_block[:, None])
        seen = (lead >= seen_block[:, None]) & (lead < seen_end[:, None]) & (tiles.end > tiles.first)[:, None]
        taken = torch.cat([seen & outside, near < end_block[:, None]], dim=1)
        local = torch.where(taken, torch.cat([lead, near], dim=1), blocks).sort(-1).values[:, :blocks]
        local = torch.where(local < blocks, local, -1).to(torch.int32)
        ids = local[None, :, None, :].expand(q.shape[0], -1, k.shape[2], -1).contiguous()
        return Selection.from_blocks(ids, block_q=self.block_q, block_k=self.block_k, visibility=visibility)
