"""All that touches Gluon, whose interface is not stable: imports for the kernels, named barriers, the reduce-add copy.

Only this file names triton.experimental. Versions it was not tried with are refused (`unsupported`), and calls go to the
Triton path.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate

__all__ = [
    "TensorDescriptor",
    "aggregate",
    "barrier_arrive",
    "barrier_sync",
    "constexpr_function",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "shared_layout",
    "tma",
    "tma_reduce_add",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

KNOWN_VERSIONS = ("3.6",)


def unsupported() -> str | None:
    """Why this Triton cannot run the Hopper kernels; None: it can."""
    if triton.__version__.startswith(tuple(f"{version}." for version in KNOWN_VERSIONS)):
        return None
    return f"triton {triton.__version__} (kernels/hopper was written for {', '.join(KNOWN_VERSIONS)})"


def shared_layout(element_bits: int, rank: int) -> gl.NVMMASharedLayout:
    """The 128-byte swizzle, which both the tensor copies and the products read; rows of at least 128 bytes."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=element_bits, rank=rank)


# Barriers of the hardware by number. The compiler uses 0 to 4 (one for each group of warps of ours); 5 to 15 are free.
# Unlike an mbarrier arrival, an arrival here is made by each warp for itself: no barrier of the whole group before it.


@gluon.jit
def barrier_sync(number, threads):
    """Wait until `threads` threads, these included, have come to the barrier."""
    gl.inline_asm_elementwise(
        "bar.sync $1, $2; mov.b32 $0, 0;", "=r,r,r", [number, threads], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def barrier_arrive(number, threads):
    """Come to the barrier without waiting."""
    gl.inline_asm_elementwise(
        "bar.arrive $1, $2; mov.b32 $0, 0;", "=r,r,r", [number, threads], dtype=gl.int32, is_pure=False, pack=1
    )


@builtin
def tma_reduce_add(descriptor, coordinates, source, _semantic=None):
    """Add a shared tile to global memory by the copy engine (fp32; the order of two such adds is not fixed)."""
    from triton._C.libtriton import ir

    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, source.handle
    )
