"""Small kernels that write down, on the device, what the Hopper kernels walk: tiles of packed sequences, lists of blocks.

Plain Triton. The host reads nothing back, so calls can be captured in a graph. Symbols: schedule.py. A "block" is 64 keys.
Launched on the current device: the caller makes it the tensors' own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PLAN_WIDTH = tl.constexpr(8)  # int32 of a plan's row
LISTED_BLOCK = tl.constexpr(64)  # keys
HIDDEN = tl.constexpr(1 << 24)  # a listed block past the end of every sequence
LARGEST_SORTED = 8192  # tiles that one program holds in registers
LISTED_ROWS = (64, 128)  # query rows that a list may be for
TABLE_WIDTH = tl.constexpr(
    8
)  # int32 of a sequence: tiles before it, query start and length, key start and length, base


def packed_plan(
    cu_q: Tensor, cu_k: Tensor, T_q: int, T_k: int, rows: int, key_side: bool, causal: bool, window: int = 0,
    list_rows: int = 0,
) -> Tensor:  # fmt: skip
    """Where the tiles of a packed call lie, from the longest walk to the shortest.

    The last sequence is the tail past cu_seqlens[-1], which sees nothing of the other side: length 0 there.

    Args:
        cu_q: int32 `[N+1]` boundaries as users give them; made safe as `layout.safe_boundaries` does. cu_k: the same.
        rows: tokens of a tile; tiles restart at each sequence.
        key_side: cut the key axis instead of the query axis.
        window: keys that a row sees, itself included; 0: no window.
        list_rows: query rows of the lists of a selection (64 or 128); 0: none.

    Returns:
        int32 `[1 + upper, 8]`, `upper = T // rows + N + 1` with T of the side that is cut. Row 0 starts with the number of
        tiles. Row 1 + r: start and length of the sequence on the query side, on the key side, number of the tile within
        its sequence, number through the call (unsorted), number of query tiles of `list_rows` rows before the sequence, 0.
        Ranks r by falling walk (keys or queries that the tile's tokens see), ties by rising tile number; by tile number
        alone when upper is past LARGEST_SORTED. Surplus rows are zero.
    """
    if cu_q.shape != cu_k.shape:
        raise ValueError(f"cu_k: expected as many boundaries as cu_q ({cu_q.shape[0]}), got {cu_k.shape[0]}")
    sequences = cu_q.shape[0]  # N and the tail
    upper = (T_k if key_side else T_q) // rows + sequences
    sort = upper <= LARGEST_SORTED
    block = max(256, 1 << (upper - 1).bit_length()) if sort else 1024
    plan = torch.empty((1 + upper, PLAN_WIDTH.value), dtype=torch.int32, device=cu_q.device)
    table = torch.empty((sequences, TABLE_WIDTH.value), dtype=torch.int32, device=cu_q.device)
    order = torch.empty(block if sort else 1, dtype=torch.int64, device=cu_q.device)
    longest = T_q if key_side else T_k
    packed_plan_kernel[(1,)](
        cu_q.contiguous(), cu_k.contiguous(), plan, table, order, sequences, T_q, T_k, upper, min(window, max(T_k, 1)),
        sequences.bit_length(), longest, (longest.bit_length() + 1) // 2, list_rows,
        ROWS=rows, KEY_SIDE=key_side, CAUSAL=causal, WINDOW=window > 0, SORT=sort, BLOCK=block,
        num_warps=max(4, min(32, block // 128)),
    )  # fmt: skip
    return plan


def list_plan(
    ids: Tensor, T_q: int, T_k: int, block_q: int, causal: bool, window: int = 0, plan: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The walks of a selection's query tiles: what each visits of its list, steps that need a mask first.

    A step is two blocks of 64 keys. Blocks that no row of the tile sees are dropped; a block is "masked" when some row of
    the tile does not see all of its 64 keys. A list holds the masked blocks, rising, HIDDEN if the number of blocks is odd,
    then the full blocks, rising; a masked part of odd length takes the first full block in. An empty list is one step of
    HIDDEN: a walk has at least one.

    Args:
        ids: int32 `[B, n_tiles, H_sel, n]`, blocks counted within the sequence; -1 and what lies out of range are no block.
        block_q: query rows of a tile, 64 or 128.
        window: keys that a row sees, itself included; 0: no window.
        plan: of a packed call: `packed_plan(..., rows=block_q, key_side=False, ...)`.

    Returns:
        `(counts, lists)`: int32 `[lists, 2]`, (masked steps, steps); int32 `[lists, capacity]`, capacity even and at least
        n + 2, HIDDEN where unused. List of (b, h, tile): `(b * H_sel + h) * tiles + tile`, `tiles` of the call, not of `ids`:
        `cdiv(T_q, block_q)`, or `plan.shape[0] - 1` (the tail has tiles too). A tile that ids does not have is empty.
    """
    if block_q not in LISTED_ROWS:
        raise ValueError(f"block_q: expected one of {LISTED_ROWS}, got {block_q}")
    batch, given, heads, n = ids.shape
    tiles = -(-T_q // block_q) if plan is None else plan.shape[0] - 1
    capacity = n + 2 + n % 2
    counts = torch.empty((batch * heads * tiles, 2), dtype=torch.int32, device=ids.device)
    lists = torch.empty((batch * heads * tiles, capacity), dtype=torch.int32, device=ids.device)
    if counts.shape[0] == 0:
        return counts, lists
    block = 1 << (capacity - 1).bit_length()
    list_plan_kernel[(tiles, heads, batch)](
        ids.contiguous(), ids if plan is None else plan, counts, lists, T_q, T_k, min(window, max(T_k, 1)), given, n, capacity,
        ROWS=block_q, CAUSAL=causal, WINDOW=window > 0, PACKED=plan is not None, BLOCK=block,
        num_warps=max(1, min(32, block // 256)),
    )  # fmt: skip
    return counts, lists


@triton.jit
def _larger(one, two):
    return tl.maximum(one, two)


@triton.jit
def _boundaries(cu_ptr, index, sequences, T, low):
    """Boundaries number `index`, in [low, T] and never falling; those past the last given one are T."""
    value = tl.load(cu_ptr + index, mask=index < sequences, other=T)
    value = tl.minimum(tl.maximum(value, low), T).to(tl.int32)
    return tl.associative_scan(value, 0, _larger)


@triton.jit
def _write_table(
    cu_q_ptr, cu_k_ptr, table_ptr, sequences, T_q, T_k, list_rows,
    ROWS: tl.constexpr, KEY_SIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write each sequence's row of the table. Returns the number of tiles."""
    tiles = tl.zeros((), tl.int32)
    base = tl.zeros((), tl.int32)
    low_q = tl.zeros((), tl.int32)
    low_k = tl.zeros((), tl.int32)
    for first in range(0, sequences, BLOCK):
        sequence = first + tl.arange(0, BLOCK)
        query_start = _boundaries(cu_q_ptr, sequence, sequences, T_q, low_q)
        key_start = _boundaries(cu_k_ptr, sequence, sequences, T_k, low_k)
        low_q = tl.max(query_start, 0)
        low_k = tl.max(key_start, 0)
        # ends are the starts of the next ones; where these fall, the start holds
        query_length = tl.maximum(_boundaries(cu_q_ptr, sequence + 1, sequences, T_q, 0), query_start) - query_start
        key_length = tl.maximum(_boundaries(cu_k_ptr, sequence + 1, sequences, T_k, 0), key_start) - key_start
        tail = sequence == sequences - 1
        if KEY_SIDE:
            query_length = tl.where(tail, 0, query_length)
            count = (key_length + ROWS - 1) // ROWS
        else:
            key_length = tl.where(tail, 0, key_length)
            count = (query_length + ROWS - 1) // ROWS
        listed = query_length * 0
        if list_rows > 0:
            listed = (query_length + list_rows - 1) // list_rows
        inside = sequence < sequences
        count = tl.where(inside, count, 0)
        listed = tl.where(inside, listed, 0)
        row = table_ptr + sequence * TABLE_WIDTH
        tl.store(row, tiles + tl.cumsum(count, 0) - count, mask=inside)
        tl.store(row + 1, query_start, mask=inside)
        tl.store(row + 2, query_length, mask=inside)
        tl.store(row + 3, key_start, mask=inside)
        tl.store(row + 4, key_length, mask=inside)
        tl.store(row + 5, base + tl.cumsum(listed, 0) - listed, mask=inside)
        tiles += tl.sum(count, 0)
        base += tl.sum(listed, 0)
    return tiles


@triton.jit
def _find(tile, table_ptr, sequences, search_steps):
    """Row of the table of each tile's sequence: the last one with no more tiles before it than this; never an empty one."""
    low = tile * 0
    high = low + sequences
    for _ in range(search_steps):
        middle = (low + high) // 2
        below = tl.load(table_ptr + middle * TABLE_WIDTH) <= tile
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    return table_ptr + low * TABLE_WIDTH


@triton.jit
def _walk_length(
    row, tile, window, ROWS: tl.constexpr, KEY_SIDE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr
):  # fmt: skip
    """Keys that some row of a query tile sees, or queries that see some key of a key tile."""
    query_length = tl.load(row + 2)
    key_length = tl.load(row + 4)
    offset = key_length - query_length
    first = (tile - tl.load(row)) * ROWS
    begin = tile * 0
    if KEY_SIDE:
        last = tl.minimum(first + ROWS, key_length) - 1
        end = query_length
        if CAUSAL:
            begin = tl.maximum(first - offset, 0)
        if WINDOW:
            end = tl.minimum(query_length, last + window - offset)
    else:
        last = tl.minimum(first + ROWS, query_length) - 1
        end = key_length
        if CAUSAL:
            end = tl.minimum(key_length, last + offset + 1)
        if WINDOW:
            begin = tl.maximum(first + offset - window + 1, 0)
    return tl.maximum(end - begin, 0)


@triton.jit
def _sorted(tile, key, order_ptr, passes, BLOCK: tl.constexpr):
    """Tiles by rising key, stable: two bits of the key a pass, the running counts of its four digits in one 64-bit scan."""
    entry = (key.to(tl.int64) << 32) | tile.to(tl.int64)
    slot = tl.arange(0, BLOCK)
    for number in range(passes):
        field = ((entry >> (32 + 2 * number)) & 3) * 16
        mine = tl.full([BLOCK], 1, tl.int64) << field
        total = tl.sum(mine, 0)
        # number of entries with a smaller digit, in each digit's field: all four sums stay below 2^16
        smaller = (total << 16) + (total << 32) + (total << 48)
        place = ((tl.cumsum(mine, 0) - mine + smaller) >> field) & 0xFFFF
        tl.debug_barrier()
        tl.store(order_ptr + place, entry)
        tl.debug_barrier()
        entry = tl.load(order_ptr + slot)
    return (entry & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _write_rows(plan_ptr, rank, tile, tiles, upper, table_ptr, sequences, search_steps):
    row = _find(tile, table_ptr, sequences, search_steps)
    out = plan_ptr + (rank + 1) * PLAN_WIDTH
    inside = rank < upper
    real = tile < tiles
    for column in tl.static_range(4):
        tl.store(out + column, tl.load(row + 1 + column, mask=real, other=0), mask=inside)
    tl.store(out + 4, tl.where(real, tile - tl.load(row), 0), mask=inside)
    tl.store(out + 5, tl.where(real, tile, 0), mask=inside)
    tl.store(out + 6, tl.load(row + 5, mask=real, other=0), mask=inside)
    tl.store(out + 7, tile * 0, mask=inside)


@triton.jit(
    do_not_specialize=[
        "sequences", "T_q", "T_k", "upper", "window", "search_steps", "longest", "passes", "list_rows"
    ]
)  # fmt: skip
def packed_plan_kernel(
    cu_q_ptr, cu_k_ptr, plan_ptr, table_ptr, order_ptr, sequences: tl.int32, T_q: tl.int32, T_k: tl.int32, upper: tl.int32,
    window: tl.int32, search_steps: tl.int32, longest: tl.int32, passes: tl.int32, list_rows: tl.int32,
    ROWS: tl.constexpr, KEY_SIDE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SORT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program. sequences: N and the tail; longest: tokens of the other side."""
    tiles = _write_table(cu_q_ptr, cu_k_ptr, table_ptr, sequences, T_q, T_k, list_rows, ROWS, KEY_SIDE, BLOCK)
    column = tl.arange(0, PLAN_WIDTH)
    tl.store(plan_ptr + column, tl.where(column == 0, tiles, 0))
    tl.debug_barrier()
    slot = tl.arange(0, BLOCK)
    if SORT:
        row = _find(slot, table_ptr, sequences, search_steps)
        length = _walk_length(row, slot, window, ROWS, KEY_SIDE, CAUSAL, WINDOW)
        # surplus tiles stay last: numbered past the tail's, they lie beyond its end and have no walk either
        tile = _sorted(slot, longest - length, order_ptr, passes, BLOCK)
        _write_rows(plan_ptr, slot, tile, tiles, upper, table_ptr, sequences, search_steps)
    else:
        for first in range(0, upper, BLOCK):
            _write_rows(plan_ptr, first + slot, first + slot, tiles, upper, table_ptr, sequences, search_steps)


@triton.jit
def _block_kind(
    block, first_position, last_position, key_length, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr
):  # fmt: skip
    """Does some row at positions first..last see some key of the block, and do all rows see all 64?"""
    exists = (block >= 0) & (block < (key_length + LISTED_BLOCK - 1) // LISTED_BLOCK)
    first = tl.where(exists, block, 0) * LISTED_BLOCK
    seen = exists
    full = first + LISTED_BLOCK <= key_length
    if CAUSAL:
        seen = seen & (first <= last_position)
        full = full & (first + LISTED_BLOCK - 1 <= first_position)
    if WINDOW:
        seen = seen & (tl.minimum(first + LISTED_BLOCK, key_length) > first_position - window + 1)
        full = full & (first > last_position - window)
    return seen, seen & full


@triton.jit(do_not_specialize=["T_q", "T_k", "window", "given", "n", "capacity"])
def list_plan_kernel(
    ids_ptr, plan_ptr, counts_ptr, lists_ptr, T_q: tl.int32, T_k: tl.int32, window: tl.int32, given: tl.int32, n: tl.int32,
    capacity: tl.int32,
    ROWS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per list. given: tiles that ids has."""
    rank = tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    tiles = tl.num_programs(0)
    heads = tl.num_programs(1)
    tile = rank
    first_row = rank * ROWS
    query_length = T_q
    key_length = T_k
    if PACKED:
        real = rank < tl.load(plan_ptr)
        row = plan_ptr + (rank + 1) * PLAN_WIDTH
        query_length = tl.load(row + 1)
        key_length = tl.load(row + 3)
        first_row = tl.load(row + 4) * ROWS
        # ranks past the last tile stand for the tile numbers that nobody has: their rows are zero, no key is seen
        tile = tl.where(real, tl.load(row + 5), rank)
    offset = key_length - query_length
    first_position = first_row + offset
    last_position = tl.minimum(first_row + ROWS, query_length) - 1 + offset

    slot = tl.arange(0, BLOCK)
    ids_row = ids_ptr + ((batch.to(tl.int64) * given + tile) * heads + head) * n
    ids = tl.load(ids_row + slot, mask=(slot < n) & (tile < given), other=-1)
    seen, full = _block_kind(ids, first_position, last_position, key_length, window, CAUSAL, WINDOW)
    masked = seen & ~full
    masked_count = tl.sum(masked.to(tl.int32), 0)
    count = tl.sum(seen.to(tl.int32), 0)
    highest = tl.associative_scan(tl.where(seen, ids, -1), 0, _larger)
    falls = tl.sum((seen & (ids < highest)).to(tl.int32), 0)
    if falls == 0:
        masked_place = tl.cumsum(masked.to(tl.int32), 0) - 1
        full_place = tl.cumsum(full.to(tl.int32), 0) - 1
    else:
        # a list in no order: each block's place is the number of blocks of its kind that come before it
        masked_place = slot * 0
        full_place = slot * 0
        for other in range(n):
            block = tl.load(ids_row + other)
            block_seen, block_full = _block_kind(
                block, first_position, last_position, key_length, window, CAUSAL, WINDOW
            )
            before = (block < ids) | ((block == ids) & (other < slot))
            full_place += (before & block_full).to(tl.int32)
            masked_place += (before & block_seen & ~block_full).to(tl.int32)

    index = (batch * heads + head) * tiles + tile
    hidden = count % 2  # one HIDDEN behind the masked blocks
    masked_entries = masked_count + hidden
    entries = count + hidden
    list_row = lists_ptr + index.to(tl.int64) * capacity
    tl.store(list_row + masked_place, ids, mask=masked)
    tl.store(list_row + masked_entries + full_place, ids, mask=full)
    unused = ((slot >= masked_count) & (slot < masked_entries)) | (slot >= entries)
    tl.store(list_row + slot, tl.full([BLOCK], HIDDEN, tl.int32), mask=unused & (slot < capacity))
    # an empty list is one masked step
    tl.store(counts_ptr + 2 * index, tl.where(entries > 0, (masked_entries + 1) // 2, 1))
    tl.store(counts_ptr + 2 * index + 1, tl.maximum(entries // 2, 1))
