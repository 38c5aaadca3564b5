"""A Selection: which key blocks (or tokens) each query tile computes exactly, as compact lists of ids."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilewise.layout import BlockTable, Visibility, block_table


@dataclass(frozen=True)
class Selection:
    """Compact lists of selected key blocks.

    Query tile i holds rows `[i*block_q, (i+1)*block_q)` of its sequence, key block j tokens `[j*block_k, (j+1)*block_k)`;
    in a packed call tiles and blocks restart at each sequence, tiles are numbered through the call, ids are local to the
    sequence. A selection says where to compute; causality, windows and documents still mask single keys.

    Attributes:
        ids: int32 `[B, n_q_tiles, H_sel, n]`, H_sel in {1, H_kv, H_q}; unique within a list, -1 is "no block" anywhere.
        block_q: query rows per tile (1: a list per token).
        block_k: tokens per key block (1: a token-level selection).
    """

    ids: Tensor
    block_q: int
    block_k: int
    visibility: Visibility | None = (
        None  # of the call it was made for; lets density, to_mask and transpose go without arguments
    )

    @classmethod
    def from_blocks(cls, ids: Tensor, *, block_q: int, block_k: int, visibility: Visibility | None = None) -> Selection:
        """Make a selection from block ids, int `[B, n_q_tiles, H_sel, n]`, padded with -1.

        Raises:
            ValueError: rank other than 4, or block sizes below 1.
            TypeError: ids of a floating dtype.
        """
        if ids.dim() != 4:
            raise ValueError(f"ids: expected [B, n_q_tiles, H_sel, n] (rank 4), got shape {tuple(ids.shape)}")
        if ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"ids: expected int32 (int64 is converted), got {ids.dtype}")
        for name, value in (("block_q", block_q), ("block_k", block_k)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        return cls(ids.to(torch.int32), block_q, block_k, visibility)

    @classmethod
    def from_tokens(cls, ids: Tensor, *, visibility: Visibility | None = None) -> Selection:
        """Make a token-level selection from `[B, T_q, n]` (shared by all heads) or `[B, T_q, H_sel, n]` token ids."""
        if ids.dim() == 3:
            ids = ids[:, :, None, :]
        return cls.from_blocks(ids, block_q=1, block_k=1, visibility=visibility)

    @property
    def kind(self) -> str:
        """ "block" or "token": the granularity that dispatch looks up."""
        return "token" if self.block_k == 1 else "block"

    def bound_to(self, visibility: Visibility) -> Selection:
        """The same lists, tied to the call they are used in."""
        return replace(self, visibility=visibility)

    def tables(self) -> tuple[BlockTable, BlockTable]:
        """Block tables of the query axis (tiles) and of the key axis (blocks)."""
        visibility = self._visibility("tables")
        cu_q, cu_k = visibility.boundaries(self.ids.device)
        return (
            block_table(cu_q, visibility.query_length, self.block_q),
            block_table(cu_k, visibility.key_length, self.block_k),
        )

    def members(self, tiles: Tensor, blocks: int) -> Tensor:
        """Membership bits of some tiles: bool `[B, len(tiles), H_sel, blocks]`, by local block id.

        Ids outside `[0, blocks)` count as -1. `tiles` past the last list read an empty one.
        """
        batch, n_tiles, heads, _ = self.ids.shape
        ids = self.ids[:, tiles.clamp(max=max(n_tiles - 1, 0))].long()
        valid = (ids >= 0) & (ids < blocks) & (tiles < n_tiles)[None, :, None, None]
        bits = torch.zeros(batch, tiles.shape[0], heads, blocks + 1, dtype=torch.bool, device=ids.device)
        # invalid ids land in one surplus slot that is cut off
        bits.scatter_(3, torch.where(valid, ids, blocks), True)
        return bits[..., :blocks]

    def to_mask(self) -> Tensor:
        """Boolean mask `[B, H_sel, T_q, T_k]` of the selected AND visible pairs. For oracles: T_q x T_k memory."""
        visibility = self._visibility("to_mask")
        rows, keys = self.tables()
        bits = self.members(rows.of_token, keys.count)  # [B, T_q, H_sel, M]
        token_block = torch.where(keys.of_token < keys.count, keys.local[keys.of_token.clamp(max=keys.count - 1)], 0)
        mask = bits[..., token_block].transpose(1, 2)
        return mask & visibility.to_mask(self.ids.device)

    @property
    def density(self) -> Tensor:
        """Selected over visible (row, key) pairs, mean over batch and heads: fp64 scalar tensor; 1.0 if nothing is visible.

        Counted block by block, never T_q x T_k at once.
        """
        visibility = self._visibility("density")
        device = self.ids.device
        first, end = visibility.key_range(device)
        rows, keys = self.tables()
        batch, _, heads, n = self.ids.shape
        if keys.count == 0:
            return torch.ones((), dtype=torch.float64, device=device)
        ids = self.ids.long()
        selected = torch.zeros((), dtype=torch.float64, device=device)
        tile = rows.of_token
        n_tiles = self.ids.shape[1]
        row_sequence = rows.sequence[tile.clamp(max=max(rows.count - 1, 0))]
        base = keys.offset[row_sequence.clamp(max=keys.offset.shape[0] - 2)]
        limit = keys.offset[row_sequence.clamp(max=keys.offset.shape[0] - 2) + 1]
        for slot in range(n):
            block = ids[:, tile.clamp(max=max(n_tiles - 1, 0)), :, slot]  # [B, T_q, H_sel]
            place = base[None, :, None] + block
            valid = (block >= 0) & (place < limit[None, :, None]) & (tile < n_tiles)[None, :, None]
            place = place.clamp(0, max(keys.count - 1, 0))
            low = torch.maximum(keys.start[place], first[None, :, None])
            high = torch.minimum(keys.end[place], end[None, :, None])
            selected += torch.where(valid, (high - low).clamp(min=0), 0).sum()
        visible = (end - first).sum().double() * batch * heads
        return torch.where(visible > 0, selected / visible.clamp(min=1), 1.0)

    def transpose(self) -> TransposedSelection:
        """The lists read the other way: for each (batch, head, key block), the query tiles that selected it, ascending.

        A stable counting pass: the order of tiles in a list is fixed, so sums over it are repeatable.
        """
        rows, keys = self.tables()
        batch, n_tiles, heads, n = self.ids.shape
        device = self.ids.device
        tile = torch.arange(n_tiles, device=device)
        # surplus tiles read the padding
        sequence = torch.nn.functional.pad(rows.sequence, (0, 1))[tile.clamp(max=rows.count)]
        sequence = sequence.clamp(max=keys.offset.shape[0] - 2)
        ids = self.ids.long().permute(0, 2, 1, 3)  # [B, H_sel, n_q_tiles, n]
        block = keys.offset[sequence][None, None, :, None] + ids
        limit = keys.offset[sequence + 1][None, None, :, None]
        # past the last tile of the last sequence a list means nothing, whatever it holds
        valid = (ids >= 0) & (block < limit) & (tile < rows.offset[-1])[None, None, :, None]
        lists = batch * heads
        base = torch.arange(lists, device=device).view(batch, heads, 1, 1) * keys.count
        # one surplus bucket at the end takes the invalid entries
        bucket = torch.where(valid, base + block, lists * keys.count).reshape(-1)
        tiles = tile.view(1, 1, -1, 1).expand(batch, heads, n_tiles, n).reshape(-1)
        counts = torch.zeros(lists * keys.count + 1, dtype=torch.int64, device=device)
        counts.scatter_add_(0, bucket, torch.ones_like(bucket))
        order = torch.sort(bucket, stable=True).indices
        offsets = torch.cat([counts.new_zeros(1), counts[:-1].cumsum(0)])
        return TransposedSelection(tiles[order].to(torch.int32), offsets, batch, heads, keys.count)

    def check(self) -> Selection:
        """Check the values of the ids (reads them: synchronises with a GPU) and return self.

        Raises:
            ValueError: an id below -1 or past the last block of its sequence, an id twice in one list, or fewer tiles
                than the call has.
        """
        rows, keys = self.tables()
        needed = int(rows.offset[-1])
        n_tiles = self.ids.shape[1]
        if n_tiles < needed:
            raise ValueError(f"ids: expected at least {needed} query tiles of {self.block_q} rows, got {n_tiles}")
        ids = self.ids[:, :needed].long()
        sequence = rows.sequence[:needed]
        limit = (keys.offset[sequence + 1] - keys.offset[sequence])[None, :, None, None]
        bad = (ids < -1) | (ids >= limit)
        if bool(bad.any()):
            where = [int(x) for x in bad.nonzero()[0]]
            raise ValueError(
                f"ids: expected -1 or 0 .. {int(limit[0, where[1], 0, 0]) - 1} for query tile {where[1]}, "
                f"got {int(ids[tuple(where)])} at {where}"
            )
        ordered = ids.sort(-1).values
        twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
        if bool(twice.any()):
            where = [int(x) for x in twice.nonzero()[0]]
            raise ValueError(
                f"ids: expected each block once in a list, got {int(ordered[tuple(where)])} twice at {where[:3]}"
            )
        return self

    def _visibility(self, what: str) -> Visibility:
        if self.visibility is None:
            raise ValueError(
                f"visibility: {what} needs the call's lengths; use selection.bound_to(Visibility(T_q, T_k, ...))"
            )
        return self.visibility


@dataclass(frozen=True)
class TransposedSelection:
    """For each (batch, head, key block): the query tiles that selected it. CSR, ascending, memory O(selected).

    List of (b, h, m), m counted through the call: `tiles[offsets[i] : offsets[i+1]]`, `i = (b * heads + h) * blocks + m`.
    """

    tiles: Tensor  # int32 [B * n_q_tiles * H_sel * n]; what lies past offsets[-1] is unused
    offsets: Tensor  # int64 [B * H_sel * blocks + 1]
    batch: int
    heads: int
    blocks: int

    def list_of(self, batch: int, head: int, block: int) -> Tensor:
        """Query tiles that selected one block (reads two offsets: synchronises with a GPU)."""
        index = (batch * self.heads + head) * self.blocks + block
        return self.tiles[int(self.offsets[index]) : int(self.offsets[index + 1])]
