"""Selections against loops: masks, density, transposed lists, and the errors of check."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerances import DOUBLE

from tilewise import Selection
from tilewise.layout import Visibility

CU_Q = torch.tensor([0, 5, 5, 13], dtype=torch.int32)
CU_K = torch.tensor([0, 7, 11, 17], dtype=torch.int32)
VISIBILITIES = {
    "plain": Visibility(13, 17),
    "causal": Visibility(13, 17, causal=True),
    "window": Visibility(13, 17, causal=True, window=4),
    "more queries": Visibility(17, 11, causal=True),
    "packed": Visibility(13, 17, True, None, CU_Q, CU_K),
}
visibilities = pytest.mark.parametrize("visibility", VISIBILITIES.values(), ids=VISIBILITIES.keys())


def sequences(visibility):
    if not visibility.packed:
        return [(0, visibility.query_length, 0, visibility.key_length)]
    q, k = visibility.cu_seqlens_q.tolist(), visibility.cu_seqlens_k.tolist()
    return [(q[i], q[i + 1], k[i], k[i + 1]) for i in range(len(q) - 1)]


def random_selection(visibility, block_q, block_k, heads=2, batch=2, width=4, seed=0):
    """Unique ids in random order with -1 among them, and more tiles than needed."""
    generator = torch.Generator().manual_seed(seed)
    lists = []
    for q_start, q_stop, k_start, k_stop in sequences(visibility):
        blocks = -(-(k_stop - k_start) // block_k)
        for _ in range(-(-(q_stop - q_start) // block_q)):
            draw = [torch.randperm(max(blocks, width), generator=generator)[:width] for _ in range(batch * heads)]
            ids = torch.stack(draw).view(batch, heads, width)
            lists.append(torch.where(ids < blocks, ids, -1))
    lists.append(torch.zeros(batch, heads, width, dtype=torch.int64))
    return Selection.from_blocks(torch.stack(lists, 1), block_q=block_q, block_k=block_k, visibility=visibility)


def slow_pairs(selection):
    """(batch, head, row, key, tile, block through the call) of every listed pair, visible or not."""
    tile, first_block = 0, 0
    for q_start, q_stop, k_start, k_stop in sequences(selection.visibility):
        blocks = -(-(k_stop - k_start) // selection.block_k)
        for begin in range(q_start, q_stop, selection.block_q):
            rows = range(begin, min(begin + selection.block_q, q_stop))
            for b in range(selection.ids.shape[0]):
                for h in range(selection.ids.shape[2]):
                    for block in selection.ids[b, tile, h].tolist():
                        if block < 0:
                            continue
                        start = k_start + block * selection.block_k
                        for key in range(start, min(start + selection.block_k, k_stop)):
                            for row in rows:
                                yield b, h, row, key, tile, first_block + block
            tile += 1
        first_block += blocks


@visibilities
@pytest.mark.parametrize(("block_q", "block_k"), [(4, 3), (3, 5), (1, 2), (7, 1)])
def test_mask_density_and_transpose(visibility, block_q, block_k):
    selection = random_selection(visibility, block_q, block_k)
    batch, _, heads, _ = selection.ids.shape
    visible = visibility.to_mask("cpu")
    mask = torch.zeros(batch, heads, *visible.shape, dtype=torch.bool)
    tiles_of = {}
    for b, h, row, key, tile, block in slow_pairs(selection):
        mask[b, h, row, key] = visible[row, key]
        tiles_of.setdefault((b, h, block), set()).add(tile)
    assert torch.equal(selection.to_mask(), mask)
    expected = mask.sum().double() / (visible.sum() * batch * heads)
    torch.testing.assert_close(selection.density, expected, **DOUBLE)
    transposed = selection.transpose()
    blocks = selection.tables()[1].count
    assert (transposed.batch, transposed.heads, transposed.blocks) == (batch, heads, blocks)
    for b in range(batch):
        for h in range(heads):
            for block in range(blocks):
                assert transposed.list_of(b, h, block).tolist() == sorted(tiles_of.get((b, h, block), ()))
    assert selection.check() is selection


@given(st.integers(0, 50), st.integers(1, 6), st.integers(1, 6))
def test_transposing_keeps_every_entry(seed, block_q, block_k):
    selection = random_selection(VISIBILITIES["packed"], block_q, block_k, seed=seed)
    needed = int(selection.tables()[0].offset[-1])
    assert int(selection.transpose().offsets[-1]) == int((selection.ids[:, :needed] >= 0).sum())


def test_members_ignores_ids_out_of_range():
    ids = torch.tensor([[[[2, -1, 9, -7, 0]], [[1, 1, -1, -1, -1]]]])
    selection = Selection.from_blocks(ids, block_q=4, block_k=4)
    bits = selection.members(torch.tensor([1, 0, 5]), 3)
    assert bits[0, :, 0].tolist() == [[False, True, False], [True, False, True], [False, False, False]]


def test_token_lists():
    ids = torch.tensor([[[0, -1], [1, 0], [3, 2]]])
    selection = Selection.from_tokens(ids, visibility=Visibility(3, 5, causal=True))
    assert (selection.kind, selection.block_q, selection.block_k) == ("token", 1, 1)
    assert selection.ids.shape == (1, 3, 1, 2) and selection.ids.dtype == torch.int32
    assert selection.to_mask()[0, 0].nonzero().tolist() == [[0, 0], [1, 0], [1, 1], [2, 2], [2, 3]]
    assert Selection.from_blocks(ids[:, :, None], block_q=1, block_k=2).kind == "block"


def test_density_where_nothing_is_visible():
    ids = torch.zeros(1, 2, 1, 1, dtype=torch.int32)
    selection = Selection.from_blocks(ids, block_q=4, block_k=4, visibility=Visibility(7, 0, causal=True))
    assert float(selection.density) == 1.0


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[5, -1], [0, 1]], r"ids: expected -1 or 0 \.\. 4 for query tile 0, got 5"),
        ([[0, 1], [-2, 1]], r"ids: expected -1 or 0 \.\. 4 for query tile 1, got -2"),
        ([[0, 1], [3, 3]], r"ids: expected each block once in a list, got 3 twice"),
        ([[0, 1]], r"ids: expected at least 2 query tiles of 8 rows, got 1"),
    ],
)
def test_check_names_the_wrong_value(ids, message):
    ids = torch.tensor(ids)[None, :, None]
    selection = Selection.from_blocks(ids, block_q=8, block_k=4, visibility=Visibility(13, 17))
    with pytest.raises(ValueError, match=message):
        selection.check()


def test_ids_are_local_to_the_sequence():
    visibility = Visibility(13, 17, True, None, CU_Q, CU_K)
    ids = torch.zeros(1, 4, 1, 1, dtype=torch.int32)
    ids[0, 1] = 2  # blocks of 4: the first sequence has 2 of them, the last has 2
    selection = Selection.from_blocks(ids, block_q=4, block_k=4, visibility=visibility)
    with pytest.raises(ValueError, match=r"0 \.\. 1 for query tile 1, got 2"):
        selection.check()


def make(ids, block_q=1, block_k=1):
    return Selection.from_blocks(ids, block_q=block_q, block_k=block_k)


IDS = torch.zeros(1, 1, 1, 1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("error", "message", "action"),
    [
        (ValueError, r"ids: expected .* \(rank 4\), got shape \(2, 3\)", lambda: make(torch.zeros(2, 3).int())),
        (TypeError, r"ids: expected int32 .*got torch.float32", lambda: make(IDS.float())),
        (ValueError, "block_q: expected at least 1, got 0", lambda: make(IDS, block_q=0)),
        (ValueError, "block_k: expected at least 1, got -3", lambda: make(IDS, block_k=-3)),
        (ValueError, "visibility: density needs the call's lengths", lambda: make(IDS).density),
    ],
)
def test_errors_of_making_one(error, message, action):
    with pytest.raises(error, match=message):
        action()
