"""Host side of the dense kernels: what a launch needs to know, without reading one value from the device."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from tilewise.layout import safe_boundaries

INTERPRETED = triton.knobs.runtime.interpret
SMALLEST_DOT = 16  # tl.dot needs 16 in every dimension
WIDEST_LOAD = 8  # elements


@dataclass(frozen=True)
class Packing:
    """Device lists that map flat tiles to sequences; the last "sequence" is the tail past cu_seqlens[-1]."""

    tiles: int  # per head: exact for one sequence, an upper bound for packed ones
    sequences: int
    cu_q: Tensor  # int64 [sequences + 1]
    cu_k: Tensor
    tile_offset: Tensor  # int64 [sequences + 1] tiles before each sequence


@dataclass(frozen=True)
class Call:
    """Everything about one dense call that is not a tensor of numbers."""

    batch: int
    query_length: int
    key_length: int
    query_heads: int
    kv_heads: int
    d_k: int
    d_v: int
    causal: bool
    window: int | None
    scale: float
    precision: str
    cu_q: Tensor | None  # int64 [N+2], safe, with the tail
    cu_k: Tensor | None
    placeholder: Tensor  # stands for an absent pointer

    @property
    def group(self) -> int:
        return self.query_heads // self.kv_heads

    @property
    def packed(self) -> bool:
        return self.cu_q is not None

    @property
    def block_dk(self) -> int:
        return padded_head_dim(self.d_k)

    @property
    def block_dv(self) -> int:
        return padded_head_dim(self.d_v)

    def packing(self, block: int, side: str) -> Packing:
        """Cut the query or the key side into tiles of `block` rows that restart at each sequence."""
        length = self.query_length if side == "query" else self.key_length
        if self.cu_q is None or self.cu_k is None:
            empty = self.placeholder
            return Packing(triton.cdiv(length, block), 1, empty, empty, empty)
        boundaries = self.cu_q if side == "query" else self.cu_k
        sequences = boundaries.shape[0] - 1
        blocks = (boundaries[1:] - boundaries[:-1] + block - 1) // block
        tile_offset = torch.cat([blocks.new_zeros(1), blocks.cumsum(0)])
        return Packing(length // block + sequences, sequences, self.cu_q, self.cu_k, tile_offset)


def padded_head_dim(head_dim: int) -> int:
    """What a kernel works on: the next power of two, at least 16."""
    # not triton.next_power_of_2: that one goes through the compiler's wrappers and costs microseconds a call
    return max(SMALLEST_DOT, 1 << (head_dim - 1).bit_length())


def describe_call(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, causal: bool, window: int, scale: float
) -> Call:
    """Gather a Call. `cu_q`, `cu_k`: cu_seqlens, int32 [N+1]; `window` 0 means none."""
    batch, query_length, query_heads, d_k = q.shape
    key_length, kv_heads, d_v = k.shape[1], v.shape[2], v.shape[3]
    # a window of T_k keys hides nothing more; the kernels count in 32 bits
    window = min(window, max(key_length, 1))
    return Call(
        batch, query_length, key_length, query_heads, kv_heads, d_k, d_v, causal, window or None, scale,
        precision="ieee" if q.dtype == torch.float32 else "tf32",
        cu_q=None if cu_q is None else _with_tail(cu_q, query_length),
        cu_k=None if cu_k is None else _with_tail(cu_k, key_length),
        placeholder=q,
    )  # fmt: skip


def _with_tail(cu_seqlens: Tensor, length: int) -> Tensor:
    """int64 boundaries in [0, length] that never fall, ending with `length`: a bad list on a GPU reads nothing outside."""
    boundaries = safe_boundaries(cu_seqlens, length)
    return torch.cat([boundaries, boundaries.new_full((1,), length)])


def alignment_unit(*tensors: Tensor) -> int:
    """Largest of 8, 4, 2, 1 elements that divides every stride: strides are passed in this unit, as a hint of alignment.

    8 elements of two bytes are the 16 bytes of the widest load.
    """
    return math.gcd(WIDEST_LOAD, *(stride for tensor in tensors for stride in tensor.stride()[:3]))


def strides_in_units(tensor: Tensor, unit: int) -> tuple[int, int, int]:
    """Batch, token and head stride of `[B, T, H, D]`, in units of `unit` elements."""
    batch, token, head = tensor.stride()[:3]
    return batch // unit, token // unit, head // unit


def device_of(tensor: Tensor) -> contextlib.AbstractContextManager:
    """Launch on the tensor's own device, whichever is current."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
