"""Attention forward on Hopper: a walk over the key tiles of a query tile, computed or listed.

    producer warp      copies query tiles and, through rings of STAGES, key and value tiles into shared memory
    consumer groups    64 query rows each; the scores of the next tile are in flight while this one's softmax runs:
                           S_i = Q K_i^T  and  O += P_{i-1} V_{i-1}    asked for together; when S_i is there
                           P_i = exp2(S_i - m);  when the other is there, O = O exp2(m_old - m)
                       groups take turns in asking, so that one's softmax hides under another's products

Symbols: schedule.py. Equations: docs/methods/dense.md.
"""

from tilewise.kernels.hopper.compat import (
    aggregate,
    barrier_arrive,
    barrier_sync,
    constexpr_function,
    gl,
    gluon,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilewise.kernels.hopper.schedule import Schedule, key_walk
from tilewise.kernels.hopper.tiles import clear_rows, copy_tile, next_stage, store_rows

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
# hardware barriers by number; those of stages and groups are followed by one more for each
K_EMPTY = gl.constexpr(5)
V_EMPTY = gl.constexpr(8)
TURN = gl.constexpr(11)
Q_EMPTY = gl.constexpr(14)


@aggregate
class Buffers:
    """Shared memory: tiles and the barriers that say they are full."""

    query: gl.shared_memory_descriptor  # [GROUPS, 64, D_K]
    query2: gl.shared_memory_descriptor  # [GROUPS, 64, D_K2]: columns past D_K when d_k = D_K + D_K2
    key: gl.shared_memory_descriptor  # [STAGES, BLOCK_N, D_K]
    key2: gl.shared_memory_descriptor
    value: gl.shared_memory_descriptor  # [STAGES, BLOCK_N, D_V]
    out: gl.shared_memory_descriptor  # [GROUPS, 64, D_V]
    item: gl.shared_memory_descriptor  # [1]: what the consumers are to work on
    query_full: gl.shared_memory_descriptor  # the query tile and the item are there
    key_full: gl.shared_memory_descriptor
    value_full: gl.shared_memory_descriptor
    D_K2: gl.constexpr

    @constexpr_function
    def __init__(self, query, query2, key, key2, value, out, item, query_full, key_full, value_full, D_K2):
        self.query = query
        self.query2 = query2
        self.key = key
        self.key2 = key2
        self.value = value
        self.out = out
        self.item = item
        self.query_full = query_full
        self.key_full = key_full
        self.value_full = value_full
        self.D_K2 = gl.constexpr(D_K2)


@gluon.jit
def _produce(
    schedule, buffers, q_desc, q2_desc, k_desc, k2_desc, v_desc,
    H: gl.constexpr, G: gl.constexpr, LIST_G: gl.constexpr,
):  # fmt: skip
    GROUPS: gl.constexpr = buffers.query.shape[0]
    STAGES: gl.constexpr = buffers.key.shape[0]
    BLOCK_N: gl.constexpr = buffers.key.shape[1]
    D_K: gl.constexpr = buffers.query.shape[2]
    ROWS: gl.constexpr = 64 * GROUPS
    THREADS: gl.constexpr = 128 * GROUPS + 32
    BYTES: gl.constexpr = q_desc.dtype.primitive_bitwidth // 8
    D_K_ALL: gl.constexpr = D_K + buffers.D_K2
    ranks = schedule.ranks()
    loads = ranks * 0
    key_stage = loads
    value_stage = loads
    items = schedule.heads * ranks
    item = gl.program_id(0)
    first_item = item
    item_layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    while item < items:
        walk = key_walk(schedule, item, ranks, H, LIST_G, ROWS, BLOCK_N)
        next_item = schedule.take()
        if item != first_item:
            barrier_sync(Q_EMPTY, THREADS)
        buffers.item.store(gl.full([1], item, gl.int32, item_layout))
        mbarrier.expect(buffers.query_full, GROUPS * 64 * D_K_ALL * BYTES)
        for group in gl.static_range(GROUPS):
            row = walk.query_start + walk.row_start + group * 64
            tma.async_copy_global_to_shared(
                q_desc, [walk.batch, row, walk.head, 0], buffers.query_full, buffers.query.index(group)
            )
            if buffers.D_K2 > 0:
                tma.async_copy_global_to_shared(
                    q2_desc, [walk.batch, row, walk.head, D_K], buffers.query_full, buffers.query2.index(group)
                )
        kv_head = walk.head // G
        one, two = walk.keys_of(0)
        # keys run one tile ahead of values, in the order in which the consumers ask
        for step in range(walk.steps + 1):
            value_one = one
            value_two = two
            if step < walk.steps:
                one, two = walk.keys_of(step)
                if loads >= STAGES:
                    barrier_sync(K_EMPTY + key_stage, THREADS)
                full = buffers.key_full.index(key_stage)
                mbarrier.expect(full, BLOCK_N * D_K_ALL * BYTES)
                first = walk.key_start + one
                second = walk.key_start + two
                copy_tile(
                    k_desc, buffers.key.index(key_stage), full, walk.batch, first, second, kv_head, 0, walk.HALVES
                )
                if buffers.D_K2 > 0:
                    copy_tile(
                        k2_desc,
                        buffers.key2.index(key_stage),
                        full,
                        walk.batch,
                        first,
                        second,
                        kv_head,
                        D_K,
                        walk.HALVES,
                    )
                key_stage = gl.where(key_stage == STAGES - 1, 0, key_stage + 1)
            if step > 0:
                if loads > STAGES:
                    barrier_sync(V_EMPTY + value_stage, THREADS)
                full = buffers.value_full.index(value_stage)
                mbarrier.expect(full, BLOCK_N * buffers.value.shape[2] * BYTES)
                first = walk.key_start + value_one
                second = walk.key_start + value_two
                copy_tile(
                    v_desc, buffers.value.index(value_stage), full, walk.batch, first, second, kv_head, 0, walk.HALVES
                )
                value_stage = gl.where(value_stage == STAGES - 1, 0, value_stage + 1)
            loads += 1
        loads -= 1
        item = next_item
    if first_item < items:  # else the consumers have nothing to come back from
        barrier_sync(Q_EMPTY, THREADS)
    buffers.item.store(gl.full([1], item, gl.int32, item_layout))
    mbarrier.arrive(buffers.query_full, count=1)


@gluon.jit
def _ask_scores(query, query2, key, key2, scores, D_K2: gl.constexpr):
    """Q K^T, started; `scores` only lends its registers."""
    scores = warpgroup_mma(query, key.permute((1, 0)), scores, use_acc=False, is_async=True)
    if D_K2 > 0:
        scores = warpgroup_mma(query2, key2.permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def _mask(scores, walk, step, row, window, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr):
    """-inf where a row does not see a key. row [64]: positions."""
    layout: gl.constexpr = scores.type.layout
    one, two = walk.keys_of(step)
    column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
    key = gl.where(column < BLOCK_N // 2, one + column, two + column - BLOCK_N // 2)
    visible = gl.expand_dims(key < walk.key_length, 0)
    if CAUSAL:
        visible = visible & (gl.expand_dims(key, 0) <= gl.expand_dims(row, 1))
    if WINDOW:
        visible = visible & (gl.expand_dims(key, 0) > gl.expand_dims(row - window, 1))
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def _softmax(scores, maximum, total, scale_log2):
    """Probabilities of one tile relative to the new running maximum, and what the old state is to be multiplied with."""
    new_maximum = gl.maximum(maximum, gl.max(scores, 1) * scale_log2)
    # a row that has seen nothing yet: 0 stands in, so that no inf - inf arises
    shift = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    probability = gl.exp2(scores * scale_log2 - gl.expand_dims(shift, 1))
    rescale = gl.exp2(maximum - shift)
    return probability, new_maximum, total * rescale + gl.sum(probability, 1), rescale


@gluon.jit
def _consume(
    CID: gl.constexpr, schedule, buffers, o_desc, out_ptr, lse_ptr, sink_ptr, scale_log2,
    H: gl.constexpr, LIST_G: gl.constexpr, SINK: gl.constexpr, CLEAR: gl.constexpr,
    D_V_TRUE: gl.constexpr, TURNS: gl.constexpr, QREG: gl.constexpr,
):  # fmt: skip
    GROUPS: gl.constexpr = buffers.query.shape[0]
    STAGES: gl.constexpr = buffers.key.shape[0]
    BLOCK_N: gl.constexpr = buffers.key.shape[1]
    D_V: gl.constexpr = buffers.value.shape[2]
    ROWS: gl.constexpr = 64 * GROUPS
    THREADS: gl.constexpr = 128 * GROUPS + 32
    dtype: gl.constexpr = buffers.value.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_V, 16])
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, scores_layout)
    out_row_layout: gl.constexpr = gl.SliceLayout(1, out_layout)
    query_layout: gl.constexpr = gl.DotOperandLayout(0, scores_layout, 2)
    query2 = buffers.query2.index(CID)
    out_smem = buffers.out.index(CID)

    ranks = schedule.ranks()
    stage = ranks * 0
    phase = stage
    value_stage = stage
    value_phase = stage
    scores = gl.full([64, BLOCK_N], 0.0, gl.float32, scores_layout)
    if CID == GROUPS - 1 and TURNS:
        barrier_arrive(TURN, 256)  # the first turn is group 0's
    item_layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    items = schedule.heads * ranks
    query_phase = ranks * 0
    mbarrier.wait(buffers.query_full, query_phase)
    item = gl.max(buffers.item.load(item_layout), 0)
    while item < items:
        walk = key_walk(schedule, item, ranks, H, LIST_G, ROWS, BLOCK_N)
        row = walk.row_start + CID * 64 + gl.arange(0, 64, row_layout)
        position = row + walk.key_length - walk.query_length
        zero_begin = gl.to_tensor(0)
        if schedule.WINDOW:
            zero_begin = walk.key_length - walk.query_length - schedule.window + 1
        maximum = gl.full([64], float("-inf"), gl.float32, row_layout)
        total = gl.full([64], 0.0, gl.float32, row_layout)
        out = gl.full([64, D_V], 0.0, gl.float32, out_layout)

        mbarrier.wait(buffers.key_full.index(stage), phase)
        if TURNS:
            barrier_sync(TURN + CID, 256)
        query = buffers.query.index(CID)
        if QREG:
            query = query.load(query_layout)
        scores = _ask_scores(query, query2, buffers.key.index(stage), buffers.key2.index(stage), scores, buffers.D_K2)
        if TURNS:
            barrier_arrive(TURN + (CID + 1) % GROUPS, 256)
        scores = warpgroup_mma_wait(0, deps=[scores])
        barrier_arrive(K_EMPTY + stage, THREADS)
        stage, phase = next_stage(stage, phase, STAGES)
        if walk.needs_mask(0):
            scores = _mask(scores, walk, 0, position, schedule.window, schedule.CAUSAL, schedule.WINDOW, BLOCK_N)
        probability, maximum, total, rescale = _softmax(scores, maximum, total, scale_log2)
        operand = gl.convert_layout(probability.to(dtype), operand_layout)
        mbarrier.wait(buffers.key_full.index(stage), phase, pred=walk.steps > 1)
        for step in range(1, walk.steps):
            value = buffers.value.index(value_stage)
            mbarrier.wait(buffers.value_full.index(value_stage), value_phase)
            if CLEAR and walk.needs_mask(step - 1):
                one, two = walk.keys_of(step - 1)
                clear_rows(value, one, two, zero_begin, walk.key_length)
            if TURNS:
                barrier_sync(TURN + CID, 256)
            scores = _ask_scores(
                query, query2, buffers.key.index(stage), buffers.key2.index(stage), scores, buffers.D_K2
            )
            out = warpgroup_mma(operand, value, out, is_async=True)
            if TURNS:
                barrier_arrive(TURN + (CID + 1) % GROUPS, 256)
            scores = warpgroup_mma_wait(1, deps=[scores])
            barrier_arrive(K_EMPTY + stage, THREADS)
            stage, phase = next_stage(stage, phase, STAGES)
            if walk.needs_mask(step):
                scores = _mask(scores, walk, step, position, schedule.window, schedule.CAUSAL, schedule.WINDOW, BLOCK_N)
            probability, maximum, total, rescale = _softmax(scores, maximum, total, scale_log2)
            # this wait between the softmax and that for the products keeps the compiler from raising the latter above it
            mbarrier.wait(buffers.key_full.index(stage), phase, pred=step + 1 < walk.steps)
            out, operand = warpgroup_mma_wait(0, deps=[out, operand])
            barrier_arrive(V_EMPTY + value_stage, THREADS)
            value_stage, value_phase = next_stage(value_stage, value_phase, STAGES)
            out = out * gl.expand_dims(gl.convert_layout(rescale, out_row_layout), 1)
            operand = gl.convert_layout(probability.to(dtype), operand_layout)
        barrier_arrive(Q_EMPTY, THREADS)
        value = buffers.value.index(value_stage)
        mbarrier.wait(buffers.value_full.index(value_stage), value_phase)
        if CLEAR and walk.needs_mask(walk.steps - 1):
            one, two = walk.keys_of(walk.steps - 1)
            clear_rows(value, one, two, zero_begin, walk.key_length)
        out = warpgroup_mma(operand, value, out, is_async=True)
        dead = total == 0.0
        divisor = gl.where(dead, 1.0, total)
        lse = gl.where(dead, float("-inf"), (maximum + gl.log2(divisor)) * LN_2)
        share = gl.where(dead, 0.0, 1.0 / divisor)
        if SINK:
            sink = gl.load(sink_ptr + walk.head)
            share = gl.where(dead, 0.0, share / (1.0 + gl.exp2((sink - lse) * LOG2_E)))
        lse_row = (walk.batch * H + walk.head).to(gl.int64) * schedule.T_q + walk.query_start
        gl.store(lse_ptr + lse_row + row, lse, mask=row < walk.query_length)
        out = warpgroup_mma_wait(0, deps=[out])
        barrier_arrive(V_EMPTY + value_stage, THREADS)
        value_stage, value_phase = next_stage(value_stage, value_phase, STAGES)
        share = gl.expand_dims(gl.convert_layout(share, out_row_layout), 1)
        # a choice, not a product: 0 * NaN from a value of the same tile must not reach a dead row
        result = gl.where(share == 0.0, 0.0, out * share).to(dtype)
        store_rows(
            result, out_smem, o_desc, out_ptr, walk.batch, walk.query_start,
            walk.row_start + CID * 64, walk.query_length, schedule.T_q, walk.head,
            H, D_V_TRUE, schedule.PACKED,
        )  # fmt: skip
        query_phase = query_phase ^ 1
        mbarrier.wait(buffers.query_full, query_phase)
        item = gl.max(buffers.item.load(item_layout), 0)
    tma.store_wait(0)


