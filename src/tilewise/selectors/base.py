"""What a selector is, and the options that block selectors share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor

from tilewise.layout import Visibility
from tilewise.selection import Selection


@dataclass(frozen=True)
class SelectorCard:
    """What a selector promises; dispatch, documentation and the law tests read it."""

    name: str
    granularity: str  # "block" or "token": what its ids count; "given": whatever the caller's ids count
    causality: str  # "token": changing a token touches no earlier output; "tile": none before the token's query tile
    cost: str  # work beyond the exact part, per head


@runtime_checkable
class Selector(Protocol):
    """Two members: the choice, and the card."""

    card: ClassVar[SelectorCard]

    def select(self, q: Tensor, k: Tensor, visibility: Visibility, scale: float) -> Selection:
        """Choose the key blocks that each query tile computes exactly; no gradient passes through the choice.

        Args:
            q: `[B, T_q, H_q, d_k]`.
            k: `[B, T_k, H_kv, d_k]`.
            visibility: which keys each row of the call may see.
            scale: factor of the logits.

        Returns:
            A `Selection` bound to `visibility`.
        """
        ...


@dataclass(frozen=True)
class BlockOptions:
    """Options of every selector that ranks key blocks for tiles of query rows.

    Every block that overlaps the tile's own positions is selected; the budget is about the others.

    Args:
        blocks: number of blocks per tile besides those that overlap the tile; forced ones count within it.
        density: instead of `blocks`: share in (0, 1] of the tile's visible blocks to select, rounded up; overlapping
            and forced blocks count within it, and are selected even where they exceed it.
        block_q: query rows per tile; 1 makes a list per token.
        block_k: tokens per key block.
        initial: number of blocks at the start of the sequence that are always selected.
        local: number of blocks just before the overlapping ones that are always selected.

    Raises:
        ValueError: both or none of `blocks` and `density`, a value out of range, or `blocks < initial + local`.
        TypeError: a count that is not an int.
    """

    blocks: int | None = None
    density: float | None = None
    block_q: int = 64
    block_k: int = 64
    initial: int = 1
    local: int = 1

    def __post_init__(self) -> None:
        if (self.blocks is None) == (self.density is None):
            got = "none" if self.blocks is None else f"blocks={self.blocks}, density={self.density}"
            raise ValueError(f"blocks, density: expected exactly one of the two, got {got}; for example density=0.1")
        require_count("block_q", self.block_q, 1)
        require_count("block_k", self.block_k, 1)
        require_count("initial", self.initial, 0)
        require_count("local", self.local, 0)
        if self.blocks is not None:
            require_count("blocks", self.blocks, 0)
            forced = self.initial + self.local
            if self.blocks < forced:
                raise ValueError(
                    f"blocks: expected at least initial + local = {forced}, which count within it, got {self.blocks}; "
                    f"use blocks={forced} or fewer forced blocks"
                )
        if self.density is not None:
            if isinstance(self.density, bool) or not isinstance(self.density, (int, float)):
                raise TypeError(f"density: expected a float in (0, 1], got {type(self.density).__name__}")
            if not 0.0 < self.density <= 1.0:
                raise ValueError(f"density: expected a value in (0, 1], got {self.density}")

    def slots(self, visibility: Visibility) -> int:
        """Width n of the id lists: an upper bound from Python numbers alone, so that no tensor has to be read."""
        blocks = -(-visibility.key_length // self.block_k)
        overlapping = self.most_overlapping(visibility)
        if self.blocks is not None:
            return min(blocks, self.blocks + overlapping)
        share = math.ceil((self.density or 1.0) * blocks - ROUNDING)
        return min(blocks, max(share, self.initial + self.local + overlapping))

    def most_overlapping(self, visibility: Visibility) -> int:
        """The most key blocks that the positions of one query tile can touch."""
        offset = visibility.key_length - visibility.query_length
        if not visibility.packed:
            if self.block_q % self.block_k == 0 and offset % self.block_k == 0:
                return self.block_q // self.block_k
            if self.block_k % self.block_q == 0 and offset % self.block_q == 0:
                return 1
        return (self.block_q + self.block_k - 2) // self.block_k + 1


# density * blocks may land a rounding error above a whole number; ceil must not add a block for it
ROUNDING = 1e-9


def require_count(name: str, value: int, least: int) -> None:
    """Raise unless value is an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")
