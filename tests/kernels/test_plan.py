"""What the Hopper kernels walk, against brute force over masks: tiles of packed sequences, and lists of key blocks."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tilewise.layout import Visibility, block_table, safe_boundaries

plans = pytest.importorskip("tilewise.kernels.hopper.plan")

pytestmark = pytest.mark.interpret
BLOCK_K = 64


@dataclass(frozen=True)
class Layout:
    """Lengths of a call and what its rows see."""

    name: str
    query_length: int
    key_length: int
    causal: bool = False
    window: int = 0
    cu_q: tuple[int, ...] | None = None
    cu_k: tuple[int, ...] | None = None

    def boundaries(self) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.cu_q, dtype=torch.int32), torch.tensor(self.cu_k, dtype=torch.int32)

    def visibility(self) -> Visibility:
        cu_q, cu_k = self.boundaries() if self.cu_q is not None else (None, None)
        return Visibility(self.query_length, self.key_length, self.causal, self.window or None, cu_q, cu_k)

    def mask(self) -> Tensor:
        """bool `[T_q, T_k]`; a row before the first sequence, which no tile holds, sees nothing."""
        mask = self.visibility().to_mask("cpu")
        mask[: int(self.visibility().boundaries("cpu")[0][0])] = False
        return mask


EQUAL = (0, 0, 70, 70, 200, 331, 331)
SINGLE = [
    Layout("full", 150, 200),
    Layout("causal", 256, 256, causal=True),
    Layout("causal, ragged", 201, 333, causal=True),
    Layout("more queries", 333, 201, causal=True),
    Layout("one row", 1, 700, causal=True),
    Layout("window", 300, 500, causal=True, window=65),
    Layout("window of one", 200, 200, causal=True, window=1),
    Layout("wide window, more queries", 400, 190, causal=True, window=150),
    Layout("window past everything", 130, 260, causal=True, window=2**40),
]
PACKED = [
    Layout("packed full", 331, 400, cu_q=EQUAL, cu_k=(0, 64, 64, 80, 210, 300, 400)),
    Layout("packed causal", 331, 331, causal=True, cu_q=EQUAL, cu_k=EQUAL),
    Layout("packed window", 331, 400, causal=True, window=77, cu_q=EQUAL, cu_k=(0, 30, 30, 110, 128, 390, 400)),
    Layout("tail", 400, 431, causal=True, cu_q=EQUAL, cu_k=EQUAL),
    Layout("tail, full", 400, 331, cu_q=EQUAL, cu_k=EQUAL),
    Layout("falling", 300, 300, causal=True, cu_q=(0, 150, 90, 260, 20, 290), cu_k=(0, 100, 300, 200, 250, 270)),
    Layout("out of range", 300, 280, cu_q=(-5, 150, 4000, 260), cu_k=(-(2**31), 100, 200, 2**31 - 1)),
    Layout("late start", 300, 280, causal=True, cu_q=(40, 150, 290), cu_k=(7, 100, 280)),
    Layout("nothing but a tail", 150, 140, causal=True, cu_q=(0, 0), cu_k=(0, 0)),
]  # fmt: skip


def names(layout: Layout) -> str:
    return layout.name


def random_layout(generator: random.Random, sequences: int) -> Layout:
    def boundaries(length: int) -> tuple[int, ...]:
        values = sorted(
            generator.choice((0, length, generator.randint(-20, length + 20))) for _ in range(sequences + 1)
        )
        if generator.random() < 0.3:
            generator.shuffle(values)
        return tuple(values)

    query_length, key_length = generator.randint(1, 600), generator.randint(1, 600)
    causal = generator.random() < 0.7
    window = generator.choice((0, generator.randint(1, 200))) if causal else 0
    return Layout("random", query_length, key_length, causal, window, boundaries(query_length), boundaries(key_length))


def expected_plan(layout: Layout, rows: int, key_side: bool, list_rows: int, ordered: bool = True) -> Tensor:
    """The plan's rows, from the mask: one per tile, then sorted."""
    cu_q, cu_k = (
        [*safe_boundaries(torch.tensor(values), length).tolist(), length]
        for values, length in ((layout.cu_q, layout.query_length), (layout.cu_k, layout.key_length))
    )
    mask = layout.mask()
    found = []
    base = 0
    for sequence in range(len(cu_q) - 1):
        query_length, key_length = (cu[sequence + 1] - cu[sequence] for cu in (cu_q, cu_k))
        if sequence == len(cu_q) - 2:
            query_length, key_length = (0, key_length) if key_side else (query_length, 0)
        start, length = (cu_k[sequence], key_length) if key_side else (cu_q[sequence], query_length)
        for tile in range(-(-length // rows)):
            tokens = slice(start + tile * rows, start + min((tile + 1) * rows, length))
            seen = mask[:, tokens].any(1) if key_side else mask[tokens].any(0)
            place = [cu_q[sequence], query_length, cu_k[sequence], key_length, tile, len(found), base, 0]
            found.append((int(seen.sum()), place))
        if list_rows:
            base += -(-query_length // list_rows)
    if ordered:
        found.sort(key=lambda entry: -entry[0])  # stable
    upper = (layout.key_length if key_side else layout.query_length) // rows + len(cu_q) - 1
    plan = torch.zeros(1 + upper, 8, dtype=torch.int32)
    plan[0, 0] = len(found)
    for rank, (_, place) in enumerate(found):
        plan[1 + rank] = torch.tensor(place)
    return plan


def check_plan(layout: Layout, rows: int, key_side: bool, list_rows: int, ordered: bool = True) -> None:
    plan = plans.packed_plan(
        *layout.boundaries(), layout.query_length, layout.key_length, rows, key_side, layout.causal, layout.window,
        list_rows,
    )  # fmt: skip
    assert plan.dtype == torch.int32
    assert torch.equal(plan, expected_plan(layout, rows, key_side, list_rows, ordered))


@pytest.mark.parametrize("key_side", [False, True], ids=["queries", "keys"])
@pytest.mark.parametrize("layout", PACKED, ids=names)
def test_packed_plan(layout: Layout, key_side: bool) -> None:
    for rows, list_rows in ((64, 128), (128, 0)):
        check_plan(layout, rows, key_side, list_rows)


@pytest.mark.parametrize("seed", range(12))
def test_packed_plan_of_random_boundaries(seed: int) -> None:
    generator = random.Random(seed)
    layout = random_layout(generator, generator.randint(1, 9))
    check_plan(layout, generator.choice((64, 128, 192)), generator.random() < 0.5, generator.choice((0, 64, 128)))


def test_packed_plan_of_many_sequences() -> None:
    generator = random.Random(0)
    check_plan(random_layout(generator, 300), 16, False, 64)


def test_packed_plan_past_the_largest_that_is_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    # more sequences than one block of the kernel, so that its sums run on from block to block
    monkeypatch.setattr(plans, "LARGEST_SORTED", 8)
    rising = [index // 4 for index in range(1500)]
    rising[1024] = 0  # and a boundary that falls where a block begins
    layout = Layout("many", 390, 390, causal=True, cu_q=tuple(rising), cu_k=tuple(rising))
    check_plan(layout, 64, False, 64, ordered=False)
    check_plan(layout, 64, True, 64, ordered=False)


def test_packed_plan_needs_as_many_boundaries_on_both_sides() -> None:
    with pytest.raises(ValueError, match="cu_k: expected as many boundaries as cu_q"):
        plans.packed_plan(torch.tensor([0, 1]), torch.tensor([0, 1, 2]), 2, 2, 64, False, True)


def make_ids(batch: int, tiles: int, heads: int, n: int, blocks: int, order: str) -> Tensor:
    """Lists of unique ids, some absent; `order`: "rising" as producers write them, or "any" with bad ids everywhere."""
    ids = torch.full((batch, tiles, heads, n), -1, dtype=torch.int32)
    for index in torch.cartesian_prod(torch.arange(batch), torch.arange(tiles), torch.arange(heads)).tolist():
        chosen = torch.randperm(blocks + 2)[: random.choice((0, 1, n // 2, n, n))]
        if order == "rising":
            chosen = chosen.sort().values
        place = torch.arange(n) if order == "rising" else torch.randperm(n)
        ids[tuple(index)][place[: len(chosen)]] = chosen.int()
    if order == "any":
        bad = torch.tensor([-1, -7, -(2**31), 2**31 - 1, 2**26, 2**25 + 1], dtype=torch.int32)
        swap = torch.rand(ids.shape) < 0.2
        ids[swap] = bad[torch.randint(0, len(bad), (int(swap.sum()),))]
    return ids


def expected_list(seen: Tensor, ids: list[int], capacity: int) -> tuple[list[int], list[int]]:
    """One list from the mask of a tile's rows and its sequence's keys."""
    hidden = plans.HIDDEN.value
    masked, full = [], []
    for block in sorted(ids):
        part = seen[:, block * BLOCK_K : (block + 1) * BLOCK_K] if 0 <= block * BLOCK_K < seen.shape[1] else seen[:, :0]
        if part.any():
            (full if part.all() and part.shape[1] == BLOCK_K else masked).append(block)
    if (len(masked) + len(full)) % 2:
        masked.append(hidden)
    entries = masked + full
    counts = [-(-len(masked) // 2), len(entries) // 2] if entries else [1, 1]
    return counts, entries + [hidden] * (capacity - len(entries))


def check_lists(layout: Layout, ids: Tensor, block_q: int) -> None:
    plan = None
    if layout.cu_q is not None:
        plan = plans.packed_plan(
            *layout.boundaries(), layout.query_length, layout.key_length, block_q, False, layout.causal, layout.window
        )
    counts, lists = plans.list_plan(
        ids, layout.query_length, layout.key_length, block_q, layout.causal, layout.window, plan
    )
    visibility = layout.visibility()
    cu_q, cu_k = visibility.boundaries("cpu")
    rows = block_table(cu_q, layout.query_length, block_q)
    mask = visibility.to_mask("cpu")
    batch, given, heads, n = ids.shape
    capacity = lists.shape[1]
    assert capacity % 2 == 0
    assert capacity >= n + 2
    tiles = -(-layout.query_length // block_q) if plan is None else plan.shape[0] - 1
    assert counts.shape == (batch * heads * tiles, 2)
    assert lists.shape == (batch * heads * tiles, capacity)
    assert counts.dtype == lists.dtype == torch.int32
    for b in range(batch):
        for h in range(heads):
            for tile in range(tiles):
                seen = mask[:0, :0]
                if tile < min(int(rows.offset[-1]), given):
                    keys = slice(*cu_k[rows.sequence[tile] :][:2].tolist())
                    seen = mask[int(rows.start[tile]) : int(rows.end[tile]), keys]
                wanted = ids[b, tile, h].tolist() if tile < given else []
                index = (b * heads + h) * tiles + tile
                expected = expected_list(seen, wanted, capacity)
                assert (counts[index].tolist(), lists[index].tolist()) == expected, f"list {b}, {h}, {tile}"


@pytest.mark.parametrize("order", ["rising", "any"])
@pytest.mark.parametrize("layout", SINGLE + PACKED, ids=names)
def test_lists(layout: Layout, order: str) -> None:
    blocks = -(-layout.key_length // BLOCK_K)
    for block_q, n in ((64, 7), (128, blocks + 2)):
        tiles = layout.query_length // block_q + (1 if layout.cu_q is None else len(layout.cu_q) - 1)
        batch = 2 if layout.cu_q is None else 1
        check_lists(layout, make_ids(batch, tiles, 2, n, blocks, order), block_q)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 15, 16, 17, 31, 40])
def test_lists_of_every_length(n: int) -> None:
    layout = Layout("long", 130, 2500, causal=True, window=1700)
    check_lists(layout, make_ids(1, 2, 3, n, 40, "any"), 64)
    check_lists(layout, make_ids(1, 2, 1, n, 40, "rising"), 128)


@pytest.mark.parametrize("window", [0, 1, 63, 64, 65, 127, 128, 129, 192])
def test_lists_where_a_block_just_is_or_is_not_seen(window: int) -> None:
    ids = torch.arange(5, dtype=torch.int32).view(1, 1, 1, 5)
    for rows in (1, 64):
        for key_length in (*range(126, 131), *range(190, 195), 255, 256, 257):
            check_lists(Layout("edges", rows, key_length, causal=True, window=window), ids, 64)


@pytest.mark.parametrize("seed", range(8))
def test_lists_of_random_boundaries(seed: int) -> None:
    generator = random.Random(seed)
    layout = random_layout(generator, generator.randint(1, 6))
    block_q = generator.choice((64, 128))
    tiles = layout.query_length // block_q + len(layout.cu_q or ()) - 1
    ids = make_ids(1, tiles, 2, generator.randint(1, 12), -(-layout.key_length // BLOCK_K), "any")
    check_lists(layout, ids, block_q)


def test_lists_may_be_strided_or_fewer_than_the_tiles() -> None:
    layout = Layout("causal", 256, 256, causal=True)
    ids = make_ids(2, 3, 4, 6, 4, "any").transpose(1, 2)[:, :, :, ::2]
    assert not ids.is_contiguous()
    check_lists(layout, ids, 64)
    check_lists(layout, ids, 128)


def test_lists_need_tiles_of_the_kernels() -> None:
    with pytest.raises(ValueError, match="block_q: expected one of"):
        plans.list_plan(torch.zeros(1, 1, 1, 1, dtype=torch.int32), 32, 64, 32, False)
