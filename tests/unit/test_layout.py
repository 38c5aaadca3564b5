"""Which keys a row sees, and how tokens fall into blocks, against loops over single rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewise.layout import Visibility, block_table, group_size, safe_boundaries, sequence_of


def slow_keys(row, visibility):
    """The set of keys that a row sees, one comparison at a time."""
    if visibility.cu_seqlens_q is None:
        edges = [(0, visibility.query_length, 0, visibility.key_length)]
    else:
        q, k = visibility.cu_seqlens_q.tolist(), visibility.cu_seqlens_k.tolist()
        edges = [(q[i], q[i + 1], k[i], k[i + 1]) for i in range(len(q) - 1)]
    for q_start, q_stop, k_start, k_stop in edges:
        if q_start <= row < q_stop:
            position = (row - q_start) + (k_stop - k_start) - (q_stop - q_start)
            seen = set()
            for j in range(k_stop - k_start):
                if visibility.causal and j > position:
                    continue
                if visibility.window is not None and j < position - visibility.window + 1:
                    continue
                seen.add(k_start + j)
            return seen
    return set()


def check_against_loop(visibility):
    first, end = visibility.key_range("cpu")
    assert first.dtype == end.dtype == torch.int64
    assert first.shape == end.shape == (visibility.query_length,)
    mask = visibility.to_mask("cpu")
    for row in range(visibility.query_length):
        expected = slow_keys(row, visibility)
        assert set(range(int(first[row]), int(end[row]))) == expected
        assert set(mask[row].nonzero().flatten().tolist()) == expected
        if not expected:
            assert first[row] == end[row]


def boundaries(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (7, 13), (13, 7), (11, 11), (5, 0), (0, 5)])
def test_key_range_of_one_sequence(queries, keys, window):
    check_against_loop(Visibility(queries, keys, causal=True, window=window))
    if window is None:
        check_against_loop(Visibility(queries, keys))


lengths = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=5)


@given(lengths, st.booleans(), st.sampled_from([None, 1, 2, 5]))
def test_key_range_of_packed_sequences(pairs, causal, window):
    cu_q, cu_k = boundaries([a for a, _ in pairs]), boundaries([b for _, b in pairs])
    window = window if causal else None
    check_against_loop(Visibility(int(cu_q[-1]), int(cu_k[-1]), causal, window, cu_q, cu_k))


def test_rows_past_the_last_sequence_see_nothing():
    cu = torch.tensor([0, 3, 5], dtype=torch.int32)
    first, end = Visibility(8, 5, False, None, cu, cu).key_range("cpu")
    assert torch.equal(first[5:], end[5:]) and bool((end[:5] > first[:5]).all())


def test_bad_boundaries_stay_in_range():
    bad = torch.tensor([0, 9, -4, 3, 100], dtype=torch.int32)
    assert safe_boundaries(bad, 7).tolist() == [0, 7, 7, 7, 7]
    first, end = Visibility(7, 7, True, 2, bad, bad).key_range("cpu")
    assert int(first.min()) >= 0 and int(end.max()) <= 7


@given(st.lists(st.integers(0, 11), min_size=1, max_size=5), st.integers(1, 5))
def test_blocks_restart_at_each_sequence(sizes, block):
    cu = boundaries(sizes).long()
    length = int(cu[-1])
    table = block_table(cu, length, block)
    expected = [
        (int(cu[s]) + begin, min(int(cu[s]) + begin + block, int(cu[s + 1])), s, begin // block)
        for s in range(len(sizes))
        for begin in range(0, sizes[s], block)
    ]
    found = list(zip(*(x.tolist() for x in (table.start, table.end, table.sequence, table.local)), strict=True))
    assert found[: len(expected)] == expected
    # what is left over is empty
    assert all(start == end and sequence == len(sizes) for start, end, sequence, _ in found[len(expected) :])
    assert int(table.offset[-1]) == len(expected)
    for token in range(length):
        start, end, _, _ = expected[int(table.of_token[token])]
        assert start <= token < end
    slot, inside = table.slots()
    assert slot.shape == inside.shape == (table.count, block)
    covered = [
        t for row, ok in zip(slot.tolist(), inside.tolist(), strict=True) for t, i in zip(row, ok, strict=True) if i
    ]
    assert covered == list(range(length))


def test_tokens_of_no_sequence_lie_in_no_block():
    table = block_table(torch.tensor([0, 3, 5]), 7, 2)
    assert table.of_token.tolist() == [0, 0, 1, 2, 2, table.count, table.count]


def test_empty_sequences_own_nothing():
    assert sequence_of(torch.arange(6), torch.tensor([0, 0, 2, 2, 5])).tolist() == [1, 1, 3, 3, 3, 4]


def test_group_size():
    assert group_size(9, 3) == 3