FORWARD_NOT_SPECIALISED = ["heads", "tiles", "section", "T_q", "T_k", "window", "list_capacity"]


@gluon.jit(do_not_specialize=FORWARD_NOT_SPECIALISED)
def forward_kernel(
    q_desc, q2_desc, k_desc, k2_desc, v_desc, o_desc, out_ptr, lse_ptr, sink_ptr, plan_ptr, counts_ptr, lists_ptr, counter_ptr,
    heads, tiles, section, T_q, T_k, window, list_capacity, scale_log2,
    H: gl.constexpr, G: gl.constexpr, LIST_G: gl.constexpr,
    D_K: gl.constexpr, D_K2: gl.constexpr, D_V: gl.constexpr, D_V_TRUE: gl.constexpr,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr, LIST: gl.constexpr, SINK: gl.constexpr,
    CLEAR: gl.constexpr, TURNS: gl.constexpr, QREG: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """`out` [B, T_q, H, D_V_TRUE] contiguous, `lse` [B, H, T_q] (fp32, natural log, without the sink)."""
    dtype: gl.constexpr = q_desc.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    schedule = Schedule(
        heads, tiles, counter_ptr, section, T_q, T_k, window, plan_ptr, counts_ptr, lists_ptr, list_capacity,
        CAUSAL, WINDOW, PACKED, LIST,
    )  # fmt: skip
    query = gl.allocate_shared_memory(dtype, [GROUPS, 64, D_K], layout)
    key = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D_K], layout)
    query2 = query
    key2 = key
    if D_K2 > 0:
        query2 = gl.allocate_shared_memory(dtype, [GROUPS, 64, D_K2], layout)
        key2 = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D_K2], layout)
    value = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D_V], layout)
    out = gl.allocate_shared_memory(dtype, [GROUPS, 64, D_V], layout)
    item = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    query_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    key_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(query_full, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(key_full.index(stage), count=1)
        mbarrier.init(value_full.index(stage), count=1)
    buffers = Buffers(query, query2, key, key2, value, out, item, query_full, key_full, value_full, D_K2)
    # argument lists are written out: a tuple in a variable would turn its constants into tensors
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_consume, (0, schedule, buffers, o_desc, out_ptr, lse_ptr, sink_ptr, scale_log2, H, LIST_G, SINK,
                            CLEAR, D_V_TRUE, TURNS, QREG)),
                (_produce, (schedule, buffers, q_desc, q2_desc, k_desc, k2_desc, v_desc, H, G, LIST_G)),
            ],
            [1], [24],
        )  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, schedule, buffers, o_desc, out_ptr, lse_ptr, sink_ptr, scale_log2, H, LIST_G, SINK,
                            CLEAR, D_V_TRUE, TURNS, QREG)),
                (_consume, (1, schedule, buffers, o_desc, out_ptr, lse_ptr, sink_ptr, scale_log2, H, LIST_G, SINK,
                            CLEAR, D_V_TRUE, TURNS, QREG)),
                (_produce, (schedule, buffers, q_desc, q2_desc, k_desc, k2_desc, v_desc, H, G, LIST_G)),
            ],
            [4, 1], [CONSUMER_REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (0, schedule, buffers, o_desc, out_ptr, lse_ptr, sink_ptr, scale_log2, H, LIST_G, SINK,
                            CLEAR, D_V_TRUE, TURNS, QREG)),
                (_consume, (1, schedule, buffers, o_desc, out_ptr, lse_ptr, sink_ptr, scale_log2, H, LIST_G, SINK,
                            CLEAR, D_V_TRUE, TURNS, QREG)),
                (_consume, (2, schedule, buffers, o_desc, out_ptr, lse_ptr, sink_ptr, scale_log2, H, LIST_G, SINK,
                            CLEAR, D_V_TRUE, TURNS, QREG)),
                (_produce, (schedule, buffers, q_desc, q2_desc, k_desc, k2_desc, v_desc, H, G, LIST_G)),
            ],
            [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, 24],
        )  # fmt: skip
