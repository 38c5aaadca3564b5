"""What the dense kernels share: from a flat tile number to a sequence, and from a tile to the tiles it has to walk.

Symbols in every kernel file of this folder:
    B, H_Q, H_KV, G     batch, query heads, KV heads, query heads per KV head
    D_K, D_V            head dims; BLOCK_DK, BLOCK_DV the same rounded up to a power of two
    BLOCK_M, BLOCK_N    query rows and keys per tile
    T_q, T_k            tokens of the call; query_length, key_length those of one sequence
    stride_qb/qt/qh     strides of q in batch, token, head, in units of UNIT elements (8 when it divides all of them): so
                        the compiler knows how rows are aligned, and no stride or length is ever specialised on
Positions are local to the sequence; a query row t stands at position t + key_length - query_length.
"""

import triton
import triton.language as tl


@triton.jit
def sequence_of_tile(tile, tile_offset_ptr, sequences):
    """Largest s with tile_offset[s] <= tile: empty sequences own no tile, so the next one is found."""
    low = 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(tile_offset_ptr + middle) <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def locate(
    tile, T_q, T_k, sequences, cu_q_ptr, cu_k_ptr, tile_offset_ptr, PACKED: tl.constexpr, KEY_SIDE: tl.constexpr
):  # fmt: skip
    """Find the sequence of a flat tile: start and length of it on both sides, and the tile's number within it.

    The lists of a packed call carry one more entry than there are sequences: the tail past cu_seqlens[-1]. Its queries see
    no key and its keys no query, so the other side's length is 0 there. A surplus tile lies past the end of the tail: all
    its walks are empty and all its stores are masked.
    """
    query_start = tl.zeros((), tl.int64)
    key_start = tl.zeros((), tl.int64)
    query_length = T_q
    key_length = T_k
    if PACKED:
        sequence = sequence_of_tile(tile, tile_offset_ptr, sequences)
        query_start = tl.load(cu_q_ptr + sequence)
        key_start = tl.load(cu_k_ptr + sequence)
        query_length = (tl.load(cu_q_ptr + sequence + 1) - query_start).to(tl.int32)
        key_length = (tl.load(cu_k_ptr + sequence + 1) - key_start).to(tl.int32)
        if sequence == sequences - 1:
            if KEY_SIDE:
                query_length = 0
            else:
                key_length = 0
        tile = (tile - tl.load(tile_offset_ptr + sequence)).to(tl.int32)
    return query_start, query_length, key_start, key_length, tile


@triton.jit
def keys_to_walk(
    row_start, query_length, key_length, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Key ranges that a query tile walks: [begin, full_begin) masked, [full_begin, full_end) not, [full_end, end) masked.

    All but `end` are multiples of BLOCK_N, and begin <= full_begin <= full_end.

    Returns:
        begin, masked tiles on the left, full_begin, full_end, masked tiles in all.
    """
    offset = key_length - query_length
    first_position = row_start + offset
    last_position = tl.minimum(row_start + BLOCK_M, query_length) - 1 + offset
    end = key_length
    full_end = key_length
    if CAUSAL:
        end = tl.minimum(key_length, tl.maximum(last_position + 1, 0))
        full_end = tl.minimum(key_length, tl.maximum(first_position + 1, 0))
    full_end = full_end // BLOCK_N * BLOCK_N
    begin = 0
    full_begin = 0
    if WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N
        full_begin = tl.cdiv(tl.maximum(last_position - window + 1, 0), BLOCK_N) * BLOCK_N
        full_begin = tl.minimum(full_begin, tl.cdiv(end, BLOCK_N) * BLOCK_N)
        full_begin = tl.maximum(full_begin, begin)
    full_end = tl.maximum(full_end, full_begin)
    left = (full_begin - begin) // BLOCK_N
    return begin, left, full_begin, full_end, left + tl.cdiv(tl.maximum(end - full_end, 0), BLOCK_N)


@triton.jit
def queries_to_walk(
    key_start, query_length, key_length, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Row ranges that a key tile walks; same form and same results as `keys_to_walk`, in multiples of BLOCK_M."""
    offset = key_length - query_length
    begin = 0
    full_begin = 0
    end = query_length
    full_end = query_length
    if CAUSAL:
        begin = tl.maximum(key_start - offset, 0) // BLOCK_M * BLOCK_M
        full_begin = tl.cdiv(tl.maximum(key_start + BLOCK_N - 1 - offset, 0), BLOCK_M) * BLOCK_M
        full_begin = tl.minimum(full_begin, tl.cdiv(query_length, BLOCK_M) * BLOCK_M)
        full_begin = tl.maximum(full_begin, begin)
    if WINDOW:
        end = tl.minimum(query_length, tl.maximum(key_start + BLOCK_N - 1 + window - offset, 0))
        full_end = tl.minimum(query_length, tl.maximum(key_start + window - offset, 0))
    full_end = tl.maximum(full_end // BLOCK_M * BLOCK_M, full_begin)
    left = (full_begin - begin) // BLOCK_M
    return begin, left, full_begin, full_end, left + tl.cdiv(tl.maximum(end - full_end, 0), BLOCK_M)


@triton.jit
def tile_start(step, begin, left, full_begin, full_end, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """First index of the step-th tile of a walk: masked tiles left of the full ones, then those right of them."""
    if MASKED:
        return tl.where(step < left, begin + step * BLOCK, full_end + (step - left) * BLOCK)
    return full_begin + step * BLOCK


@triton.jit
def load_rows(
    base, stride, start, low, high, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr
):
    """Load `[BLOCK, BLOCK_D]` rows start.. ; with MASKED those outside [low, high) are zero, and none of them is read."""
    index = tl.arange(0, BLOCK)
    column = tl.arange(0, BLOCK_D)
    # 64 bits to the tile, 32 within it (the host copies a tensor whose tokens lie further apart): fewer registers
    tile = base + tl.cast(start, tl.int64) * stride
    pointers = tile + (index[:, None] * stride.to(tl.int32) + column[None, :])
    if MASKED:
        inside = (start + index >= low) & (start + index < high)
        if D == BLOCK_D:
            return tl.load(pointers, mask=inside[:, None], other=0.0)
        return tl.load(pointers, mask=inside[:, None] & (column < D)[None, :], other=0.0)
    if D == BLOCK_D:
        return tl.load(pointers)
    return tl.load(pointers, mask=(column < D)[None, :], other=0.0)
