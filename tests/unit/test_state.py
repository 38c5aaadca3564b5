"""Laws of the attention state: merging is associative and commutative, (0, -inf) is the identity, empties stay empty."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerances import DOUBLE, GRADCHECK

from tilewise import AttentionState, merge, merge_all

ROWS, HEADS, WIDTH = 5, 3, 7


def random_state(seed, empty_rows=()):
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(ROWS, HEADS, WIDTH, generator=generator, dtype=torch.float64)
    lse = 5 * torch.randn(ROWS, HEADS, generator=generator, dtype=torch.float64)
    for row in empty_rows:
        out[row], lse[row] = 0.0, -math.inf
    return AttentionState(out, lse)


def same(a, b):
    torch.testing.assert_close(a.out, b.out, **DOUBLE)
    torch.testing.assert_close(a.lse, b.lse, **DOUBLE)


def state_of(logits, values):
    if logits.shape[-1] == 0:
        return AttentionState.empty((ROWS, HEADS, WIDTH), dtype=torch.float64)
    lse = torch.logsumexp(logits, -1)
    return AttentionState(torch.einsum("rhk,khd->rhd", torch.exp(logits - lse[..., None]), values), lse)


empty_sets = st.sets(st.integers(0, ROWS - 1))


@given(st.integers(0, 99), empty_sets, empty_sets, empty_sets)
def test_merge_is_associative_and_commutative(seed, empty_a, empty_b, empty_c):
    a, b, c = (random_state(seed + i, rows) for i, rows in enumerate((empty_a, empty_b, empty_c)))
    same(merge(merge(a, b), c), merge(a, merge(b, c)))
    same(merge(a, b), merge(b, a))
    same(merge_all([a, b, c]), merge(merge(a, b), c))
    same(a.merge(b), merge(a, b))


@given(st.integers(0, 99), empty_sets)
def test_the_empty_state_is_the_identity(seed, empty):
    a = random_state(seed, empty)
    identity = AttentionState.empty(a.out.shape, dtype=torch.float64)
    assert torch.equal(merge(a, identity).lse, a.lse)
    same(merge(identity, a), a)


@given(st.lists(st.integers(0, 10), min_size=1, max_size=4))  # equal cuts: a part without keys
def test_any_split_of_the_keys_merges_to_the_whole(cuts):
    keys = 11
    logits = 3 * torch.randn(ROWS, HEADS, keys, dtype=torch.float64)
    values = torch.randn(keys, HEADS, WIDTH, dtype=torch.float64)
    edges = [0, *sorted(cuts), keys]
    parts = [state_of(logits[..., a:b], values[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    same(merge_all(parts), state_of(logits, values))


def test_worked_check():
    """Tile one: logits 1000, 999 with values 2, 4; tile two: logit 1001 with value 10."""
    e = math.exp
    logits = torch.tensor([[[1000.0, 999.0, 1001.0]]], dtype=torch.float64)
    values = torch.tensor([[[2.0]], [[4.0]], [[10.0]]], dtype=torch.float64)
    merged = merge(state_of(logits[..., :2], values[:2]), state_of(logits[..., 2:], values[2:]))
    total = 1 + e(-1) + e(-2)
    torch.testing.assert_close(merged.lse.item(), 1001 + math.log(total), **DOUBLE)
    torch.testing.assert_close(merged.out.item(), (10 + 2 * e(-1) + 4 * e(-2)) / total, **DOUBLE)


def test_empty_states_merge_to_empty_with_zero_gradients():
    states = [random_state(i, empty_rows=range(ROWS)) for i in range(3)]
    leaves = [x.requires_grad_() for state in states for x in (state.out, state.lse)]
    merged = merge_all(states)
    assert not merged.out.any() and bool((merged.lse == -math.inf).all())
    gradients = torch.autograd.grad(
        (merged.out, merged.lse), leaves, (torch.ones_like(merged.out), torch.ones_like(merged.lse))
    )
    for gradient in gradients:
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_gradients_of_merge_and_finish():
    a, b = random_state(0), random_state(1, empty_rows=(2,))
    sink = torch.randn(HEADS, dtype=torch.float64)
    live = torch.ones(ROWS, 1, dtype=torch.float64)
    live[2] = 0.0

    def call(out_a, lse_a, out_b, lse_b, sink):
        # the empty row of b stays -inf under the numerical derivative
        lse_b = torch.where(live == 0, -math.inf, lse_b)
        merged = merge(AttentionState(out_a, lse_a), AttentionState(out_b, lse_b))
        return merged.finish(sink), merged.lse

    lse_b = b.lse.nan_to_num(neginf=0.0)
    inputs = [x.requires_grad_() for x in (a.out, a.lse, b.out, lse_b, sink)]
    assert torch.autograd.gradcheck(call, inputs, **GRADCHECK)


def test_finish_is_softmax_with_one_more_logit():
    logits = torch.randn(ROWS, HEADS, 4, dtype=torch.float64)
    values = torch.randn(4, HEADS, WIDTH, dtype=torch.float64)
    sink = torch.randn(HEADS, dtype=torch.float64)
    weights = torch.softmax(torch.cat([logits, sink.expand(ROWS, HEADS)[..., None]], -1), -1)[..., :-1]
    torch.testing.assert_close(
        state_of(logits, values).finish(sink), torch.einsum("rhk,khd->rhd", weights, values), **DOUBLE
    )


@pytest.mark.parametrize("fill", [0.0, 80.0, -math.inf])
def test_finish_of_dead_rows(fill):
    state = random_state(0, empty_rows=(1, 4))
    sink = torch.full((HEADS,), fill, dtype=torch.float64, requires_grad=True)
    out = state.finish(sink)
    assert not out[[1, 4]].any()
    (gradient,) = torch.autograd.grad(out.sum(), sink)
    assert bool(gradient.isfinite().all())
    if fill == -math.inf:
        torch.testing.assert_close(out, state.out, **DOUBLE)


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match=r"lse: expected shape \(5, 3\).*got \(5,\)"):
        AttentionState(torch.zeros(5, 3, 7), torch.zeros(5))
    with pytest.raises(ValueError, match="states: expected at least one"):
        merge_all([])
    with pytest.raises(ValueError, match=r"states: expected one shape.*\(5, 3, 7\) and \(5, 3, 2\)"):
        merge(AttentionState.empty((5, 3, 7)), AttentionState.empty((5, 3, 2)))
