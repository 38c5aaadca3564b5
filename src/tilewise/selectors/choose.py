"""From scores to lists: the rules that all block selectors share (docs/methods/block-sparse.md, section "Selection").

Block ids here count through the call (as rows of the block table) and become local to their sequence at the very end;
within a sequence both orders agree, so ties fall to the lower id either way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.layout import BlockTable, Visibility, block_table
from tilewise.selection import Selection
from tilewise.selectors.base import ROUNDING, BlockOptions

# elements of a [B, tiles, H_kv, M] piece of scores: 16 MiB in fp32
SCORE_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class TileTable:
    """Where each query tile of a call stands on the key axis. All tensors int64 `[n_tiles]`."""

    rows: BlockTable  # tiles of the query axis
    keys: BlockTable  # blocks of the key axis
    first: Tensor  # visible range [first, end) of the tile: the union of its rows' ranges
    end: Tensor  # first == end for a tile whose rows are all dead
    own_first: Tensor  # positions [own_first, own_end) of the tile's rows; may lie before the first key (T_q > T_k)
    own_end: Tensor
    key_start: Tensor  # first key of the tile's sequence
    sequence: Tensor  # the tile's sequence, safe for indexing


def tile_table(visibility: Visibility, block_q: int, block_k: int, device: torch.device) -> TileTable:
    """Place the query tiles of a call; no host synchronisation."""
    cu_q, cu_k = visibility.boundaries(device)
    rows = block_table(cu_q, visibility.query_length, block_q)
    keys = block_table(cu_k, visibility.key_length, block_k)
    # one more row, dead: a call without queries has something to index
    row_first, row_end = (torch.nn.functional.pad(x, (0, 1)) for x in visibility.key_range(device))
    sequences = cu_q.shape[0] - 1
    sequence = rows.sequence.clamp(max=max(sequences - 1, 0))
    inside = rows.end > rows.start
    last_row = max(visibility.query_length - 1, 0)
    head, tail = rows.start.clamp(max=last_row), (rows.end - 1).clamp(0, last_row)
    first = row_first[head]
    end = torch.where(inside, torch.maximum(row_end[tail], first), first)
    shift = cu_k[sequence + 1] - cu_q[sequence + 1]  # bottom-right: row t stands at t + shift on the call's key axis
    return TileTable(rows, keys, first, end, rows.start + shift, rows.end + shift, cu_k[sequence], sequence)


def choose_blocks(
    options: BlockOptions,
    visibility: Visibility,
    batch: int,
    kv_heads: int,
    device: torch.device,
    score: Callable[[TileTable, slice], Tensor],
    score_elements_per_tile: int = 0,
) -> Selection:
    """Rank the candidate blocks of every tile by `score` and keep what the budget allows.

    Args:
        options: budget, forced blocks, block sizes.
        visibility: of the call.
        batch: B.
        kv_heads: H_kv; the query heads of a group share a list.
        device: of the scores.
        score: `score(tiles, piece)` gives fp32 scores `[B, len(piece), H_kv, M]` of the tiles in the slice; what it
            says about blocks that are no candidates is ignored, NaN ranks last.
        score_elements_per_tile: scratch elements that `score` needs for a tile, where more than its result.

    Returns:
        Selection with ids int32 `[B, n_tiles, H_kv, n]`, ascending, -1 on the right.
    """
    tiles = tile_table(visibility, options.block_q, options.block_k, device)
    count, n = tiles.rows.count, options.slots(visibility)
    ids = torch.full((batch, count, kv_heads, n), -1, dtype=torch.int32, device=device)
    if n == 0 or count == 0 or batch == 0 or visibility.query_length == 0:
        return Selection.from_blocks(ids, block_q=options.block_q, block_k=options.block_k, visibility=visibility)
    per_tile = max(batch * kv_heads * tiles.keys.count, score_elements_per_tile, 1)
    step = max(1, SCORE_ELEMENTS // per_tile)
    for begin in range(0, count, step):
        piece = slice(begin, min(begin + step, count))
        ids[:, piece] = keep_best(options, tiles, piece, score(tiles, piece), n)
    return Selection.from_blocks(ids, block_q=options.block_q, block_k=options.block_k, visibility=visibility)


def keep_best(options: BlockOptions, tiles: TileTable, piece: slice, scores: Tensor, n: int) -> Tensor:
    """ids int32 `[B, tiles, H_kv, n]` of some tiles: overlapping and forced blocks, then the best candidates."""
    keys = tiles.keys
    first, end = tiles.first[piece, None], tiles.end[piece, None]
    own_first, own_end = tiles.own_first[piece, None], tiles.own_end[piece, None]
    # [tiles, M]; ranges never leave the tile's sequence, and an empty one may lie inside a block
    visible = (keys.start < end) & (keys.end > first) & (end > first)
    overlapping = visible & (keys.start < own_end) & (keys.end > own_first)
    candidate = visible & ~overlapping  # causal: these all end at or before own_first
    own_block = (own_first - tiles.key_start[piece, None]).clamp(min=0) // options.block_k
    forced = (keys.local < options.initial) | ((keys.local < own_block) & (keys.local >= own_block - options.local))
    forced = candidate & forced
    kept = overlapping.sum(1) + forced.sum(1)
    if options.blocks is not None:
        quota = overlapping.sum(1) + options.blocks
    else:
        share = torch.ceil(visible.sum(1).double() * (options.density or 1.0) - ROUNDING).long()
        quota = torch.maximum(share, kept)

    limit = torch.finfo(torch.float32)
    # finite for candidates, so that only blocks that are none of them rank at -inf
    rank = scores.float().nan_to_num(nan=limit.min, posinf=limit.max, neginf=limit.min)
    rank = rank.clamp(limit.min, limit.max).masked_fill(~candidate[None, :, None], float("-inf"))
    rank = rank.masked_fill((overlapping | forced)[None, :, None], float("inf"))
    value, block = torch.sort(rank, dim=-1, descending=True, stable=True)  # stable: ties to the lower id
    value, block = value[..., :n], block[..., :n]
    slot = torch.arange(value.shape[-1], device=value.device)
    taken = (value > float("-inf")) & (slot < quota[None, :, None, None])
    local = block - keys.offset[tiles.sequence[piece]][None, :, None, None]
    local = torch.where(taken, local, keys.count).sort(-1).values
    local = torch.where(local < keys.count, local, -1).to(torch.int32)
    return torch.nn.functional.pad(local, (0, n - local.shape[-1]), value=-1)
