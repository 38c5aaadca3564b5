"""The list of key tiles that each chunk of query rows visits.

On the CPU the ranges are read, so that tiles which no row of the chunk sees are left out and masks live on boundary tiles
only. On other devices nothing is read (no host synchronisation): every tile is visited and masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.eager.membership import Membership, hidden_pairs, readable

# logits held at once, all heads of one tile: 4 MiB in fp32, about the cache that a CPU core shares
TILE_ELEMENTS = 1 << 20
KEYS_PER_TILE = 512
# narrower under block lists: fewer unselected keys ride along
KEYS_PER_LISTED_TILE = 128
LEAST_ROWS, MOST_ROWS = 16, 256


@dataclass(frozen=True)
class Chunk:
    """Query rows `[begin, stop)` and the keys `[low, high)` that they may see."""

    begin: int
    stop: int
    low: int
    high: int
    inner_low: int  # keys of [inner_low, inner_high) are seen by every row of the chunk
    inner_high: int


@dataclass(frozen=True)
class KeyTile:
    """Keys `[begin, stop)` and the pairs to hide: bool, broadcast to `[B, H_kv, G, R, C]`; None: every pair counts."""

    begin: int
    stop: int
    hidden: Tensor | None


def row_chunks(first: Tensor, end: Tensor, keys: int, batch_heads: int, listed: bool) -> Iterator[Chunk]:
    """Cut the query rows into chunks. `batch_heads` is B * H_q."""
    rows = first.shape[0]
    width = KEYS_PER_LISTED_TILE if listed else KEYS_PER_TILE
    step = min(MOST_ROWS, max(LEAST_ROWS, TILE_ELEMENTS // max(1, batch_heads * width)))
    for begin in range(0, rows, step):
        stop = min(begin + step, rows)
        if not readable(first):
            yield Chunk(begin, stop, 0, keys, 0, 0)
            continue
        part_first, part_end = first[begin:stop], end[begin:stop]
        live = part_end > part_first
        low = int(torch.where(live, part_first, keys).min())
        high = int(torch.where(live, part_end, 0).max())
        # a dead row has first == end, so that no key is seen by every row
        inner_low, inner_high = int(part_first.max()), int(part_end.min())
        yield Chunk(begin, stop, max(low, 0), min(high, keys), inner_low, inner_high)


def key_tiles(
    chunk: Chunk, first: Tensor, end: Tensor, kv_heads: int, membership: Membership | None
) -> Iterator[KeyTile]:
    """The key tiles of one chunk, ascending, with their masks."""
    width = KEYS_PER_TILE if membership is None else KEYS_PER_LISTED_TILE
    bits = place = needed = None
    if membership is not None and chunk.low < chunk.high:
        bits, place = membership.of_rows(chunk.begin, chunk.stop)
        if readable(first):
            needed = bits.flatten(0, 2).any(0)  # [blocks]
    for begin in range(chunk.low, chunk.high, width):
        stop = min(begin + width, chunk.high)
        hidden = None
        if not (chunk.inner_low <= begin and stop <= chunk.inner_high):
            key = torch.arange(begin, stop, device=first.device)
            low, high = first[chunk.begin : chunk.stop, None], end[chunk.begin : chunk.stop, None]
            hidden = (key < low) | (key >= high)
        if membership is not None and bits is not None and place is not None:
            if needed is not None and not bool(membership.of_keys(needed, begin, stop).any()):
                continue
            listed = hidden_pairs(membership.of_keys(bits, begin, stop), place, kv_heads)
            hidden = listed if hidden is None else listed | hidden
        yield KeyTile(begin, stop, hidden)


def unseen_keys(first: Tensor, end: Tensor, keys: int) -> Tensor | None:
    """bool `[T_k]`, True where no row of the call sees the key; None where every key is seen (known on the CPU only)."""
    live = end > first
    steps = torch.zeros(keys + 1, dtype=torch.int64, device=first.device)
    # +1 where a range starts, -1 where it ends: the running sum counts the rows that see a key
    steps.scatter_add_(0, first.clamp(0, keys), live.long())
    steps.scatter_add_(0, end.clamp(0, keys), -live.long())
    unseen = steps.cumsum(0)[:keys] == 0
    if readable(unseen) and not bool(unseen.any()):
        return None
    return unseen
