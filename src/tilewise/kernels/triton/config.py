"""Default tiles of the dense kernels: fixed, by head dim, element size and shared memory of the device.

No autotuning: these were chosen by measurement (docs/log.md) and by the compiler's own report (no spills; tests/aot).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewise.kernels.triton.launch import INTERPRETED


@dataclass(frozen=True)
class Tiles:
    block_m: int  # query rows
    block_n: int  # keys
    warps: int
    stages: int


@dataclass(frozen=True)
class DenseTiles:
    forward: Tiles
    query_gradient: Tiles
    key_gradient: Tiles


# keyed by (family, element size, largest head dim rounded up to a power of two)
SM90 = {
    (2, 64): DenseTiles(Tiles(128, 128, 8, 3), Tiles(128, 64, 8, 3), Tiles(64, 128, 8, 3)),
    (2, 128): DenseTiles(Tiles(128, 128, 8, 2), Tiles(128, 64, 8, 3), Tiles(64, 128, 8, 2)),
    (2, 256): DenseTiles(Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 1), Tiles(64, 64, 8, 1)),
    (4, 64): DenseTiles(Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1)),
    (4, 128): DenseTiles(Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1)),
    (4, 256): DenseTiles(Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1)),
}
# 99 KiB of shared memory a block: what the smallest of the cards before and beside Hopper gives
PORTABLE = {
    (2, 64): DenseTiles(Tiles(128, 64, 4, 2), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
    (2, 128): DenseTiles(Tiles(128, 64, 8, 2), Tiles(64, 32, 4, 2), Tiles(32, 64, 4, 2)),
    (2, 256): DenseTiles(Tiles(64, 32, 4, 1), Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1)),
    (4, 64): SM90[4, 64],
    (4, 128): SM90[4, 128],
    (4, 256): SM90[4, 256],
}
INTERPRETER = DenseTiles(Tiles(32, 16, 1, 1), Tiles(32, 16, 1, 1), Tiles(16, 32, 1, 1))


def dense_tiles(dtype: torch.dtype, block_dk: int, block_dv: int, device: torch.device) -> DenseTiles:
    """Tiles for one call; INTERPRETER when the kernels run on the CPU."""
    if INTERPRETED or device.type != "cuda":
        return INTERPRETER
    table = SM90 if torch.cuda.get_device_capability(device) == (9, 0) else PORTABLE
    return table[dtype.itemsize, max(64, block_dk, block_dv)]
