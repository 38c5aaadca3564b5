"""Gradients of keys and values on Hopper: per tile of keys, over its query tiles, transposed.

    producer warp      K and V of the tile once, then Q and dO tiles through a ring of STAGES
    consumer groups    64 keys x 64 rows each:  S^T = K Q^T,  P^T = exp2(S^T - lse),  dV += P^T dO,  dP^T = V dO^T,
                       dS^T = P^T (w dP^T - delta),  dK += dS^T Q
                       with DELAY the products of dV and dK run under the exponentials of the next tile

Computed walks: the groups hold 64 keys each and share the 64 rows of a step. Listed walks: they share 64 keys and take 64 of
a step's 128 rows each; their sums meet at the end, group 0's first. The G query heads of a KV head follow each other in one
loop, so that sums over a group are made in fp32 registers, in a fixed order.

RAGGED: some tile of rows reaches past the end of its sequence; where none does, its registers are saved.
With REDUCE the queries' gradient is made here too, five products instead of seven: dS of both groups goes to shared memory,
each group multiplies it with half of K's columns, and the copy engine adds the tile to fp32 memory in no fixed order.

Symbols: schedule.py. Equations: docs/methods/dense.md.
"""

from tilewise.kernels.hopper.compat import (
    barrier_arrive,
    barrier_sync,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    tma_reduce_add,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilewise.kernels.hopper.schedule import Schedule, row_walk
from tilewise.kernels.hopper.tiles import clear_rows, copy_tile, next_stage, store_rows

# hardware barriers
EMPTY = gl.constexpr(5)  # one for each stage
MEET = gl.constexpr(10)  # both groups
DS_FULL = gl.constexpr(11)


@gluon.jit
def _produce(
    schedule, key, value, query, dout, keys_full, full, q_desc, g_desc, k_desc, v_desc,
    H_KV: gl.constexpr, G: gl.constexpr, LIST_HEADS: gl.constexpr, LIST_ROWS: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = query.shape[0]
    BLOCK_M: gl.constexpr = query.shape[1]
    PARTS: gl.constexpr = key.shape[0]
    KEYS: gl.constexpr = PARTS * 64
    THREADS: gl.constexpr = 256 + 32
    BYTES: gl.constexpr = q_desc.dtype.primitive_bitwidth // 8
    HALVES: gl.constexpr = schedule.LIST and LIST_ROWS == 64
    ranks = schedule.ranks()
    item = gl.program_id(0)
    if item < schedule.heads * ranks:
        walk = row_walk(schedule, item, ranks, H_KV, LIST_HEADS, LIST_ROWS, KEYS, BLOCK_M)
        mbarrier.expect(keys_full, KEYS * (key.shape[2] + value.shape[2]) * BYTES)
        for part in gl.static_range(PARTS):
            token = walk.key_start + walk.key_first + part * 64
            tma.async_copy_global_to_shared(k_desc, [walk.batch, token, walk.kv_head, 0], keys_full, key.index(part))
            tma.async_copy_global_to_shared(v_desc, [walk.batch, token, walk.kv_head, 0], keys_full, value.index(part))
        stage = ranks * 0
        for index in range(walk.steps * G):
            member = index // walk.steps
            one, two = walk.rows_of(index - member * walk.steps)
            head = walk.kv_head * G + member
            if index >= STAGES:
                barrier_sync(EMPTY + stage, THREADS)
            here = full.index(stage)
            mbarrier.expect(here, BLOCK_M * (query.shape[2] + dout.shape[2]) * BYTES)
            first = walk.query_start + one
            second = walk.query_start + two
            copy_tile(q_desc, query.index(stage), here, walk.batch, first, second, head, 0, HALVES)
            copy_tile(g_desc, dout.index(stage), here, walk.batch, first, second, head, 0, HALVES)
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)


@gluon.jit
def _ask_query_gradient(dscores_smem, key, buffer, CID: gl.constexpr):
    """Half of the columns of dS K over both groups' keys, started."""
    HALF: gl.constexpr = key.shape[2] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    dq = gl.full([64, HALF], 0.0, gl.float32, layout)
    dq = warpgroup_mma(
        dscores_smem.index(buffer * 2).permute((1, 0)), key.index(0).slice(CID * HALF, HALF, 1), dq,
        use_acc=False, is_async=True,
    )  # fmt: skip
    return warpgroup_mma(
        dscores_smem.index(buffer * 2 + 1).permute((1, 0)), key.index(1).slice(CID * HALF, HALF, 1), dq, is_async=True
    )


@gluon.jit
def _add_query_gradient(dq, dq_smem, dq_desc, walk, start, head, CID: gl.constexpr):
    tma.store_wait(0)
    dq_smem.index(CID).store(dq)
    fence_async_shared()
    tma_reduce_add(dq_desc, [walk.batch, walk.query_start + start, head, CID * dq.shape[1]], dq_smem.index(CID))


@gluon.jit
def _row_numbers(pointer, rows_left, LAYOUT: gl.constexpr, RAGGED: gl.constexpr):
    """Numbers of the 64 rows of a tile. RAGGED: 0 past the sequence's end, where another head's or sequence's may be NaN."""
    column = gl.arange(0, 64, LAYOUT)
    if RAGGED:
        return gl.load(pointer + column, mask=column < rows_left, other=0.0)
    return gl.load(pointer + column)


@gluon.jit
def _consume(
    CID: gl.constexpr, schedule, key, value, query, dout, dscores_smem, dq_smem, keys_full, full,
    dk_desc, dv_desc, dq_desc, dk_ptr, dv_ptr, lse2_ptr, delta_ptr, weight_ptr, scale_log2, scale,
    H_KV: gl.constexpr, G: gl.constexpr, LIST_HEADS: gl.constexpr, LIST_ROWS: gl.constexpr, D_K_TRUE: gl.constexpr,
    D_V_TRUE: gl.constexpr, SINK: gl.constexpr, CLEAR: gl.constexpr, RAGGED: gl.constexpr, REDUCE: gl.constexpr,
    DELAY: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = query.shape[0]
    BLOCK_M: gl.constexpr = query.shape[1]
    SPLIT_ROWS: gl.constexpr = key.shape[0] == 1
    KEYS: gl.constexpr = key.shape[0] * 64
    D_K: gl.constexpr = key.shape[2]
    D_V: gl.constexpr = value.shape[2]
    ROWS: gl.constexpr = 64
    THREADS: gl.constexpr = 256 + 32
    H: gl.constexpr = H_KV * G
    dtype: gl.constexpr = key.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_K, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_V, 16])
    k_operand: gl.constexpr = gl.DotOperandLayout(0, dk_layout, 2)
    v_operand: gl.constexpr = gl.DotOperandLayout(0, dv_layout, 2)
    column_layout: gl.constexpr = gl.SliceLayout(0, scores_layout)
    MINE: gl.constexpr = 0 if SPLIT_ROWS else CID
    ranks = schedule.ranks()
    item = gl.program_id(0)
    if item < schedule.heads * ranks:
        walk = row_walk(schedule, item, ranks, H_KV, LIST_HEADS, LIST_ROWS, KEYS, BLOCK_M)
        k = key.index(MINE)
        v = value.index(MINE)
        key_first = walk.key_first + MINE * 64
        key_index = key_first + gl.arange(0, 64, gl.SliceLayout(1, scores_layout))
        offset = walk.key_length - walk.query_length
        row_low = gl.to_tensor(0)
        if schedule.CAUSAL:
            row_low = -offset
        dk = gl.full([64, D_K], 0.0, gl.float32, dk_layout)
        dv = gl.full([64, D_V], 0.0, gl.float32, dv_layout)
        scores = gl.full([64, ROWS], 0.0, gl.float32, scores_layout)
        dprobability = gl.full([64, ROWS], 0.0, gl.float32, scores_layout)
        stage = ranks * 0
        phase = stage
        mbarrier.wait(keys_full, 0)
        if REDUCE and CLEAR:
            low = gl.to_tensor(0)
            if schedule.WINDOW:
                low = offset - schedule.window + 1
            # a key that no row sees has P = 0, but the sum over keys would meet 0 * NaN
            clear_rows(k, key_first, key_first + 32, low, walk.key_length)
            clear_rows(v, key_first, key_first + 32, low, walk.key_length)
        # with DELAY the first step's products with the step before it add 0
        operand = gl.convert_layout(scores.to(dtype), v_operand)
        doperand = gl.convert_layout(scores.to(dtype), k_operand)
        MY_ROWS: gl.constexpr = (CID * 64) if SPLIT_ROWS else 0
        steps = walk.steps * G
        for index in range(steps):
            member = index // walk.steps
            one, two = walk.rows_of(index - member * walk.steps)
            start = one
            if SPLIT_ROWS:
                start = one if CID == 0 else two
            head = walk.kv_head * G + member
            statistic = (walk.batch * H + head).to(gl.int64) * schedule.T_q + walk.query_start + start
            # computed, not carried: the compiler loses a carried copy of the stage
            last_stage = gl.where(index == 0, stage, gl.where(stage == 0, STAGES - 1, stage - 1))
            mbarrier.wait(full.index(stage), phase)
            masked = walk.needs_mask(one, two)
            if CLEAR and masked:
                clear_rows(query.index(stage), one, two, row_low, walk.query_length)
                clear_rows(dout.index(stage), one, two, row_low, walk.query_length)
            q = query.index(stage).slice(MY_ROWS, 64, 0)
            g = dout.index(stage).slice(MY_ROWS, 64, 0)
            scores = warpgroup_mma(k, q.permute((1, 0)), scores, use_acc=False, is_async=True)
            dprobability = warpgroup_mma(v, g.permute((1, 0)), dprobability, use_acc=False, is_async=True)
            if DELAY:
                dv = warpgroup_mma(operand, dout.index(last_stage).slice(MY_ROWS, 64, 0), dv, is_async=True)
                dk = warpgroup_mma(doperand, query.index(last_stage).slice(MY_ROWS, 64, 0), dk, is_async=True)
            rows_left = walk.query_length - start
            lse2 = _row_numbers(lse2_ptr + statistic, rows_left, column_layout, RAGGED)
            if DELAY:
                scores, dprobability = warpgroup_mma_wait(2, deps=[scores, dprobability])
            else:
                scores = warpgroup_mma_wait(1, deps=[scores])
            probability = gl.exp2(scores * scale_log2 - gl.expand_dims(lse2, 0))
            if masked:
                row = start + gl.arange(0, ROWS, column_layout)
                visible = gl.expand_dims(key_index < walk.key_length, 1) & gl.expand_dims(row < walk.query_length, 0)
                if schedule.CAUSAL:
                    visible = visible & (gl.expand_dims(key_index, 1) <= gl.expand_dims(row + offset, 0))
                if schedule.WINDOW:
                    visible = visible & (
                        gl.expand_dims(key_index, 1) > gl.expand_dims(row + offset - schedule.window, 0)
                    )
                probability = gl.where(visible, probability, 0.0)
            shared = probability
            if SINK:
                weight = gl.expand_dims(_row_numbers(weight_ptr + statistic, rows_left, column_layout, RAGGED), 0)
                shared = probability * weight
            if not DELAY:
                operand = gl.convert_layout(shared.to(dtype), v_operand)
            delta = _row_numbers(delta_ptr + statistic, rows_left, column_layout, RAGGED)
            if not DELAY:
                dprobability = warpgroup_mma_wait(0, deps=[dprobability])
            if SINK:
                dprobability = dprobability * weight
            dscores = probability * (dprobability - gl.expand_dims(delta, 0))
            if DELAY:
                dv, operand, dk, doperand = warpgroup_mma_wait(0, deps=[dv, operand, dk, doperand])
                if index > 0:
                    barrier_arrive(EMPTY + last_stage, THREADS)
                operand = gl.convert_layout(shared.to(dtype), v_operand)
                doperand = gl.convert_layout(dscores.to(dtype), k_operand)
            else:
                rounded = dscores.to(dtype)
                doperand = gl.convert_layout(rounded, k_operand)
                if REDUCE:
                    # two buffers: the other group may still read the one before
                    dscores_smem.index(index % 2 * 2 + CID).store(rounded)
                    fence_async_shared()
                dv = warpgroup_mma(operand, g, dv, is_async=True)
                dk = warpgroup_mma(doperand, q, dk, is_async=True)
                if REDUCE:
                    barrier_sync(DS_FULL, 256)
                    dq = _ask_query_gradient(dscores_smem, key, index % 2, CID)
                    dv, operand, dk, doperand, dq = warpgroup_mma_wait(0, deps=[dv, operand, dk, doperand, dq])
                else:
                    dv, operand, dk, doperand = warpgroup_mma_wait(0, deps=[dv, operand, dk, doperand])
                barrier_arrive(EMPTY + stage, THREADS)
                if REDUCE:
                    _add_query_gradient(dq, dq_smem, dq_desc, walk, start, head, CID)
            stage, phase = next_stage(stage, phase, STAGES)
        if DELAY and steps > 0:
            last_stage = gl.where(stage == 0, STAGES - 1, stage - 1)
            dv = warpgroup_mma(operand, dout.index(last_stage).slice(MY_ROWS, 64, 0), dv, is_async=True)
            dk = warpgroup_mma(doperand, query.index(last_stage).slice(MY_ROWS, 64, 0), dk, is_async=True)
            dv, dk = warpgroup_mma_wait(0, deps=[dv, dk])
        if SPLIT_ROWS:
            # every tile has been read by both groups before group 1's sums take its place
            barrier_sync(MEET, 256)
            exchange_layout: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
            other_dk = query._reinterpret(gl.float32, [64, D_K], exchange_layout)
            other_dv = dout._reinterpret(gl.float32, [64, D_V], exchange_layout)
            if CID == 1:
                other_dk.store(dk)
                other_dv.store(dv)
            barrier_sync(MEET, 256)
            if CID == 0:
                dk = dk + other_dk.load(dk_layout)
                dv = dv + other_dv.load(dv_layout)
        elif REDUCE:
            tma.store_wait(0)
            barrier_sync(MEET, 256)  # K is read by the other group too, and its place is now taken by dK
        if (not SPLIT_ROWS) or CID == 0:
            store_rows(
                (dk * scale).to(dtype), k, dk_desc, dk_ptr, walk.batch, walk.key_start, key_first, walk.key_length,
                schedule.T_k, walk.kv_head, H_KV, D_K_TRUE, schedule.PACKED,
            )  # fmt: skip
            store_rows(
                dv.to(dtype), v, dv_desc, dv_ptr, walk.batch, walk.key_start, key_first, walk.key_length,
                schedule.T_k, walk.kv_head, H_KV, D_V_TRUE, schedule.PACKED,
            )  # fmt: skip
            tma.store_wait(0)


