"""Dense attention, forward: one program folds the key tiles that a query tile can see into its running softmax state.

    query [BLOCK_M, D_K] stays;  for each key tile:  S = Q K^T,  P = exp2(S - m),  O = O exp2(m_old - m) + P V

         keys ->   begin      full_begin              full_end     end
                   | masked   | no mask, no row bound | masked     |
Symbols: kernels/triton/tiles.py. Equations: docs/methods/dense.md.
"""

import torch
import triton
import triton.language as tl

from tilewise.kernels.triton.launch import Call, alignment_unit, device_of, strides_in_units
from tilewise.kernels.triton.tiles import keys_to_walk, load_rows, locate, tile_start

LOG2_E = 1.4426950408889634


@triton.jit
def _fold_tiles(
    accumulator, running_maximum, running_sum, query, k_base, v_base, stride_kt, stride_vt,
    begin, left, full_begin, full_end, steps, row_first, row_end, key_low, key_high, scale_log2,
    D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold the masked or the full key tiles into the state; row_first, row_end [BLOCK_M] bound what a row sees."""
    for step in tl.range(0, steps):
        start = tile_start(step, begin, left, full_begin, full_end, BLOCK_N, MASKED)
        key = load_rows(k_base, stride_kt, start, key_low, key_high, BLOCK_N, D_K, BLOCK_DK, MASKED)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if MASKED:
            index = start + tl.arange(0, BLOCK_N)
            visible = index[None, :] < row_end[:, None]
            if WINDOW:
                visible = visible & (index[None, :] >= row_first[:, None])
            scores = tl.where(visible, scores * scale_log2, float("-inf"))
            new_maximum = tl.maximum(running_maximum, tl.max(scores, 1))
            # a row that has seen nothing yet: 0 stands in, so that no inf - inf arises
            shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            probability = tl.exp2(scores - shift[:, None])
        else:
            new_maximum = tl.maximum(running_maximum, tl.max(scores, 1) * scale_log2)
            shift = new_maximum
            probability = tl.exp2(scores * scale_log2 - shift[:, None])
        rescale = tl.exp2(running_maximum - shift)
        running_sum = running_sum * rescale + tl.sum(probability, 1)
        accumulator = accumulator * rescale[:, None]
        value = load_rows(v_base, stride_vt, start, key_low, key_high, BLOCK_N, D_V, BLOCK_DV, MASKED)
        accumulator = tl.dot(probability.to(value.dtype), value, accumulator, input_precision=PRECISION)
        running_maximum = new_maximum
    return accumulator, running_maximum, running_sum


FORWARD_NOT_SPECIALISED = [
    "stride_qb", "stride_qt", "stride_qh", "stride_kb", "stride_kt", "stride_kh", "stride_vb", "stride_vt", "stride_vh",
    "sequences", "T_q", "T_k", "window", "tiles",
]  # fmt: skip


@triton.jit(do_not_specialize=FORWARD_NOT_SPECIALISED)
def dense_forward_kernel(
    q_ptr, k_ptr, v_ptr, sink_ptr, out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, tile_offset_ptr,
    stride_qb: tl.int64, stride_qt: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kt: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vt: tl.int64, stride_vh: tl.int64,
    sequences: tl.int32, T_q: tl.int32, T_k: tl.int32, window: tl.int32, tiles: tl.int32, scale_log2,
    H_Q: tl.constexpr, G: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr, SINK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tile = program % tiles
    head_index = program // tiles  # batch * H_Q + head
    batch = (head_index // H_Q).to(tl.int64)
    head = head_index % H_Q
    if CAUSAL and not PACKED:
        tile = tiles - 1 - tile  # longest first
    query_start, query_length, key_start, key_length, tile = locate(
        tile, T_q, T_k, sequences, cu_q_ptr, cu_k_ptr, tile_offset_ptr, PACKED, False
    )
    row_start = tile * BLOCK_M

    stride_qt = stride_qt * UNIT
    stride_kt = stride_kt * UNIT
    stride_vt = stride_vt * UNIT
    q_base = q_ptr + batch * (stride_qb * UNIT) + head * (stride_qh * UNIT) + query_start * stride_qt
    k_base = k_ptr + batch * (stride_kb * UNIT) + (head // G) * (stride_kh * UNIT) + key_start * stride_kt
    v_base = v_ptr + batch * (stride_vb * UNIT) + (head // G) * (stride_vh * UNIT) + key_start * stride_vt

    offset = key_length - query_length
    row = row_start + tl.arange(0, BLOCK_M)
    row_end = tl.full([BLOCK_M], 0, tl.int32) + key_length
    row_first = tl.full([BLOCK_M], 0, tl.int32)
    key_low = 0  # keys below it are seen by no row of the sequence
    if CAUSAL:
        row_end = tl.minimum(row_end, row + offset + 1)
    if WINDOW:
        row_first = row + offset - window + 1
        key_low = offset - window + 1

    query = load_rows(q_base, stride_qt, row_start, 0, query_length, BLOCK_M, D_K, BLOCK_DK, True)
    accumulator = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    running_maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    begin, left, full_begin, full_end, masked_steps = keys_to_walk(
        row_start, query_length, key_length, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N
    )
    accumulator, running_maximum, running_sum = _fold_tiles(
        accumulator, running_maximum, running_sum, query, k_base, v_base, stride_kt, stride_vt,
        begin, left, full_begin, full_end, masked_steps, row_first, row_end, key_low, key_length, scale_log2,
        D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_N, True, WINDOW, PRECISION,
    )  # fmt: skip
    accumulator, running_maximum, running_sum = _fold_tiles(
        accumulator, running_maximum, running_sum, query, k_base, v_base, stride_kt, stride_vt,
        begin, left, full_begin, full_end, (full_end - full_begin) // BLOCK_N, row_first, row_end, key_low, key_length,
        scale_log2, D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_N, False, WINDOW, PRECISION,
    )  # fmt: skip

    dead = running_sum == 0.0
    divisor = tl.where(dead, 1.0, running_sum)
    lse = tl.where(dead, float("-inf"), (running_maximum + tl.log2(divisor)) * 0.6931471805599453)
    share = 1.0 / divisor
    if SINK:
        sink = tl.load(sink_ptr + head)
        share = tl.where(dead, 0.0, share / (1.0 + tl.exp2((sink - lse) * 1.4426950408889634)))
    # a choice, not a product: 0 * NaN from a value of the same tile must not reach a dead row
    out = tl.where(dead[:, None], 0.0, accumulator * share[:, None])

    inside = row < query_length
    tl.store(lse_ptr + head_index.to(tl.int64) * T_q + query_start + row, lse, mask=inside)
    column = tl.arange(0, BLOCK_DV)
    out_row = (batch * T_q + query_start + row) * H_Q + head
    tl.store(
        out_ptr + out_row[:, None] * D_V + column[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=inside[:, None] & (column < D_V)[None, :],
    )


def launch_dense_forward(call: Call, q, k, v, sink, out, lse, tile_config) -> None:
    """Fill `out` [B, T_q, H_q, d_v] (contiguous) and `lse` [B, H_q, T_q] (fp32, natural log, contiguous)."""
    block_m = tile_config.block_m
    unit = alignment_unit(q, k, v)
    packing = call.packing(block_m, side="query")
    grid = (packing.tiles * call.batch * call.query_heads,)
    with device_of(q):
        dense_forward_kernel[grid](
            q, k, v, sink if sink is not None else lse, out, lse, packing.cu_q, packing.cu_k, packing.tile_offset,
            *strides_in_units(q, unit), *strides_in_units(k, unit), *strides_in_units(v, unit),
            packing.sequences, call.query_length, call.key_length, call.window or 0, packing.tiles, call.scale * LOG2_E,
            H_Q=call.query_heads, G=call.group, D_K=call.d_k, D_V=call.d_v,
            BLOCK_DK=call.block_dk, BLOCK_DV=call.block_dv, BLOCK_M=block_m, BLOCK_N=tile_config.block_n, UNIT=unit,
            CAUSAL=call.causal, WINDOW=call.window is not None, PACKED=call.packed, SINK=sink is not None,
            PRECISION=call.precision, num_warps=tile_config.warps, num_stages=tile_config.stages,
        )  # fmt: skip


def empty_outputs(call: Call, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs to fill: uninitialised, every element is written by the kernel."""
    out = torch.empty(call.batch, call.query_length, call.query_heads, call.d_v, dtype=q.dtype, device=q.device)
    lse = torch.empty(call.batch, call.query_heads, call.query_length, dtype=torch.float32, device=q.device)
    return out, lse
