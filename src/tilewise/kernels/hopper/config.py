"""Default tiles of the Hopper kernels and what they cover: fixed, by head dims and causality; chosen by measurement
(docs/log.md) and by the compiler's report (tests/aot). No autotuning."""

from __future__ import annotations

from dataclasses import dataclass

SPLIT_HEAD_DIM = 192  # d_k = 128 + 64, without padding to 256


@dataclass(frozen=True)
class ForwardTiles:
    groups: int  # consumer groups of 64 rows
    block_n: int
    stages: int
    registers: int  # of a consumer thread
    query_in_registers: bool = False


@dataclass(frozen=True)
class GradientTiles:
    query_block_n: int
    query_stages: int
    key_stages: int
    delay: bool  # a tile's dV and dK products run under the next tile's exponentials


def backward_covers(d_k: int, d_v: int) -> bool:
    """Head dims of the backward; others take the portable kernels."""
    return max(d_k, d_v) <= 128


def padded(head_dim: int) -> int:
    """What a kernel works on: 64 or 128 columns; the copy engine fills those past the tensor with zeros."""
    return 64 if head_dim <= 64 else 128


def forward_tiles(d_k: int, d_v: int, causal: bool, listed: bool, block_q: int) -> ForwardTiles:
    """Tiles of one call; `listed` walks need pairs of 64-key blocks, and as many rows as the lists' tiles."""
    if d_k > 128:
        return ForwardTiles(2, 64, 2, 240)
    if listed and block_q == 64:
        return ForwardTiles(1, 128, 2, 240)
    if padded(d_k) == 128 or padded(d_v) == 128:
        return ForwardTiles(2, 128, 2, 240, query_in_registers=causal)
    return ForwardTiles(2, 128, 3, 240) if listed else ForwardTiles(3, 128, 2, 160)


def gradient_tiles(d_k: int, d_v: int, listed: bool) -> GradientTiles:
    narrow = padded(d_k) == 64 and padded(d_v) == 64
    if listed:
        return GradientTiles(64, 4 if narrow else 3, 3, narrow)
    return GradientTiles(128 if narrow else 64, 3, 3, narrow)
