"""Host side of the Hopper kernels: descriptors, order of work, launches. Nothing here reads a value from the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tilewise.kernels.hopper import plan
from tilewise.kernels.hopper.compat import TensorDescriptor, shared_layout
from tilewise.kernels.hopper.config import SPLIT_HEAD_DIM, forward_tiles, gradient_tiles, padded
from tilewise.kernels.hopper.forward import forward_kernel
from tilewise.kernels.hopper.key_gradient import key_gradient_kernel
from tilewise.kernels.hopper.query_gradient import query_gradient_kernel
from tilewise.kernels.triton.dense_forward import LOG2_E
from tilewise.kernels.triton.launch import describe_call
from tilewise.layout import Visibility
from tilewise.selection import Selection

HALF_LAYOUT = shared_layout(16, 4)
SINGLE_LAYOUT = shared_layout(32, 4)
L2_BUDGET = 32 * 2**20  # bytes of keys and values of heads that work side by side, when walks differ in length
LISTED_BLOCK = 64


@cache
def processors(index: int) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(index).multi_processor_count


def boxes(tensor: Tensor, rows: int, columns: int, layout=HALF_LAYOUT) -> TensorDescriptor:
    """Boxes of `rows` tokens x `columns` of one head of `[B, T, H, D]`; what lies past an end reads as zero."""
    shape, strides = list(tensor.shape), list(tensor.stride())
    # the stride of a dim of size 1 means nothing, but the copy engine wants it in whole 16 bytes
    strides = [stride if size > 1 else 16 for size, stride in zip(shape[:-1], strides[:-1], strict=True)] + [1]
    return TensorDescriptor(tensor, shape, strides, [1, rows, 1, columns], layout)


class WalkCall:
    """Everything about one call that is not a tensor of numbers."""

    def __init__(self, q, k, v, cu_q, cu_k, causal: bool, window: int, scale: float):
        self.batch, self.query_length, self.query_heads, self.d_k = q.shape
        self.key_length, self.kv_heads, self.d_v = k.shape[1], k.shape[2], v.shape[3]
        self.cu_q, self.cu_k, self.causal, self.scale = cu_q, cu_k, causal, scale
        self.window = min(window, max(self.key_length, 1))  # the kernels count in 32 bits
        self.packed = cu_q is not None
        self.itemsize = q.element_size()
        # what the portable prepare kernel wants to know: rows and head dims, no sequences
        self.portable = describe_call(q, k, v, None, None, causal, window, scale)
        self._plans: dict[tuple[int, bool, int], Tensor] = {}

    @property
    def group(self) -> int:
        return self.query_heads // self.kv_heads

    @property
    def clear(self) -> bool:
        """Whether a tile may hold tokens that no row of the call sees: of another sequence, padding, before the window."""
        return self.packed or (self.window > 0 and self.query_length < self.key_length)

    @property
    def clear_rows(self) -> bool:
        """The same of query tiles: rows that see nothing."""
        return self.packed or (self.causal and self.query_length > self.key_length)

    def section(self) -> int:
        """Query heads that work side by side: few share the cache best, many even out walks of unequal length."""
        if not self.causal:
            return self.group
        bytes_per_head = self.key_length * (self.d_k + self.d_v) * self.itemsize
        return max(1, L2_BUDGET // max(bytes_per_head, 1)) * self.group

    def visibility(self) -> Visibility:
        return Visibility(self.query_length, self.key_length, self.causal, self.window or None, self.cu_q, self.cu_k)

    def tiles_of(self, rows: int, key_side: bool, list_rows: int = 0) -> tuple[int, Tensor | None]:
        """Tiles of `rows` tokens (an upper bound for packed calls), and the plan of a packed call."""
        length = self.key_length if key_side else self.query_length
        if not self.packed:
            return -(-length // rows), None
        # lists and the kernels that walk them cut the same tiles
        key = (rows, key_side, list_rows)
        if key not in self._plans:
            self._plans[key] = plan.packed_plan(
                self.cu_q, self.cu_k, self.query_length, self.key_length, rows, key_side, self.causal, self.window,
                list_rows=list_rows,
            )  # fmt: skip
        table = self._plans[key]
        return table.shape[0] - 1, table


@dataclass(frozen=True)
class Lists:
    """The stored lists of a call, in the form that the kernels walk."""

    entries: Tensor
    counts: Tensor  # (masked steps, steps) of each list; transposed: where each list begins, one more at the end
    heads: int  # lists per batch and tile
    tiles: int  # lists per head
    block_q: int

    @classmethod
    def forward(cls, call: WalkCall, ids: Tensor | None, block_q: int) -> Lists | None:
        if ids is None:
            return None
        count, table = call.tiles_of(block_q, key_side=False)
        counts, entries = plan.list_plan(
            ids, call.query_length, call.key_length, block_q, call.causal, call.window, plan=table
        )
        return cls(entries, counts, ids.shape[2], count, block_q)

    @classmethod
    def transposed(cls, call: WalkCall, ids: Tensor | None, block_q: int) -> Lists | None:
        if ids is None:
            return None
        turned = Selection.from_blocks(ids, block_q=block_q, block_k=LISTED_BLOCK, visibility=call.visibility())
        lists = turned.transpose()
        return cls(lists.tiles, lists.offsets, lists.heads, lists.blocks, block_q)


def launch_forward(call: WalkCall, q, k, v, sink, out, lse, lists: Lists | None) -> None:
    """Fill `out` (contiguous) and `lse` [B, H_q, T_q]."""
    tiles = forward_tiles(call.d_k, call.d_v, call.causal, lists is not None, lists.block_q if lists else 0)
    split = call.d_k > 128
    columns, rest = (128, SPLIT_HEAD_DIM - 128) if split else (padded(call.d_k), 0)
    box = min(tiles.block_n, LISTED_BLOCK) if lists else tiles.block_n
    count, table = call.tiles_of(64 * tiles.groups, key_side=False)
    heads = call.batch * call.query_heads
    programs = min(processors(q.device.index), heads * count)
    q_boxes, k_boxes = boxes(q, 64, columns), boxes(k, box, columns)
    forward_kernel[(programs,)](
        q_boxes, boxes(q, 64, rest) if split else q_boxes, k_boxes, boxes(k, box, rest) if split else k_boxes,
        boxes(v, box, padded(call.d_v)), boxes(out, 64, padded(call.d_v)), out, lse,
        sink if sink is not None else lse, table if table is not None else lse,
        lists.counts if lists else lse, lists.entries if lists else lse,
        torch.zeros(1, dtype=torch.int32, device=q.device),
        heads, lists.tiles if lists else count, call.section(), call.query_length, call.key_length, call.window,
        lists.entries.shape[1] if lists else 0, call.scale * LOG2_E,
        H=call.query_heads, G=call.group, LIST_G=call.query_heads // lists.heads if lists else 1,
        D_K=columns, D_K2=rest, D_V=padded(call.d_v), D_V_TRUE=call.d_v, GROUPS=tiles.groups, BLOCK_N=tiles.block_n,
        STAGES=tiles.stages, CAUSAL=call.causal, WINDOW=call.window > 0, PACKED=call.packed, LIST=lists is not None,
        SINK=sink is not None, CLEAR=call.clear, TURNS=tiles.groups > 1,
        QREG=tiles.query_in_registers, CONSUMER_REGISTERS=tiles.registers, num_warps=4,
    )  # fmt: skip


def launch_query_gradient(call: WalkCall, q, k, v, dout, sink, statistics, dq, lists: Lists | None) -> None:
    """Fill `dq`."""
    tiles = gradient_tiles(call.d_k, call.d_v, lists is not None)
    d_k, d_v = padded(call.d_k), padded(call.d_v)
    groups = lists.block_q // 64 if lists else 2
    count, table = call.tiles_of(64 * groups, key_side=False)
    heads = call.batch * call.query_heads
    pointer = statistics.lse2
    query_gradient_kernel[(heads * count,)](
        boxes(q, 64, d_k), boxes(dout, 64, d_v), boxes(k, tiles.query_block_n, d_k), boxes(v, tiles.query_block_n, d_v),
        boxes(dq, 64, d_k), dq, statistics.lse2, statistics.delta, statistics.weight,
        table if table is not None else pointer, lists.counts if lists else pointer, lists.entries if lists else pointer,
        heads, lists.tiles if lists else count, call.section(), call.query_length, call.key_length, call.window,
        lists.entries.shape[1] if lists else 0, call.scale * LOG2_E, call.scale,
        H=call.query_heads, G=call.group, LIST_G=call.query_heads // lists.heads if lists else 1,
        D_K=d_k, D_V=d_v, D_TRUE=call.d_k, GROUPS=groups, BLOCK_N=tiles.query_block_n, STAGES=tiles.query_stages,
        CAUSAL=call.causal, WINDOW=call.window > 0, PACKED=call.packed, LIST=lists is not None, SINK=sink is not None,
        CLEAR=call.clear, num_warps=4,
    )  # fmt: skip


def launch_key_gradient(call: WalkCall, q, k, v, dout, sink, statistics, dk, dv, dq_total, lists: Lists | None) -> None:
    """Fill `dk` and `dv`; add the queries' gradient, without the scale, to `dq_total` (fp32) if there is one."""
    tiles = gradient_tiles(call.d_k, call.d_v, lists is not None)
    d_k, d_v = padded(call.d_k), padded(call.d_v)
    list_rows = lists.block_q if lists else 128
    count, table = call.tiles_of(64 if lists else 128, key_side=True, list_rows=lists.block_q if lists else 0)
    heads = call.batch * call.kv_heads
    rows = 64 if not lists else list_rows
    # a property of the length, not the length: two forms are compiled at most
    ragged = call.packed or call.query_length % (128 if lists else 64) != 0 or list_rows == 64
    pointer = statistics.lse2
    reduce = dq_total is not None
    dk_boxes = boxes(dk, 64, d_k)
    section = max(1, call.section() // call.group)
    key_gradient_kernel[(heads * count,)](
        boxes(q, rows, d_k), boxes(dout, rows, d_v), boxes(k, 64, d_k), boxes(v, 64, d_v), dk_boxes, boxes(dv, 64, d_v),
        boxes(dq_total, 64, d_k // 2, SINGLE_LAYOUT) if reduce else dk_boxes, dk, dv,
        statistics.lse2, statistics.delta, statistics.weight, table if table is not None else pointer,
        lists.counts if lists else pointer, lists.entries if lists else pointer,
        heads, lists.tiles if lists else count, section, call.query_length, call.key_length, call.window,
        call.scale * LOG2_E, call.scale,
        H_KV=call.kv_heads, G=call.group, LIST_HEADS=lists.heads if lists else 1, LIST_ROWS=list_rows,
        D_K=d_k, D_V=d_v, D_K_TRUE=call.d_k, D_V_TRUE=call.d_v, STAGES=tiles.key_stages,
        CAUSAL=call.causal, WINDOW=call.window > 0, PACKED=call.packed, LIST=lists is not None, SINK=sink is not None,
        CLEAR=call.clear_rows or (reduce and call.clear), RAGGED=ragged, REDUCE=reduce,
        DELAY=tiles.delay and not reduce, num_warps=4,
    )  # fmt: skip
