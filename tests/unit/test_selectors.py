"""Selectors against the rules of docs/methods/block-sparse.md, written again as plain loops."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tilewise import attend, remainders
from tilewise.layout import Visibility
from tilewise.selection import Selection
from tilewise.selectors import Given, Oracle, Pooled, Selector, Window
from tilewise.selectors import choose as choose_module
from tilewise.selectors.oracle import block_logmass

SCALE = 0.5

CALLS = {
    "square": Visibility(37, 37, causal=True),
    "full": Visibility(37, 37),
    "queries shorter": Visibility(13, 41, causal=True),
    "queries longer": Visibility(23, 11, causal=True),
    "cross, longer": Visibility(23, 11),
    "window": Visibility(37, 37, causal=True, window=9),
    "aligned": Visibility(32, 48, causal=True),
    "one row": Visibility(1, 29, causal=True),
    "packed": Visibility(
        40, 44, True, cu_seqlens_q=torch.tensor([0, 11, 11, 30, 40]), cu_seqlens_k=torch.tensor([0, 9, 13, 36, 44])
    ),
    "packed, tokens of no sequence": Visibility(
        24, 26, True, 5, cu_seqlens_q=torch.tensor([0, 9, 20]), cu_seqlens_k=torch.tensor([0, 9, 21])
    ),
    "packed, full": Visibility(
        30, 31, cu_seqlens_q=torch.tensor([0, 7, 8, 30]), cu_seqlens_k=torch.tensor([0, 9, 9, 31])
    ),
}
BLOCKS = [(8, 8), (1, 4), (8, 4), (4, 8), (5, 3)]


def sequences(visibility):
    """(first query, end, first key, end) of each sequence."""
    if not visibility.packed:
        return [(0, visibility.query_length, 0, visibility.key_length)]
    q, k = visibility.cu_seqlens_q.tolist(), visibility.cu_seqlens_k.tolist()
    return [(*a, *b) for a, b in zip(pairwise(q), pairwise(k), strict=True)]


def tiles_of(visibility, block_q, block_k):
    """For each tile: its rows, its positions within the sequence, its visible keys, the sequence's blocks and start."""
    for q_start, q_end, k_start, k_end in sequences(visibility):
        keys = k_end - k_start
        for start in range(q_start, q_end, block_q):
            rows = range(start, min(start + block_q, q_end))
            positions = [row - q_end + keys for row in rows]
            visible = set()
            for position in positions:
                for key in range(keys):
                    near = visibility.window is None or key > position - visibility.window
                    if (not visibility.causal or key <= position) and near:
                        visible.add(key)
            blocks = [range(b, min(b + block_k, keys)) for b in range(0, keys, block_k)]
            yield rows, positions, visible, blocks, k_start


def expected_lists(selector, visibility, score):
    """Sorted ids of each tile: `score(rows, keys)` is the number to rank a block by."""
    lists = []
    for rows, positions, visible, blocks, k_start in tiles_of(visibility, selector.block_q, selector.block_k):
        seen = [b for b, keys in enumerate(blocks) if visible & set(keys)]
        own = [b for b in seen if set(blocks[b]) & set(range(positions[0], positions[-1] + 1))]
        rest = [b for b in seen if b not in own]
        before = max(positions[0], 0) // selector.block_k
        forced = [b for b in rest if b < selector.initial or before - selector.local <= b < before]
        if selector.blocks is not None:
            quota = len(own) + selector.blocks
        else:
            quota = max(math.ceil(selector.density * len(seen) - 1e-9), len(own) + len(forced))
        scored = {b: score(rows, [k_start + key for key in blocks[b]]) for b in rest if b not in forced}
        ranked = sorted(scored, key=lambda b: (-scored[b], b))
        lists.append(sorted((own + forced + ranked)[: min(quota, len(seen))]) if seen else [])
    return lists


def integers(visibility, seed=0, heads=4, kv_heads=2, batch=2):
    """Small integers: every dot product and mean over a power of two is exact in fp32."""
    generator = torch.Generator().manual_seed(seed)
    shape_q, shape_k = (batch, visibility.query_length, heads, 4), (batch, visibility.key_length, kv_heads, 4)
    q = torch.randint(-3, 4, shape_q, generator=generator).float()
    return q, torch.randint(-3, 4, shape_k, generator=generator).float()


