"""Which key blocks a query row may or may not use: the list side of a walk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.selection import Selection


def readable(x: Tensor) -> bool:
    """Whether reading a value is free. Elsewhere than on the CPU it would make the host wait for the device."""
    return x.device.type == "cpu"


@dataclass(frozen=True)
class Membership:
    """Block lists for the rows of a walk. A pair (row, key) counts if the key's block is in the list of the row's tile.

    Attributes:
        ids: int32 `[B, n_q_tiles, H_sel, n]`, H_sel in {1, H_kv, H_q}; -1, or any id outside `[0, blocks)`: no block.
        row_tile: int64 `[T_q]`, tile of each row; a tile past the last list reads an empty one.
        key_block: int64 `[T_k]`, block of each key in the numbering of the ids (local to the row's sequence).
        blocks: number of block ids, at least 1 + the largest in `key_block`.
        complement: a pair counts if the block is NOT in the list: what a remainder reads.
    """

    ids: Tensor
    row_tile: Tensor
    key_block: Tensor
    blocks: int
    complement: bool = False

    def of_rows(self, begin: int, stop: int) -> tuple[Tensor, Tensor]:
        """Bits of the rows `[begin, stop)`.

        Returns:
            `(bits, tile)`: bool `[B, tiles, H_sel, blocks]`, True where the block counts, and int64 `[stop - begin]`, the
            place of each row's tile in it.
        """
        row_tile = self.row_tile[begin:stop]
        if readable(row_tile):
            tiles, place = torch.unique_consecutive(row_tile, return_inverse=True)
        else:
            # one entry per row: counting the distinct tiles would synchronise with the device
            tiles, place = row_tile, torch.arange(stop - begin, device=row_tile.device)
        # members reads the lists alone: the block sizes play no part in it
        bits = Selection(self.ids, 1, 1).members(tiles, self.blocks)
        return (~bits if self.complement else bits), place

    def of_keys(self, bits: Tensor, begin: int, stop: int) -> Tensor:
        """Bits of the keys `[begin, stop)`: bool `[B, tiles, H_sel, stop - begin]`."""
        return bits[..., self.key_block[begin:stop].clamp(0, max(self.blocks - 1, 0))]


def hidden_pairs(bits: Tensor, place: Tensor, kv_heads: int) -> Tensor:
    """Turn key bits `[B, tiles, H_sel, C]` into hidden pairs, bool `[B, 1 or H_kv, 1 or G, R, C]`."""
    heads = bits.shape[2]
    pairs = ~bits[:, place].transpose(1, 2)  # [B, H_sel, R, C]
    return pairs.unflatten(1, (-1, max(1, heads // kv_heads)))