NOT_SPECIALISED = ["heads", "tiles", "section", "T_q", "T_k", "window"]


@gluon.jit(do_not_specialize=NOT_SPECIALISED)
def key_gradient_kernel(
    q_desc, g_desc, k_desc, v_desc, dk_desc, dv_desc, dq_desc, dk_ptr, dv_ptr, lse2_ptr, delta_ptr, weight_ptr,
    plan_ptr, ends_ptr, lists_ptr, heads, tiles, section, T_q, T_k, window, scale_log2, scale,
    H_KV: gl.constexpr, G: gl.constexpr, LIST_HEADS: gl.constexpr, LIST_ROWS: gl.constexpr,
    D_K: gl.constexpr, D_V: gl.constexpr, D_K_TRUE: gl.constexpr, D_V_TRUE: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr, LIST: gl.constexpr, SINK: gl.constexpr,
    CLEAR: gl.constexpr, RAGGED: gl.constexpr, REDUCE: gl.constexpr,
    DELAY: gl.constexpr,
):  # fmt: skip
    """`dk` [B, T_k, H_KV, D_K_TRUE], `dv` [.., D_V_TRUE], contiguous; with REDUCE `dq` fp32 by its descriptor."""
    dtype: gl.constexpr = q_desc.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PARTS: gl.constexpr = 1 if LIST else 2
    BLOCK_M: gl.constexpr = 128 if LIST else 64
    schedule = Schedule(
        heads, tiles, lists_ptr, section, T_q, T_k, window, plan_ptr, ends_ptr, lists_ptr, T_q, CAUSAL, WINDOW, PACKED,
        LIST,
    )  # fmt: skip
    key = gl.allocate_shared_memory(dtype, [PARTS, 64, D_K], layout)
    value = gl.allocate_shared_memory(dtype, [PARTS, 64, D_V], layout)
    query = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D_K], layout)
    dout = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D_V], layout)
    dscores = query
    dq = query
    if REDUCE:
        dscores = gl.allocate_shared_memory(dtype, [4, 64, 64], gl.NVMMASharedLayout(128, 16, 2))
        dq = gl.allocate_shared_memory(gl.float32, [2, 64, D_K // 2], gl.NVMMASharedLayout(128, 32, 2))
    keys_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(keys_full, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    gl.warp_specialize(
        [
            (_consume, (0, schedule, key, value, query, dout, dscores, dq, keys_full, full, dk_desc,
                        dv_desc, dq_desc, dk_ptr, dv_ptr, lse2_ptr, delta_ptr, weight_ptr, scale_log2, scale, H_KV, G,
                        LIST_HEADS, LIST_ROWS, D_K_TRUE, D_V_TRUE, SINK, CLEAR, RAGGED, REDUCE, DELAY)),
            (_consume, (1, schedule, key, value, query, dout, dscores, dq, keys_full, full, dk_desc,
                        dv_desc, dq_desc, dk_ptr, dv_ptr, lse2_ptr, delta_ptr, weight_ptr, scale_log2, scale, H_KV, G,
                        LIST_HEADS, LIST_ROWS, D_K_TRUE, D_V_TRUE, SINK, CLEAR, RAGGED, REDUCE, DELAY)),
            (_produce, (schedule, key, value, query, dout, keys_full, full, q_desc, g_desc, k_desc, v_desc,
                        H_KV, G, LIST_HEADS, LIST_ROWS)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
