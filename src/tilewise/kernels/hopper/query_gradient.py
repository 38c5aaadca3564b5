"""Gradient of the queries on Hopper: the forward's walk once more, per query tile, so no two programs write one element.

    producer warp      Q and dO of the tile once, then K and V tiles through a ring of STAGES
    consumer groups    64 rows each:  S = Q K^T,  dP = dO V^T,  P = exp2(S - lse),  dS = P (w dP - delta),  dQ += dS K
                       the last product of a tile is in flight while the next tile's first two are

lse2, delta, weight: what the prepare kernel of kernels/triton wrote. Symbols: schedule.py. Equations: docs/methods/dense.md.
"""

from tilewise.kernels.hopper.compat import (
    barrier_arrive,
    barrier_sync,
    gl,
    gluon,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilewise.kernels.hopper.schedule import Schedule, key_walk
from tilewise.kernels.hopper.tiles import clear_rows, copy_tile, next_stage, store_rows

EMPTY = gl.constexpr(5)  # hardware barriers, one for each stage


@gluon.jit
def _produce(
    schedule, query, dout, key, value, rows_full, full, q_desc, g_desc, k_desc, v_desc,
    H: gl.constexpr, G: gl.constexpr, LIST_G: gl.constexpr,
):  # fmt: skip
    GROUPS: gl.constexpr = query.shape[0]
    STAGES: gl.constexpr = key.shape[0]
    BLOCK_N: gl.constexpr = key.shape[1]
    THREADS: gl.constexpr = 128 * GROUPS + 32
    BYTES: gl.constexpr = q_desc.dtype.primitive_bitwidth // 8
    COLUMNS: gl.constexpr = key.shape[2] + value.shape[2]
    ranks = schedule.ranks()
    item = gl.program_id(0)
    if item < schedule.heads * ranks:
        walk = key_walk(schedule, item, ranks, H, LIST_G, 64 * GROUPS, BLOCK_N)
        mbarrier.expect(rows_full, GROUPS * 64 * COLUMNS * BYTES)
        for group in gl.static_range(GROUPS):
            row = walk.query_start + walk.row_start + group * 64
            tma.async_copy_global_to_shared(q_desc, [walk.batch, row, walk.head, 0], rows_full, query.index(group))
            tma.async_copy_global_to_shared(g_desc, [walk.batch, row, walk.head, 0], rows_full, dout.index(group))
        kv_head = walk.head // G
        stage = ranks * 0
        for step in range(walk.steps):
            one, two = walk.keys_of(step)
            if step >= STAGES:
                barrier_sync(EMPTY + stage, THREADS)
            here = full.index(stage)
            mbarrier.expect(here, BLOCK_N * COLUMNS * BYTES)
            first = walk.key_start + one
            second = walk.key_start + two
            copy_tile(k_desc, key.index(stage), here, walk.batch, first, second, kv_head, 0, walk.HALVES)
            copy_tile(v_desc, value.index(stage), here, walk.batch, first, second, kv_head, 0, walk.HALVES)
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)


