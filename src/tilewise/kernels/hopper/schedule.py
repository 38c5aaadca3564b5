"""Which tile a program works on next, and which key tiles a query tile walks.

Symbols in every kernel file of this folder:
    B, H_Q, H_KV, G     batch, query heads, KV heads, query heads per KV head
    D_K, D_V            head dims as the kernel works on them: powers of two; columns past the tensor's end read as zero
    GROUPS              consumer groups of a program, 64 query rows each
    ROWS                query rows of a tile: 64 GROUPS
    BLOCK_N             keys of a tile (two listed blocks of 64, when walks are lists)
    T_q, T_k            tokens of the call; query_length, key_length those of one sequence
Positions are local to the sequence; a query row t stands at position t + key_length - query_length.
"""

from tilewise.kernels.hopper.compat import aggregate, constexpr_function, gl, gluon

PLAN_WIDTH = gl.constexpr(8)  # int32 of a plan's row: see plan.py
LISTED_BLOCK = gl.constexpr(64)


@aggregate
class Schedule:
    """The order of the items of a call, and where their walks are described."""

    heads: gl.tensor  # B * H_Q (or B * H_KV)
    tiles: gl.tensor  # per head
    counter: gl.tensor  # pointer to a zero: items taken so far beyond each program's first
    section: gl.tensor  # heads whose keys and values share the L2 cache
    T_q: gl.tensor
    T_k: gl.tensor
    window: gl.tensor
    plan: gl.tensor  # packed calls: pointer to the tiles' places
    counts: gl.tensor  # lists: pointer to (masked steps, steps) of each list
    lists: gl.tensor
    list_capacity: gl.tensor
    CAUSAL: gl.constexpr
    WINDOW: gl.constexpr
    PACKED: gl.constexpr
    LIST: gl.constexpr

    @constexpr_function
    def __init__(
        self, heads, tiles, counter, section, T_q, T_k, window, plan, counts, lists, list_capacity, CAUSAL, WINDOW, PACKED, LIST
    ):  # fmt: skip
        self.heads = heads
        self.tiles = tiles
        self.counter = counter
        self.section = section
        self.T_q = T_q
        self.T_k = T_k
        self.window = window
        self.plan = plan
        self.counts = counts
        self.lists = lists
        self.list_capacity = list_capacity
        self.CAUSAL = gl.constexpr(CAUSAL)
        self.WINDOW = gl.constexpr(WINDOW)
        self.PACKED = gl.constexpr(PACKED)
        self.LIST = gl.constexpr(LIST)

    @gluon.jit
    def ranks(self):
        """Tiles of a head that have work: all, or as many as the plan says."""
        if self.PACKED:
            return gl.load(self.plan)
        return self.tiles

    @gluon.jit
    def take(self):
        """The next item: programs take work as they get done, so that none waits for the one with the longest walks."""
        return gl.num_programs(0) + gl.atomic_add(self.counter, 1, sem="relaxed")

    @gluon.jit
    def head_and_rank(self, item, ranks):
        """Heads in sections that share the L2 cache; within one, the tiles of one rank side by side."""
        per_section = self.section * ranks
        number = item // per_section
        rest = item - number * per_section
        size = gl.minimum(self.section, self.heads - number * self.section)
        rank = rest // size
        return number * self.section + rest - rank * size, rank

    @gluon.jit
    def place(self, rank, LONGEST_LAST: gl.constexpr):
        """Where the tile of one rank lies: start and length of its sequence on both sides, and its number within it.

        Ranks go from the longest walk to the shortest: a plan is sorted so; with LONGEST_LAST tiles are counted back.
        """
        if self.PACKED:
            row = self.plan + (rank + 1) * PLAN_WIDTH
            return (
                gl.load(row),
                gl.load(row + 1),
                gl.load(row + 2),
                gl.load(row + 3),
                gl.load(row + 4),
                gl.load(row + 5),
            )
        tile = self.tiles - 1 - rank if LONGEST_LAST else rank
        zero = tile * 0
        return zero, self.T_q, zero, self.T_k, tile, tile