def as_lists(selection, batch, head, count):
    ids = selection.ids[batch, :, head].tolist()
    assert all(i == -1 for row in ids[count:] for i in row)
    for row in ids:
        valid = [i for i in row if i >= 0]
        assert row == sorted(valid) + [-1] * (len(row) - len(valid))  # ascending, padded on the right
    return [[i for i in row if i >= 0] for row in ids[:count]]


OPTIONS = [
    dict(blocks=2),
    dict(blocks=3, initial=2, local=0),
    dict(density=0.4),
    dict(density=1.0),
    dict(blocks=0, initial=0, local=0),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("block_q, block_k", BLOCKS)
def test_pooled_follows_the_rules(call, options, block_q, block_k):
    visibility = CALLS[call]
    selector = Pooled(block_q=block_q, block_k=block_k, **options)
    q, k = integers(visibility)
    selection = selector.select(q, k, visibility, SCALE).check()
    for batch in range(2):
        for head in range(2):
            group = q[batch, :, 2 * head : 2 * head + 2].double()

            def score(rows, keys, group=group, batch=batch, head=head):
                exact = SCALE * group[list(rows)].mean((0, 1)) @ k[batch, keys, head].double().mean(0)
                return round(float(exact), 5)  # equal numbers may differ in their last bits

            expected = expected_lists(selector, visibility, score)
            got = as_lists(selection, batch, head, len(expected))
            if call == "aligned" and (block_q, block_k) != (5, 3):
                assert got == expected  # every score is exact in fp32, ties included
                continue
            # means over ragged tiles are rounded: a tie may fall either way, the scores of the lists may not differ
            tiles = tiles_of(visibility, block_q, block_k)
            for (rows, _, _, blocks, k_start), *lists in zip(tiles, got, expected, strict=True):
                mine, theirs = (sorted(score(rows, [k_start + key for key in blocks[b]]) for b in ids) for ids in lists)
                assert mine == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("options", OPTIONS[1:3], ids=str)
@pytest.mark.parametrize("block_q, block_k", BLOCKS)
def test_oracle_follows_the_rules(call, options, block_q, block_k):
    visibility = CALLS[call]
    selector = Oracle(block_q=block_q, block_k=block_k, **options)
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(1, visibility.query_length, 4, 4, generator=generator)
    k = torch.randn(1, visibility.key_length, 2, 4, generator=generator)
    selection = selector.select(q, k, visibility, SCALE).check()
    logits = torch.einsum("tgd,sd->tgs", q[0, :, 2:4].double(), k[0, :, 1].double()) * SCALE
    mask = visibility.to_mask("cpu")[:, None]
    weight = torch.softmax(logits.masked_fill(~mask, -math.inf), -1).nan_to_num(0.0)
    expected = expected_lists(selector, visibility, lambda rows, keys: float(weight[list(rows)][:, :, keys].sum()))
    assert as_lists(selection, 0, 1, len(expected)) == expected


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("w, initial", [(1, 0), (9, 2), (100, 0)])
@pytest.mark.parametrize("block_q, block_k", BLOCKS)
def test_window_rounds_outward(call, w, initial, block_q, block_k):
    visibility = CALLS[call]
    q, k = integers(visibility)
    selection = Window(w, block_q=block_q, block_k=block_k, initial=initial).select(q, k, visibility, SCALE).check()
    expected = []
    for _, positions, visible, blocks, _ in tiles_of(visibility, block_q, block_k):
        last = positions[-1] if visibility.causal else positions[-1] + w - 1
        near = set(range(positions[0] - w + 1, last + 1))
        expected.append(
            [b for b, keys in enumerate(blocks) if set(keys) & visible and (set(keys) & near or b < initial)]
        )
    for batch, head in ((0, 0), (1, 1)):
        assert as_lists(selection, batch, head, len(expected)) == expected


def test_ties_fall_to_the_lower_id():
    visibility = Visibility(64, 64, causal=True)
    q, k = torch.zeros(1, 64, 1, 4), torch.randn(1, 64, 1, 4)
    for kind in (Pooled, Oracle):
        selector = kind(blocks=3, block_q=8, block_k=8, initial=0)
        ids = selector.select(q, k, visibility, 1.0).ids[0, :, 0]
        assert ids[7].tolist() == [0, 1, 6, 7]  # two of equal score, the local one, its own
        assert ids[1].tolist() == [0, 1, -1, -1]


def test_a_visible_block_of_the_lowest_score_beats_padding():
    visibility = Visibility(32, 32, causal=True)
    q = torch.full((1, 32, 1, 1), 1e30)
    k = torch.full((1, 32, 1, 1), -1e30)  # scores overflow to -inf
    ids = Pooled(blocks=3, block_q=8, block_k=8, initial=0, local=0).select(q, k, visibility, 1.0).ids
    assert ids[0, 3, 0].tolist() == [0, 1, 2, 3]


def test_nan_keys_leave_tiles_that_do_not_see_them_alone():
    visibility = Visibility(64, 64, causal=True)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 64, 1, 8, generator=generator) for _ in range(2))
    for selector in (Pooled(blocks=3, block_q=8, block_k=8), Oracle(blocks=3, block_q=8, block_k=8)):
        clean = selector.select(q, k, visibility, 1.0).ids
        broken = k.clone()
        broken[:, 40] = math.nan
        ids = selector.select(q, broken, visibility, 1.0).check().ids
        assert torch.equal(ids[:, :5], clean[:, :5])
        assert all(i in ids[0, 7, 0] for i in (0, 6, 7))  # forced and own blocks whatever the scores


