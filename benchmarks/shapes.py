"""Which cases each operation measures."""

from __future__ import annotations

import math
import random

from benchmarks.case import Blocks, Case, Shape

DENSITIES = (0.05, 0.1, 0.2, 0.4)
BLOCK_K = 64
PACKED_TOTAL, PACKED_MEAN, SHORTEST, LONGEST = 32768, 2048, 256, 5000
SPREAD = 0.75  # below 1: lengths near both ends
LONG = 32768
# who is measured on dense calls where the other peers would take minutes, or that are there for a ratio only
RATIO_PEERS = ("hopper", "hopper-reduce", "triton", "cudnn")


def dense_cases(quick: bool, batch: int) -> list[Case]:
    """D 128 and 64, full and causal, 16 heads: T 16,384 and (unless quick) 4 x 4,096, and 32,768 with H 32/8, D 128."""
    shapes = [Shape(batch, 16384, 16, 16, dim, dim) for dim in (128, 64)]
    if not quick:
        shapes += [Shape(4 * batch, 4096, 16, 16, dim, dim) for dim in (128, 64)]
    cases = [Case("dense", shape, causal) for shape in shapes for causal in (False, True)]
    if not quick:
        grouped = Shape(batch, LONG, 32, 8, 128, 128)
        cases += [Case("dense", grouped, causal, implementations=RATIO_PEERS) for causal in (False, True)]
    return cases


def block_sparse_cases(quick: bool, batch: int) -> list[Case]:
    """Four densities of T 32,768, H 32/8: D 128 with tiles of 128 rows and (unless quick) of 64, D 64 with 128.

    The dense call of the same shape comes first.
    """
    cases = []
    for dim, tiles in ((128, (128,)),) if quick else ((128, (128, 64)), (64, (128,))):
        shape = Shape(batch, LONG, 32, 8, dim, dim)
        cases.append(Case("dense", shape, causal=False, implementations=("hopper", "cudnn")))
        cases += [
            Case("block_sparse", shape, causal=False, blocks=Blocks(rows, BLOCK_K, round(density * LONG / BLOCK_K)))
            for rows in tiles
            for density in DENSITIES
        ]
    return cases


def packed_cases(quick: bool, batch: int) -> list[Case]:
    """Sequences of mixed lengths, 32,768 tokens in all, causal; then one sequence of equal FLOPs, and 16 x 2,048.

    Raises:
        ValueError: a batch other than 1; `quick` changes nothing.
    """
    if batch != 1:
        raise ValueError(f"batch: expected 1 with packed sequences, got {batch}")
    lengths = packed_lengths(PACKED_TOTAL, PACKED_MEAN)
    equal = 128 * round(math.sqrt(sum(length**2 for length in lengths)) / 128)
    dense = ((1, equal), (PACKED_TOTAL // PACKED_MEAN, PACKED_MEAN))
    return [
        Case("packed", Shape(1, PACKED_TOTAL, 16, 16, 128, 128), causal=True, lengths=lengths),
        *(Case("dense", Shape(n, length, 16, 16, 128, 128), True, implementations=RATIO_PEERS) for n, length in dense),
    ]


def packed_lengths(total: int, mean: int) -> tuple[int, ...]:
    """`total // mean` lengths that add up to `total`, about 256 to 5,000; always the same ones."""
    generator = random.Random(0)
    # beta variates of this mean, spread over the whole range: many short sequences, a few long ones
    share = (mean - SHORTEST) / (LONGEST - SHORTEST)
    variates = [generator.betavariate(SPREAD, SPREAD * (1 - share) / share) for _ in range(total // mean)]
    drawn = [SHORTEST + (LONGEST - SHORTEST) * variate for variate in variates]
    lengths = [round(length * total / sum(drawn)) for length in drawn]
    lengths[-1] += total - sum(lengths)
    return tuple(lengths)