@aggregate
class KeyWalk:
    """One item of the forward or of the query gradient: a query tile and the key tiles it visits."""

    batch: gl.tensor
    head: gl.tensor
    query_start: gl.tensor
    query_length: gl.tensor
    key_start: gl.tensor
    key_length: gl.tensor
    row_start: gl.tensor
    steps: gl.tensor  # at least one
    masked_steps: gl.tensor  # lists: steps that need a mask come first
    last: gl.tensor  # computed walks go down from this tile
    full_begin: gl.tensor  # keys in [full_begin, full_end) are seen by all rows
    full_end: gl.tensor
    list: gl.tensor
    LIST: gl.constexpr
    HALVES: gl.constexpr  # a step is two listed blocks
    BLOCK_N: gl.constexpr

    @constexpr_function
    def __init__(
        self, batch, head, query_start, query_length, key_start, key_length, row_start, steps, masked_steps, last,
        full_begin, full_end, list, LIST, BLOCK_N,
    ):  # fmt: skip
        self.batch = batch
        self.head = head
        self.query_start = query_start
        self.query_length = query_length
        self.key_start = key_start
        self.key_length = key_length
        self.row_start = row_start
        self.steps = steps
        self.masked_steps = masked_steps
        self.last = last
        self.full_begin = full_begin
        self.full_end = full_end
        self.list = list
        self.LIST = gl.constexpr(LIST)
        self.HALVES = gl.constexpr(LIST and BLOCK_N == 128)
        self.BLOCK_N = gl.constexpr(BLOCK_N)

    @gluon.jit
    def keys_of(self, step):
        """First keys of a step's two halves; those of a listed block that does not exist lie past the end."""
        if self.HALVES:
            return gl.load(self.list + 2 * step) * LISTED_BLOCK, gl.load(self.list + 2 * step + 1) * LISTED_BLOCK
        if self.LIST:
            one = gl.load(self.list + step) * LISTED_BLOCK
        else:
            one = (self.last - step) * self.BLOCK_N
        return one, one + self.BLOCK_N // 2

    @gluon.jit
    def needs_mask(self, step):
        if self.LIST:
            return step < self.masked_steps
        first = (self.last - step) * self.BLOCK_N
        return (first < self.full_begin) | (first + self.BLOCK_N > self.full_end)