@pytest.mark.parametrize("kind", [Pooled, Oracle])
def test_working_in_pieces_changes_nothing(kind, monkeypatch):
    visibility = CALLS["packed"]
    q, k = integers(visibility, seed=3)
    selector = kind(blocks=3, block_q=4, block_k=4)
    whole = selector.select(q, k, visibility, SCALE).ids
    monkeypatch.setattr(choose_module, "SCORE_ELEMENTS", 1)
    assert torch.equal(selector.select(q, k, visibility, SCALE).ids, whole)


@pytest.mark.parametrize("block_q, block_k", BLOCKS)
def test_list_width_needs_no_tensor(block_q, block_k):
    """The width is an upper bound: no list is cut short by it (full density names every visible block)."""
    for visibility in CALLS.values():
        q, k = integers(visibility)
        selection = Pooled(density=1.0, block_q=block_q, block_k=block_k).select(q, k, visibility, SCALE)
        assert float(selection.density) == 1.0


def test_block_logmass_against_float64():
    for visibility in CALLS.values():
        generator = torch.Generator().manual_seed(2)
        q = torch.randn(2, visibility.query_length, 4, 4, generator=generator, dtype=torch.float64)
        k = torch.randn(2, visibility.key_length, 2, 4, generator=generator, dtype=torch.float64)
        got = block_logmass(q, k, visibility, SCALE, 8, dtype=torch.float64)
        logits = torch.einsum("bthd,bshd->bths", q, k.repeat_interleave(2, 2)) * SCALE
        logits = logits.masked_fill(~visibility.to_mask("cpu")[:, None], -math.inf)
        torch.testing.assert_close(torch.logsumexp(got, -1), torch.logsumexp(logits, -1))
        column = 0
        for _, _, k_start, k_end in sequences(visibility):
            for start in range(k_start, k_end, 8):
                expected = torch.logsumexp(logits[..., start : min(start + 8, k_end)], -1)
                torch.testing.assert_close(got[..., column], expected)
                column += 1
        part = block_logmass(q, k, visibility, SCALE, 8, rows=slice(0, 1), dtype=torch.float64)
        torch.testing.assert_close(part, got[:, :1])


def test_no_gradient_passes_through_the_choice():
    q, k = (torch.randn(1, 16, 1, 4, requires_grad=True) for _ in range(2))
    for selector in (Pooled(blocks=2, block_q=4, block_k=4), Oracle(blocks=2, block_q=4, block_k=4), Window(4)):
        assert isinstance(selector, Selector)
        assert not selector.select(q, k, Visibility(16, 16, causal=True), 1.0).ids.requires_grad


@pytest.mark.parametrize(
    "options, error, words",
    [
        (dict(), ValueError, "exactly one"),
        (dict(blocks=4, density=0.5), ValueError, "exactly one"),
        (dict(blocks=1), ValueError, "initial \\+ local = 2"),
        (dict(blocks=-1, initial=0, local=0), ValueError, "at least 0"),
        (dict(blocks=4.0), TypeError, "int"),
        (dict(blocks=True), TypeError, "int"),
        (dict(density=0.0), ValueError, "\\(0, 1\\]"),
        (dict(density=1.5), ValueError, "got 1.5"),
        (dict(density="all"), TypeError, "float"),
        (dict(blocks=4, block_q=0), ValueError, "block_q"),
        (dict(blocks=4, block_k=0), ValueError, "block_k"),
        (dict(blocks=4, initial=-1), ValueError, "initial"),
    ],
)
@pytest.mark.parametrize("kind", [Pooled, Oracle])
def test_bad_options(kind, options, error, words):
    with pytest.raises(error, match=words):
        kind(**options)


