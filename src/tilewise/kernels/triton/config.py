"""Default tiles of the dense kernels: fixed, by head dim, element size and shared memory of the device.

No autotuning: these were chosen by measurement (docs/log.md) and by the compiler's own report (no spills; tests/aot).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewise.kernels.triton.launch import INTERPRETED, padded_head_dim


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


# keyed by (element size, largest head dim rounded up to a power of two, causal)
Table = dict[tuple[int, int, bool], DenseTiles]

SINGLE_PRECISION: Table = {
    # products on the vector units: fp32 is exact there, and the tensor cores' tf32 is not
    (4, dim, causal): tiles
    for causal in (False, True)
    for dim, tiles in {
        64: DenseTiles(Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1)),
        128: DenseTiles(Tiles(32, 16, 8, 1), Tiles(32, 16, 8, 1), Tiles(16, 32, 8, 1)),
        256: DenseTiles(Tiles(32, 16, 8, 1), Tiles(32, 16, 8, 1), Tiles(16, 16, 8, 1)),
    }.items()
}
SM90: Table = SINGLE_PRECISION | {
    (2, 64, False): DenseTiles(Tiles(64, 128, 4, 3), Tiles(64, 128, 4, 2), Tiles(64, 64, 4, 2)),
    (2, 64, True): DenseTiles(Tiles(64, 128, 4, 3), Tiles(64, 128, 4, 2), Tiles(64, 64, 4, 2)),
    (2, 128, False): DenseTiles(Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 3), Tiles(32, 128, 8, 3)),
    (2, 128, True): DenseTiles(Tiles(128, 64, 8, 4), Tiles(128, 64, 8, 3), Tiles(32, 128, 8, 3)),
    (2, 256, False): DenseTiles(Tiles(128, 32, 8, 2), Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 2)),
    (2, 256, True): DenseTiles(Tiles(128, 32, 8, 2), Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 2)),
}
# columns past the head dim are masked, which takes registers
SM90_PADDED: Table = SM90 | {
    (2, 64, causal): DenseTiles(Tiles(64, 128, 4, 3), Tiles(64, 64, 4, 3), Tiles(32, 64, 4, 3))
    for causal in (False, True)
}
# every other card: within 99 KiB of shared memory, the least that those since Ampere give a block
PORTABLE: Table = SINGLE_PRECISION | {
    (size, dim, causal): tiles
    for causal in (False, True)
    for (size, dim), tiles in {
        (2, 64): DenseTiles(Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(32, 64, 4, 2)),
        (2, 128): DenseTiles(Tiles(64, 64, 4, 2), Tiles(64, 64, 8, 2), Tiles(32, 64, 8, 2)),
        (2, 256): DenseTiles(Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 2), Tiles(32, 32, 8, 2)),
        (4, 256): DenseTiles(Tiles(32, 16, 8, 1), Tiles(16, 16, 8, 1), Tiles(16, 32, 8, 1)),
    }.items()
}
SHARED_MEMORY_LIMIT = {90: 227 * 1024, 80: 99 * 1024}
INTERPRETER = DenseTiles(Tiles(32, 16, 1, 1), Tiles(32, 16, 1, 1), Tiles(16, 32, 1, 1))


def dense_tiles(dtype: torch.dtype, d_k: int, d_v: int, causal: bool, device: torch.device) -> DenseTiles:
    """Tiles for one call; INTERPRETER when the kernels run on the CPU."""
    if INTERPRETED or device.type != "cuda":
        return INTERPRETER
    return choose_tiles(dtype, d_k, d_v, causal, hopper=torch.cuda.get_device_capability(device) == (9, 0))


def choose_tiles(dtype: torch.dtype, d_k: int, d_v: int, causal: bool, hopper: bool) -> DenseTiles:
    """The tables' entry for a call on Hopper (sm_90) or on any other card."""
    widest = padded_head_dim(max(64, d_k, d_v))
    padded = padded_head_dim(d_k) != d_k or padded_head_dim(d_v) != d_v
    table = (SM90_PADDED if padded else SM90) if hopper else PORTABLE
    return table[dtype.itemsize, widest, causal]