@gluon.jit
def key_walk(
    schedule, item, ranks, H: gl.constexpr, LIST_G: gl.constexpr, ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The KeyWalk of one item. H: query heads; LIST_G: query heads that share a list."""
    head_index, rank = schedule.head_and_rank(item, ranks)
    batch = head_index // H
    head = head_index - batch * H
    query_start, query_length, key_start, key_length, tile, list_tile = schedule.place(rank, schedule.CAUSAL)
    row_start = tile * ROWS
    zero = rank * 0
    if schedule.LIST:
        index = (batch * (H // LIST_G) + head // LIST_G) * schedule.tiles + list_tile
        PER_STEP: gl.constexpr = 128 // BLOCK_N  # steps of the plan are pairs of blocks
        masked_steps = gl.load(schedule.counts + 2 * index) * PER_STEP
        steps = gl.load(schedule.counts + 2 * index + 1) * PER_STEP
        row = schedule.lists + index.to(gl.int64) * schedule.list_capacity
        last = zero
        full_begin = zero
        full_end = zero
    else:
        offset = key_length - query_length
        first_position = row_start + offset
        last_position = gl.minimum(row_start + ROWS, query_length) - 1 + offset
        end = key_length
        full_end = key_length
        begin = zero
        full_begin = zero
        if schedule.CAUSAL:
            end = gl.minimum(key_length, gl.maximum(last_position + 1, 0))
            full_end = gl.minimum(key_length, first_position + 1)
        if schedule.WINDOW:
            begin = gl.maximum(first_position - schedule.window + 1, 0) // BLOCK_N
            full_begin = gl.maximum(last_position - schedule.window + 1, 0)
        last = gl.maximum((end + BLOCK_N - 1) // BLOCK_N - 1, begin)
        steps = last - begin + 1
        masked_steps = zero
        row = schedule.lists
    return KeyWalk(
        batch, head, query_start, query_length, key_start, key_length, row_start, steps, masked_steps, last, full_begin,
        full_end, row, schedule.LIST, BLOCK_N,
    )  # fmt: skip


@aggregate
class RowWalk:
    """One item of the key gradient: a tile of keys of one KV head and the query tiles that it visits, head by head."""

    batch: gl.tensor
    kv_head: gl.tensor
    query_start: gl.tensor
    query_length: gl.tensor
    key_start: gl.tensor
    key_length: gl.tensor
    key_first: gl.tensor
    first: gl.tensor  # first query tile of a computed walk
    steps: gl.tensor  # per query head
    full_begin: gl.tensor  # rows in [full_begin, full_end) see all keys of the tile
    full_end: gl.tensor
    list: gl.tensor
    list_length: gl.tensor
    list_base: gl.tensor  # lists count query tiles through the call: the first one of this sequence
    LIST: gl.constexpr
    LIST_ROWS: gl.constexpr  # rows of a listed tile: 128, or 64 (two tiles a step)
    BLOCK_M: gl.constexpr

    @constexpr_function
    def __init__(
        self, batch, kv_head, query_start, query_length, key_start, key_length, key_first, first, steps, full_begin,
        full_end, list, list_length, list_base, LIST, LIST_ROWS, BLOCK_M,
    ):  # fmt: skip
        self.batch = batch
        self.kv_head = kv_head
        self.query_start = query_start
        self.query_length = query_length
        self.key_start = key_start
        self.key_length = key_length
        self.key_first = key_first
        self.first = first
        self.steps = steps
        self.full_begin = full_begin
        self.full_end = full_end
        self.list = list
        self.list_length = list_length
        self.list_base = list_base
        self.LIST = gl.constexpr(LIST)
        self.LIST_ROWS = gl.constexpr(LIST_ROWS)
        self.BLOCK_M = gl.constexpr(BLOCK_M)

    @gluon.jit
    def rows_of(self, step):
        """First rows of the two halves of a step's tile; a half that a list does not fill lies past the end."""
        if self.LIST:
            if self.LIST_ROWS == 64:
                one = (gl.load(self.list + 2 * step) - self.list_base) * 64
                more = 2 * step + 1 < self.list_length
                two = (gl.load(self.list + 2 * step + 1, mask=more, other=0) - self.list_base) * 64
                return one, gl.where(more, two, self.query_length)
            one = (gl.load(self.list + step) - self.list_base) * 128
            return one, one + 64
        one = (self.first + step) * self.BLOCK_M
        return one, one + self.BLOCK_M // 2

    @gluon.jit
    def needs_mask(self, one, two):
        HALF: gl.constexpr = self.BLOCK_M // 2
        return (one < self.full_begin) | (two < self.full_begin) | (gl.maximum(one, two) + HALF > self.full_end)


@gluon.jit
def row_walk(
    schedule, item, ranks, H_KV: gl.constexpr, LIST_HEADS: gl.constexpr, LIST_ROWS: gl.constexpr, KEYS: gl.constexpr,
    BLOCK_M: gl.constexpr,
):  # fmt: skip
    """The RowWalk of one item. LIST_HEADS: lists per batch, H_KV or 1. schedule.counts: where the transposed lists begin."""
    head_index, rank = schedule.head_and_rank(item, ranks)
    batch = head_index // H_KV
    kv_head = head_index - batch * H_KV
    query_start, query_length, key_start, key_length, tile, list_tile = schedule.place(rank, False)
    key_first = tile * KEYS
    offset = key_length - query_length
    zero = rank * 0
    begin = zero
    end = query_length
    full_begin = zero
    full_end = query_length
    if schedule.CAUSAL:
        begin = gl.maximum(key_first - offset, 0)
        full_begin = gl.maximum(key_first + KEYS - 1 - offset, 0)
    if schedule.WINDOW:
        end = gl.minimum(query_length, gl.maximum(key_first + KEYS - 1 + schedule.window - offset, 0))
        full_end = gl.minimum(query_length, gl.maximum(key_first + schedule.window - offset, 0))
    # the last tile of keys is ragged: every step needs a mask
    full_end = gl.where(key_first + KEYS > key_length, 0, full_end)
    first = begin // BLOCK_M
    row = schedule.lists
    length = zero
    base = zero
    if schedule.LIST:
        index = (batch * LIST_HEADS + kv_head * LIST_HEADS // H_KV).to(gl.int64) * schedule.tiles + list_tile
        # keys past the last sequence are in no list
        listed = query_length > 0
        list_begin = gl.load(schedule.counts + index, mask=listed, other=0)
        length = (gl.load(schedule.counts + index + 1, mask=listed, other=0) - list_begin).to(gl.int32)
        row = schedule.lists + list_begin
        if schedule.PACKED:
            base = gl.load(schedule.plan + (rank + 1) * PLAN_WIDTH + 6)
        steps = length if LIST_ROWS == 128 else (length + 1) // 2
    else:
        steps = gl.maximum((end + BLOCK_M - 1) // BLOCK_M - first, 0)
    return RowWalk(
        batch, kv_head, query_start, query_length, key_start, key_length, key_first, first, steps, full_begin, full_end,
        row, length, base, schedule.LIST, LIST_ROWS, BLOCK_M,
    )  # fmt: skip