def test_bad_window():
    with pytest.raises(ValueError, match="w: expected at least 1, got 0"):
        Window(0)
    with pytest.raises(TypeError, match="w: expected an int"):
        Window(3.5)


def test_given_checks_the_call():
    q, k = torch.randn(2, 16, 4, 4), torch.randn(2, 16, 2, 4)
    visibility = Visibility(16, 16, causal=True)

    def given(*shape, fill=0):
        return Given(Selection.from_blocks(torch.full(shape, fill, dtype=torch.int32), block_q=8, block_k=8))

    selection = given(2, 2, 2, 1).select(q, k, visibility, 1.0)
    assert selection.visibility is visibility
    with pytest.raises(ValueError, match="batch 2"):
        given(1, 2, 2, 1).select(q, k, visibility, 1.0)
    with pytest.raises(ValueError, match="H_kv = 2 or H_q = 4"):
        given(2, 2, 3, 1).select(q, k, visibility, 1.0)
    with pytest.raises(ValueError, match="expected 2 query tiles"):
        given(2, 1, 2, 1).select(q, k, visibility, 1.0)
    with pytest.raises(ValueError, match="expected -1 or 0 .. 1"):
        given(2, 2, 2, 1, fill=2).select(q, k, visibility, 1.0)
    with pytest.raises(ValueError, match="twice"):
        given(2, 2, 2, 2).select(q, k, visibility, 1.0)
    with pytest.raises(TypeError, match="Selection.from_blocks"):
        Given(torch.zeros(2, 2, 2, 1))


def test_the_selector_in_the_documentation_works():
    page = Path(__file__).parents[2] / "docs" / "add-a-method.md"
    code = page.read_text().split("```python\n")[1].split("```")[0]
    names = {"__name__": "documentation"}
    exec(code, names)
    visibility = Visibility(40, 40, causal=True)
    q, k = integers(visibility)
    k[0, 17, 1] = 100.0
    selection = names["LargestKey"](blocks=3, block_q=8, block_k=8).select(q, k, visibility, SCALE).check()
    assert selection.ids[0, 4, 1].tolist()[-1] == 4 and 2 in selection.ids[0, 4, 1].tolist()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("queries, keys", [(0, 0), (0, 9), (7, 0), (1, 1)])
@pytest.mark.parametrize(
    "selector",
    [
        Pooled(blocks=2, block_q=4, block_k=2),
        Oracle(density=0.5, block_q=4, block_k=2),
        Window(3, block_q=4, block_k=2),
    ],
    ids=lambda selector: type(selector).__name__,
)
@pytest.mark.parametrize("impl", ["eager", "reference"])
def test_empty_sides(selector, queries: int, keys: int, packed: bool, impl: str) -> None:
    q = torch.randn(1, queries, 2, 8, requires_grad=True)
    k, v = (torch.randn(1, keys, 1, 8, requires_grad=True) for _ in range(2))
    # packed: the sequence with the keys has no queries, so that every row is dead
    boundaries = {}
    if packed:
        boundaries["cu_seqlens"] = torch.tensor([0, 0, queries], dtype=torch.int32)
        boundaries["cu_seqlens_k"] = torch.tensor([0, keys, keys], dtype=torch.int32)
    out, lse = attend(
        q, k, v, causal=True, selector=selector, remainder=remainders.Taylor(order=0), return_lse=True, impl=impl, **boundaries
    )  # fmt: skip
    assert out.shape == (1, queries, 2, 8)
    if packed or keys == 0:
        assert not out.any()
        assert (lse == float("-inf")).all()
    for gradient in torch.autograd.grad(out.sum(), [q, k, v]):
        assert torch.isfinite(gradient).all()
    visibility = Visibility(queries, keys, True, None, *boundaries.values())
    selection = selector.select(q.detach(), k.detach(), visibility, 0.3).check()
    assert selection.transpose().offsets[0] == 0
    assert 0 <= float(selection.density) <= 1
