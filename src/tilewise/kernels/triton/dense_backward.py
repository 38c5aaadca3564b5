"""Dense attention, backward, without atomics: three kernels, each output element written by one program in a fixed order.

    prepare        per row:  lse in base 2, delta = w rowsum(dO O) - dLSE, sink weight w, sink gradient; zero dQ of dead rows
    query gradient per query tile, over its key tiles:    dQ += dS K
    key gradient   per key tile, over the G heads and their query tiles, transposed:  dV += P^T dO,  dK += dS^T Q

    P = exp(S - lse)  (without the sink),  w = sigmoid(lse - sink)  (1 without one),  dS = P (w dO V^T - delta)
The form with w <= 1 never overflows, unlike exp(lse_tot - lse). Symbols: kernels/triton/tiles.py; docs/methods/dense.md.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tilewise.kernels.triton.dense_forward import LOG2_E
from tilewise.kernels.triton.launch import Call, alignment_unit, device_of, strides_in_units
from tilewise.kernels.triton.tiles import (
    keys_to_walk,
    load_rows,
    locate,
    queries_to_walk,
    tile_start,
)

PREPARE_ELEMENTS = 8192  # of out and of dout, held by one program


@triton.jit(do_not_specialize=["stride_gb", "stride_gt", "stride_gh", "rows", "T_q"])
def prepare_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, sink_ptr, lse2_ptr, delta_ptr, weight_ptr, dsink_ptr, dq_ptr,
    stride_gb: tl.int64, stride_gt: tl.int64, stride_gh: tl.int64, rows: tl.int64, T_q: tl.int32,
    H_Q: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK: tl.constexpr, UNIT: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """Rows are numbered as lse is stored, [B, H_Q, T_q]; out is [B, T_q, H_Q, D_V] contiguous, dout strided."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    token = row % T_q
    head = (row // T_q) % H_Q
    batch = row // T_q // H_Q
    column = tl.arange(0, BLOCK_DV)
    mask = inside[:, None] & (column < D_V)[None, :]
    out_row = (batch * T_q + token) * H_Q + head
    out = tl.load(out_ptr + out_row[:, None] * D_V + column[None, :], mask=mask, other=0.0).to(tl.float32)
    dout_row = (batch * stride_gb + token * stride_gt + head * stride_gh) * UNIT
    dout = tl.load(dout_ptr + dout_row[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + row, mask=inside, other=float("-inf"))
    dlse = tl.load(dlse_ptr + row, mask=inside, other=0.0)
    dead = lse == float("-inf")
    delta = tl.sum(out * dout, 1)
    if SINK:
        sink = tl.load(sink_ptr + head, mask=inside, other=0.0)
        weight = 1.0 / (1.0 + tl.exp2((sink - lse) * 1.4426950408889634))
        sink_share = 1.0 / (1.0 + tl.exp2((lse - sink) * 1.4426950408889634))
        tl.store(weight_ptr + row, tl.where(dead, 0.0, weight), mask=inside)
        tl.store(dsink_ptr + row, tl.where(dead, 0.0, -sink_share * delta), mask=inside)
        delta = delta * weight
    # +inf makes exp2(s - lse2) zero on dead rows, without a test in the inner loops
    tl.store(lse2_ptr + row, tl.where(dead, float("inf"), lse * 1.4426950408889634), mask=inside)
    tl.store(delta_ptr + row, tl.where(dead, 0.0, delta - dlse), mask=inside)
    k_column = tl.arange(0, BLOCK_DK)
    tl.store(
        dq_ptr + out_row[:, None] * D_K + k_column[None, :],
        tl.zeros([BLOCK, BLOCK_DK], dq_ptr.dtype.element_ty),
        mask=(inside & dead)[:, None] & (k_column < D_K)[None, :],
    )


@triton.jit
def _add_query_gradient(
    dquery, query, dout, lse2, delta, weight, k_base, v_base, stride_kt, stride_vt,
    begin, left, full_begin, full_end, steps, row_first, row_end, key_low, key_high, scale_log2,
    D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, SINK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for step in tl.range(0, steps):
        start = tile_start(step, begin, left, full_begin, full_end, BLOCK_N, MASKED)
        key = load_rows(k_base, stride_kt, start, key_low, key_high, BLOCK_N, D_K, BLOCK_DK, MASKED)
        value = load_rows(v_base, stride_vt, start, key_low, key_high, BLOCK_N, D_V, BLOCK_DV, MASKED)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        dprobability = tl.dot(dout, tl.trans(value), input_precision=PRECISION)
        probability = tl.exp2(scores * scale_log2 - lse2[:, None])
        if SINK:
            dprobability = dprobability * weight[:, None]
        dscores = probability * (dprobability - delta[:, None])
        if MASKED:
            index = start + tl.arange(0, BLOCK_N)
            visible = index[None, :] < row_end[:, None]
            if WINDOW:
                visible = visible & (index[None, :] >= row_first[:, None])
            dscores = tl.where(visible, dscores, 0.0)
        dquery = tl.dot(dscores.to(key.dtype), key, dquery, input_precision=PRECISION)
    return dquery


GRADIENT_NOT_SPECIALISED = [
    "stride_qb", "stride_qt", "stride_qh", "stride_kb", "stride_kt", "stride_kh", "stride_vb", "stride_vt", "stride_vh",
    "stride_gb", "stride_gt", "stride_gh", "sequences", "T_q", "T_k", "window", "tiles",
]  # fmt: skip


@triton.jit(do_not_specialize=GRADIENT_NOT_SPECIALISED)
def query_gradient_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, weight_ptr, dq_ptr, cu_q_ptr, cu_k_ptr, tile_offset_ptr,
    stride_qb: tl.int64, stride_qt: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kt: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vt: tl.int64, stride_vh: tl.int64,
    stride_gb: tl.int64, stride_gt: tl.int64, stride_gh: tl.int64,
    sequences: tl.int32, T_q: tl.int32, T_k: tl.int32, window: tl.int32, tiles: tl.int32, scale_log2, scale,
    H_Q: tl.constexpr, G: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr, SINK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tile = program % tiles
    head_index = program // tiles
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
    stride_gt = stride_gt * UNIT
    q_base = q_ptr + batch * (stride_qb * UNIT) + head * (stride_qh * UNIT) + query_start * stride_qt
    g_base = dout_ptr + batch * (stride_gb * UNIT) + head * (stride_gh * UNIT) + query_start * stride_gt
    k_base = k_ptr + batch * (stride_kb * UNIT) + (head // G) * (stride_kh * UNIT) + key_start * stride_kt
    v_base = v_ptr + batch * (stride_vb * UNIT) + (head // G) * (stride_vh * UNIT) + key_start * stride_vt

    offset = key_length - query_length
    row = row_start + tl.arange(0, BLOCK_M)
    row_end = tl.full([BLOCK_M], 0, tl.int32) + key_length
    row_first = tl.full([BLOCK_M], 0, tl.int32)
    key_low = 0
    row_low = 0  # rows below it see nothing: their queries are read as 0
    if CAUSAL:
        row_end = tl.minimum(row_end, row + offset + 1)
        row_low = -offset
    if WINDOW:
        row_first = row + offset - window + 1
        key_low = offset - window + 1
    # rows that see nothing are not touched: the prepare kernel wrote their zeros, and 0 * NaN must not reach them
    inside = (row < query_length) & (row >= row_low)
    query = load_rows(q_base, stride_qt, row_start, row_low, query_length, BLOCK_M, D_K, BLOCK_DK, True)
    dout = load_rows(g_base, stride_gt, row_start, row_low, query_length, BLOCK_M, D_V, BLOCK_DV, True)
    statistic = head_index.to(tl.int64) * T_q + query_start + row
    lse2 = tl.load(lse2_ptr + statistic, mask=inside, other=float("inf"))
    delta = tl.load(delta_ptr + statistic, mask=inside, other=0.0)
    weight = delta
    if SINK:
        weight = tl.load(weight_ptr + statistic, mask=inside, other=0.0)
    dquery = tl.zeros([BLOCK_M, BLOCK_DK], tl.float32)
    begin, left, full_begin, full_end, masked_steps = keys_to_walk(
        row_start, query_length, key_length, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N
    )
    dquery = _add_query_gradient(
        dquery, query, dout, lse2, delta, weight, k_base, v_base, stride_kt, stride_vt,
        begin, left, full_begin, full_end, masked_steps, row_first, row_end, key_low, key_length, scale_log2,
        D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_N, True, WINDOW, SINK, PRECISION,
    )  # fmt: skip
    dquery = _add_query_gradient(
        dquery, query, dout, lse2, delta, weight, k_base, v_base, stride_kt, stride_vt,
        begin, left, full_begin, full_end, (full_end - full_begin) // BLOCK_N, row_first, row_end, key_low, key_length,
        scale_log2, D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_N, False, WINDOW, SINK, PRECISION,
    )  # fmt: skip
    column = tl.arange(0, BLOCK_DK)
    dq_row = (batch * T_q + query_start + row) * H_Q + head
    tl.store(
        dq_ptr + dq_row[:, None] * D_K + column[None, :],
        (dquery * scale).to(dq_ptr.dtype.element_ty),
        mask=inside[:, None] & (column < D_K)[None, :],
    )


@triton.jit
def _keep_apart(PRECISION: tl.constexpr):
    """On the vector units (fp32) the operands of a product come to registers; two products interleaved would spill."""
    if PRECISION == "ieee":
        tl.debug_barrier()


@triton.jit
def _add_key_gradient(
    dkey, dvalue, key, value, q_base, g_base, lse2_ptr, delta_ptr, weight_ptr, statistic,
    stride_qt, stride_gt, stride_qh, stride_gh, T_q, begin, left, full_begin, full_end, steps,
    row_low, row_high, key_index, key_end, offset, window, scale_log2,
    D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    G: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SINK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    # one loop over the query tiles of all G heads: a nested one would drain the pipeline at each head
    for index in tl.range(0, steps * G):
        member = index // steps if G > 1 else 0
        step = index - member * steps
        start = tile_start(step, begin, left, full_begin, full_end, BLOCK_M, MASKED)
        head_rows = statistic + tl.cast(member, tl.int64) * T_q
        q_head = q_base + member * stride_qh
        g_head = g_base + member * stride_gh
        row = start + tl.arange(0, BLOCK_M)
        query = load_rows(q_head, stride_qt, start, row_low, row_high, BLOCK_M, D_K, BLOCK_DK, MASKED)
        if MASKED:
            inside = row < row_high
            lse2 = tl.load(lse2_ptr + head_rows + row, mask=inside, other=float("inf"))
        else:
            lse2 = tl.load(lse2_ptr + head_rows + row)
        scores = tl.dot(key, tl.trans(query), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        probability = tl.exp2(scores * scale_log2 - lse2[None, :])
        if MASKED:
            visible = (key_index < key_end)[:, None] & inside[None, :]
            if CAUSAL:
                visible = visible & (key_index[:, None] <= (row + offset)[None, :])
            if WINDOW:
                visible = visible & (key_index[:, None] > (row + offset - window)[None, :])
            probability = tl.where(visible, probability, 0.0)
        dout = load_rows(g_head, stride_gt, start, row_low, row_high, BLOCK_M, D_V, BLOCK_DV, MASKED)
        if MASKED:
            delta = tl.load(delta_ptr + head_rows + row, mask=inside, other=0.0)
        else:
            delta = tl.load(delta_ptr + head_rows + row)
        _keep_apart(PRECISION)
        dprobability = tl.dot(value, tl.trans(dout), input_precision=PRECISION)
        _keep_apart(PRECISION)
        if SINK:
            weight = tl.load(weight_ptr + head_rows + row, mask=row < row_high, other=0.0)
            dprobability = dprobability * weight[None, :]
            shared = (probability * weight[None, :]).to(dout.dtype)
        else:
            shared = probability.to(dout.dtype)
        dvalue = tl.dot(shared, dout, dvalue, input_precision=PRECISION)
        _keep_apart(PRECISION)
        dscores = (probability * (dprobability - delta[None, :])).to(query.dtype)
        dkey = tl.dot(dscores, query, dkey, input_precision=PRECISION)
    return dkey, dvalue


@triton.jit(do_not_specialize=GRADIENT_NOT_SPECIALISED)
def key_gradient_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, weight_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr, tile_offset_ptr,
    stride_qb: tl.int64, stride_qt: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kt: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vt: tl.int64, stride_vh: tl.int64,
    stride_gb: tl.int64, stride_gt: tl.int64, stride_gh: tl.int64,
    sequences: tl.int32, T_q: tl.int32, T_k: tl.int32, window: tl.int32, tiles: tl.int32, scale_log2, scale,
    H_Q: tl.constexpr, G: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr, SINK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    H_KV: tl.constexpr = H_Q // G
    program = tl.program_id(0)
    tile = program % tiles  # with causality tile 0 has the longest walk and comes first
    head_index = program // tiles  # batch * H_KV + KV head
    batch = (head_index // H_KV).to(tl.int64)
    kv_head = head_index % H_KV
    query_start, query_length, key_start, key_length, tile = locate(
        tile, T_q, T_k, sequences, cu_q_ptr, cu_k_ptr, tile_offset_ptr, PACKED, True
    )
    key_first = tile * BLOCK_N
    stride_qt = stride_qt * UNIT
    stride_kt = stride_kt * UNIT
    stride_vt = stride_vt * UNIT
    stride_gt = stride_gt * UNIT
    k_base = k_ptr + batch * (stride_kb * UNIT) + kv_head * (stride_kh * UNIT) + key_start * stride_kt
    v_base = v_ptr + batch * (stride_vb * UNIT) + kv_head * (stride_vh * UNIT) + key_start * stride_vt
    offset = key_length - query_length
    key_low = 0
    row_low = 0
    if CAUSAL:
        row_low = -offset
    if WINDOW:
        key_low = offset - window + 1
    key_index = key_first + tl.arange(0, BLOCK_N)
    key = load_rows(k_base, stride_kt, key_first, key_low, key_length, BLOCK_N, D_K, BLOCK_DK, True)
    value = load_rows(v_base, stride_vt, key_first, key_low, key_length, BLOCK_N, D_V, BLOCK_DV, True)
    dkey = tl.zeros([BLOCK_N, BLOCK_DK], tl.float32)
    dvalue = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    begin, left, full_begin, full_end, masked_steps = queries_to_walk(
        key_first, query_length, key_length, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N
    )
    stride_qh = stride_qh * UNIT
    stride_gh = stride_gh * UNIT
    head = kv_head * G  # the first of the group
    q_base = q_ptr + batch * (stride_qb * UNIT) + head * stride_qh + query_start * stride_qt
    g_base = dout_ptr + batch * (stride_gb * UNIT) + head * stride_gh + query_start * stride_gt
    statistic = (batch * H_Q + head) * T_q + query_start
    dkey, dvalue = _add_key_gradient(
        dkey, dvalue, key, value, q_base, g_base, lse2_ptr, delta_ptr, weight_ptr, statistic,
        stride_qt, stride_gt, stride_qh, stride_gh, T_q, begin, left, full_begin, full_end, masked_steps, row_low,
        query_length, key_index, key_length, offset, window, scale_log2,
        D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_M, G, True, CAUSAL, WINDOW, SINK, PRECISION,
    )  # fmt: skip
    dkey, dvalue = _add_key_gradient(
        dkey, dvalue, key, value, q_base, g_base, lse2_ptr, delta_ptr, weight_ptr, statistic,
        stride_qt, stride_gt, stride_qh, stride_gh, T_q, begin, left, full_begin, full_end,
        (full_end - full_begin) // BLOCK_M, row_low,
        query_length, key_index, key_length, offset, window, scale_log2,
        D_K, D_V, BLOCK_DK, BLOCK_DV, BLOCK_M, G, False, CAUSAL, WINDOW, SINK, PRECISION,
    )  # fmt: skip
    inside = (key_index < key_length)[:, None]
    key_row = (batch * T_k + key_start + key_index) * H_KV + kv_head
    k_column = tl.arange(0, BLOCK_DK)
    v_column = tl.arange(0, BLOCK_DV)
    tl.store(
        dk_ptr + key_row[:, None] * D_K + k_column[None, :],
        (dkey * scale).to(dk_ptr.dtype.element_ty),
        mask=inside & (k_column < D_K)[None, :],
    )
    tl.store(
        dv_ptr + key_row[:, None] * D_V + v_column[None, :],
        dvalue.to(dv_ptr.dtype.element_ty),
        mask=inside & (v_column < D_V)[None, :],
    )


def prepare_rows(block_dv: int) -> int:
    """Rows per program of the prepare kernel, a power of two."""
    return min(128, PREPARE_ELEMENTS // block_dv)


@dataclass(frozen=True)
class Statistics:
    """What the gradients need of each row, fp32, laid out as lse: `[B, H_q, T_q]`."""

    lse2: torch.Tensor  # base 2; +inf for a dead row
    delta: torch.Tensor
    weight: torch.Tensor
    dsink_rows: torch.Tensor

    def sink_gradient(self, sink: torch.Tensor | None) -> torch.Tensor | None:
        return self.dsink_rows.sum((0, 2)) if sink is not None else None


def launch_prepare(call: Call, dout, dlse, out, lse, sink, dq) -> Statistics:
    """Compute the row statistics and zero the dead rows of dq. Arguments: see `launch_dense_backward`."""
    rows = lse.numel()
    lse2 = torch.empty_like(lse)
    delta = torch.empty_like(lse)
    weight = torch.empty_like(lse) if sink is not None else lse2
    dsink_rows = torch.empty_like(lse) if sink is not None else lse2
    unit = alignment_unit(dout)
    block = prepare_rows(call.block_dv)
    prepare_kernel[(triton.cdiv(rows, block),)](
        out, dout, lse, dlse, sink if sink is not None else lse, lse2, delta, weight, dsink_rows, dq,
        *strides_in_units(dout, unit), rows, call.query_length,
        H_Q=call.query_heads, D_K=call.d_k, D_V=call.d_v, BLOCK_DK=call.block_dk, BLOCK_DV=call.block_dv, BLOCK=block,
        UNIT=unit, SINK=sink is not None,
    )  # fmt: skip
    return Statistics(lse2, delta, weight, dsink_rows)


def launch_dense_backward(
    call: Call, dout, dlse, q, k, v, sink, out, lse, tile_configs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of q, k, v (contiguous, dtype of each) and of the sink ([H_q] fp32, None without a sink).

    Args:
        dout: `[B, T_q, H_q, d_v]`, any strides with a last one of 1.
        dlse: `[B, H_q, T_q]` fp32, contiguous.
        out, lse: what the forward returned.
        tile_configs: the `DenseTiles` of this call.
    """
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    unit = alignment_unit(q, k, v, dout)
    strides = tuple(step for tensor in (q, k, v, dout) for step in strides_in_units(tensor, unit))
    shared = dict(
        H_Q=call.query_heads, G=call.group, D_K=call.d_k, D_V=call.d_v, BLOCK_DK=call.block_dk, BLOCK_DV=call.block_dv,
        UNIT=unit, CAUSAL=call.causal, WINDOW=call.window is not None, PACKED=call.packed, SINK=sink is not None,
        PRECISION=call.precision,
    )  # fmt: skip
    with device_of(q):
        statistics = launch_prepare(call, dout, dlse, out, lse, sink, dq)
        lse2, delta, weight = statistics.lse2, statistics.delta, statistics.weight
        tiles = tile_configs.query_gradient
        packing = call.packing(tiles.block_m, side="query")
        query_gradient_kernel[(packing.tiles * call.batch * call.query_heads,)](
            q, k, v, dout, lse2, delta, weight, dq, packing.cu_q, packing.cu_k, packing.tile_offset, *strides,
            packing.sequences, call.query_length, call.key_length, call.window or 0, packing.tiles,
            call.scale * LOG2_E, call.scale, **shared,
            BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        tiles = tile_configs.key_gradient
        packing = call.packing(tiles.block_n, side="key")
        key_gradient_kernel[(packing.tiles * call.batch * call.kv_heads,)](
            q, k, v, dout, lse2, delta, weight, dk, dv, packing.cu_q, packing.cu_k, packing.tile_offset, *strides,
            packing.sequences, call.query_length, call.key_length, call.window or 0, packing.tiles,
            call.scale * LOG2_E, call.scale, **shared,
            BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    return dq, dk, dv, statistics.sink_gradient(sink)