@gluon.jit
def _score_gradient(
    scores, dprobability, lse2, delta, weight, scale_log2, walk, step, k, position, zero_begin, window,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SINK: gl.constexpr, CLEAR: gl.constexpr,
):  # fmt: skip
    """dS of one tile, 0 where a row does not see a key."""
    layout: gl.constexpr = scores.type.layout
    BLOCK_N: gl.constexpr = scores.shape[1]
    probability = gl.exp2(scores * scale_log2 - gl.expand_dims(lse2, 1))
    if SINK:
        dprobability = dprobability * gl.expand_dims(weight, 1)
    dscores = probability * (dprobability - gl.expand_dims(delta, 1))
    if walk.needs_mask(step):
        one, two = walk.keys_of(step)
        column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        index = gl.where(column < BLOCK_N // 2, one + column, two + column - BLOCK_N // 2)
        visible = gl.expand_dims(index < walk.key_length, 0)
        if CAUSAL:
            visible = visible & (gl.expand_dims(index, 0) <= gl.expand_dims(position, 1))
        if WINDOW:
            visible = visible & (gl.expand_dims(index, 0) > gl.expand_dims(position - window, 1))
        dscores = gl.where(visible, dscores, 0.0)
        if CLEAR:
            clear_rows(k, one, two, zero_begin, walk.key_length)
    return dscores


@gluon.jit
def _consume(
    CID: gl.constexpr, schedule, query, dout, key, value, rows_full, full, dq_desc, dq_ptr,
    lse2_ptr, delta_ptr, weight_ptr, scale_log2, scale,
    H: gl.constexpr, LIST_G: gl.constexpr, D_TRUE: gl.constexpr, SINK: gl.constexpr,
    CLEAR: gl.constexpr,
):  # fmt: skip
    GROUPS: gl.constexpr = query.shape[0]
    STAGES: gl.constexpr = key.shape[0]
    BLOCK_N: gl.constexpr = key.shape[1]
    D_K: gl.constexpr = key.shape[2]
    THREADS: gl.constexpr = 128 * GROUPS + 32
    dtype: gl.constexpr = key.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_K, 16])
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, dq_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, scores_layout)
    ranks = schedule.ranks()
    item = gl.program_id(0)
    if item < schedule.heads * ranks:
        walk = key_walk(schedule, item, ranks, H, LIST_G, 64 * GROUPS, BLOCK_N)
        first_row = walk.row_start + CID * 64
        row = first_row + gl.arange(0, 64, row_layout)
        offset = walk.key_length - walk.query_length
        position = row + offset
        zero_begin = gl.to_tensor(0)
        if schedule.WINDOW:
            zero_begin = offset - schedule.window + 1
        inside = row < walk.query_length
        statistic = (walk.batch * H + walk.head).to(gl.int64) * schedule.T_q + walk.query_start + row
        lse2 = gl.load(lse2_ptr + statistic, mask=inside, other=float("inf"))
        delta = gl.load(delta_ptr + statistic, mask=inside, other=0.0)
        weight = delta
        if SINK:
            weight = gl.load(weight_ptr + statistic, mask=inside, other=0.0)
        q = query.index(CID)
        g = dout.index(CID)
        dq = gl.full([64, D_K], 0.0, gl.float32, dq_layout)
        scores = gl.full([64, BLOCK_N], 0.0, gl.float32, scores_layout)
        dprobability = gl.full([64, BLOCK_N], 0.0, gl.float32, scores_layout)
        stage = ranks * 0
        phase = stage
        mbarrier.wait(rows_full, 0)
        mbarrier.wait(full.index(stage), phase)
        k = key.index(stage)
        scores = warpgroup_mma(q, k.permute((1, 0)), scores, use_acc=False, is_async=True)
        dprobability = warpgroup_mma(g, value.index(stage).permute((1, 0)), dprobability, use_acc=False, is_async=True)
        scores, dprobability = warpgroup_mma_wait(0, deps=[scores, dprobability])
        dscores = _score_gradient(
            scores, dprobability, lse2, delta, weight, scale_log2, walk, 0, k, position, zero_begin,
            schedule.window, schedule.CAUSAL, schedule.WINDOW, SINK, CLEAR,
        )  # fmt: skip
        operand = gl.convert_layout(dscores.to(dtype), operand_layout)
        last_stage = stage
        stage, phase = next_stage(stage, phase, STAGES)
        for step in range(1, walk.steps):
            mbarrier.wait(full.index(stage), phase)
            k = key.index(stage)
            scores = warpgroup_mma(q, k.permute((1, 0)), scores, use_acc=False, is_async=True)
            dprobability = warpgroup_mma(
                g, value.index(stage).permute((1, 0)), dprobability, use_acc=False, is_async=True
            )
            dq = warpgroup_mma(operand, key.index(last_stage), dq, is_async=True)
            scores, dprobability = warpgroup_mma_wait(1, deps=[scores, dprobability])
            dscores = _score_gradient(
                scores, dprobability, lse2, delta, weight, scale_log2, walk, step, k, position, zero_begin,
                schedule.window, schedule.CAUSAL, schedule.WINDOW, SINK, CLEAR,
            )  # fmt: skip
            dq, operand = warpgroup_mma_wait(0, deps=[dq, operand])
            barrier_arrive(EMPTY + last_stage, THREADS)
            operand = gl.convert_layout(dscores.to(dtype), operand_layout)
            last_stage = stage
            stage, phase = next_stage(stage, phase, STAGES)
        dq = warpgroup_mma(operand, key.index(last_stage), dq, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq])
        dead = gl.expand_dims(gl.convert_layout(lse2, gl.SliceLayout(1, dq_layout)) == float("inf"), 1)
        # a choice: NaN of a key in the same tile must not reach a row that sees nothing
        result = gl.where(dead, 0.0, dq * scale).to(dtype)
        store_rows(
            result, q, dq_desc, dq_ptr, walk.batch, walk.query_start, first_row, walk.query_length, schedule.T_q,
            walk.head,
            H, D_TRUE, schedule.PACKED,
        )  # fmt: skip
        tma.store_wait(0)


