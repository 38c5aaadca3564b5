"""What the Hopper kernels share: copies of tiles, rings of stages, tiles freed of what no row of the call may see."""

from tilewise.kernels.hopper.compat import fence_async_shared, gl, gluon, tma


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    wraps = stage == STAGES - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def copy_tile(descriptor, smem, full, batch, one, two, head, column: gl.constexpr, HALVES: gl.constexpr):
    """A tile of tokens into shared memory: whole, or with HALVES as two boxes that start at tokens one and two."""
    HALF: gl.constexpr = smem.shape[0] // 2
    if HALVES:
        tma.async_copy_global_to_shared(descriptor, [batch, one, head, column], full, smem.slice(0, HALF, 0))
        tma.async_copy_global_to_shared(descriptor, [batch, two, head, column], full, smem.slice(HALF, HALF, 0))
    else:
        tma.async_copy_global_to_shared(descriptor, [batch, one, head, column], full, smem)


@gluon.jit
def clear_rows(tile, one, two, low, high):
    """Zero the rows of a tile whose tokens lie outside [low, high); its halves start at tokens one and two.

    They are tokens of another sequence or padding, which may hold NaN, and 0 * NaN must not arise. Every group writes the
    whole tile, the same numbers, so no group waits for another.
    """
    BLOCK: gl.constexpr = tile.shape[0]
    CHUNK: gl.constexpr = 32
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for chunk in gl.static_range(BLOCK // CHUNK):
        first = one + chunk * CHUNK if chunk * CHUNK < BLOCK // 2 else two + chunk * CHUNK - BLOCK // 2
        if (first + CHUNK > high) | (first < low):
            part = tile.slice(chunk * CHUNK, CHUNK, 0)
            token = first + gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
            seen = gl.expand_dims((token < high) & (token >= low), 1)
            part.store(gl.where(seen, part.load(layout), 0.0).to(tile.dtype))
    fence_async_shared()


@gluon.jit
def store_rows(
    result, smem, descriptor, pointer, batch, start, first_row, length, T, head,
    H: gl.constexpr, D_TRUE: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Rows first_row.. of a sequence that starts at token `start` to [B, T, H, D_TRUE]; none past its `length`.

    The copy engine leaves out what lies past the tensor's end, but not what belongs to the next sequence.
    """
    ROWS: gl.constexpr = result.shape[0]
    COLUMNS: gl.constexpr = result.shape[1]
    tma.store_wait(0)
    whole = first_row + ROWS <= length
    if (not PACKED) or whole:
        smem.store(result)
        fence_async_shared()
        tma.async_copy_shared_to_global(descriptor, [batch, start + first_row, head, 0], smem)
    else:
        layout: gl.constexpr = result.type.layout
        row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
        place = ((batch * T + start + row).to(gl.int64) * H + head) * D_TRUE
        mask = gl.expand_dims(row < length, 1) & gl.expand_dims(column < D_TRUE, 0)
        gl.store(pointer + gl.expand_dims(place, 1) + gl.expand_dims(column, 0), result, mask=mask)