NOT_SPECIALISED = ["heads", "tiles", "section", "T_q", "T_k", "window", "list_capacity"]


@gluon.jit(do_not_specialize=NOT_SPECIALISED)
def query_gradient_kernel(
    q_desc, g_desc, k_desc, v_desc, dq_desc, dq_ptr, lse2_ptr, delta_ptr, weight_ptr, plan_ptr, counts_ptr, lists_ptr,
    heads, tiles, section, T_q, T_k, window, list_capacity, scale_log2, scale,
    H: gl.constexpr, G: gl.constexpr, LIST_G: gl.constexpr, D_K: gl.constexpr, D_V: gl.constexpr,
    D_TRUE: gl.constexpr, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr, LIST: gl.constexpr, SINK: gl.constexpr,
    CLEAR: gl.constexpr,
):  # fmt: skip
    """`dq` [B, T_q, H, D_TRUE] contiguous, in q's dtype."""
    dtype: gl.constexpr = q_desc.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    schedule = Schedule(
        heads, tiles, lists_ptr, section, T_q, T_k, window, plan_ptr, counts_ptr, lists_ptr, list_capacity,
        CAUSAL, WINDOW, PACKED, LIST,
    )  # fmt: skip
    query = gl.allocate_shared_memory(dtype, [GROUPS, 64, D_K], layout)
    dout = gl.allocate_shared_memory(dtype, [GROUPS, 64, D_V], layout)
    key = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D_K], layout)
    value = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D_V], layout)
    rows_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(rows_full, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_consume, (0, schedule, query, dout, key, value, rows_full, full, dq_desc, dq_ptr, lse2_ptr, delta_ptr,
                            weight_ptr, scale_log2, scale, H, LIST_G, D_TRUE, SINK, CLEAR)),
                (_produce, (schedule, query, dout, key, value, rows_full, full, q_desc, g_desc, k_desc, v_desc,
                            H, G, LIST_G)),
            ],
            [1], [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (0, schedule, query, dout, key, value, rows_full, full, dq_desc, dq_ptr, lse2_ptr, delta_ptr,
                            weight_ptr, scale_log2, scale, H, LIST_G, D_TRUE, SINK, CLEAR)),
                (_consume, (1, schedule, query, dout, key, value, rows_full, full, dq_desc, dq_ptr, lse2_ptr, delta_ptr,
                            weight_ptr, scale_log2, scale, H, LIST_G, D_TRUE, SINK, CLEAR)),
                (_produce, (schedule, query, dout, key, value, rows_full, full, q_desc, g_desc, k_desc, v_desc,
                            H, G, LIST_G)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
