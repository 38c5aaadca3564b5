"""Laws of the choice: causality, order of ids, heads, and what the oracle is for."""

import math

import pytest
import torch

from tilewise import Selection, attend
from tilewise.diagnose import account, block_logmass
from tilewise.selectors import Given, Oracle, Pooled

from .grid import CALLS, Call

SCALE = 6**-0.5


@pytest.mark.parametrize("token", [3, 23, 44, 59])
def test_causality(choice, remainder, size, impl, token):
    """Changing token t changes no output bit before t; before its query tile where the card says so.

    The tokens stand at or near the end of their blocks: rows of the same block before them would notice a score that
    reads the whole block. Long enough for the budgets to leave a choice.
    """
    call = Call(61, 61)
    q, k, v, sink = call.tensors(torch.float32)
    selector = choice.part(**size)
    options = {"selector": selector, "remainder": remainder, "sink": sink, "impl": impl, "return_lse": True}
    before = attend(q, k, v, **call.arguments(), **options)
    kept = token if selector.card.causality == "token" else token // size["block_q"] * size["block_q"]
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[:, token] = 20 * torch.randn(x[:, token].shape, generator=generator)
        after = attend(*changed, **call.arguments(), **options)
        for x, y in zip(before, after, strict=True):
            assert torch.equal(x[:, :kept], y[:, :kept])
            assert not torch.equal(x[:, token], y[:, token])


def test_a_sequence_sees_nothing_of_its_neighbours(choice, remainder, size, impl):
    call = CALLS["packed"]
    q, k, v, _ = call.tensors(torch.float32)
    options = {"selector": choice.part(**size), "remainder": remainder, "impl": impl, "return_lse": True}
    before = attend(q, k, v, **call.arguments(), **options)
    k[:, 14:37], v[:, 14:37], q[:, 13:30] = 7.0, 7.0, -3.0  # the third sequence
    after = attend(q, k, v, **call.arguments(), **options)
    for x, y in zip(before, after, strict=True):
        assert torch.equal(x[:, :13], y[:, :13]) and torch.equal(x[:, 30:], y[:, 30:])
        assert not torch.equal(x[:, 13:30], y[:, 13:30])


def test_packed_is_one_call_per_sequence(choice, remainder, size, impl):
    call = CALLS["packed"]
    q, k, v, _ = call.tensors()
    options = {"selector": choice.part(**size), "remainder": remainder, "impl": impl, "return_lse": True}
    out, lse = attend(q, k, v, **call.arguments(), **options)
    for i in range(4):
        rows = slice(*call.cu_seqlens[i : i + 2])
        keys = slice(*call.cu_seqlens_k[i : i + 2])
        if rows.start == rows.stop:
            continue
        alone, alone_lse = attend(q[:, rows], k[:, keys], v[:, keys], causal=True, **options)
        torch.testing.assert_close(out[:, rows], alone)
        torch.testing.assert_close(lse[:, rows], alone_lse)


def test_order_of_ids_means_nothing(choice, remainder, call, size, impl):
    """Ids may stand in any order, -1 anywhere among them: the same bits come out."""
    q, k, v, _ = call.tensors(torch.float32)
    selection = choice.part(**size).select(q, k, call.visibility(), SCALE)
    generator = torch.Generator().manual_seed(2)
    padded = torch.nn.functional.pad(selection.ids, (0, 3), value=-1)
    order = torch.rand(padded.shape, generator=generator).argsort(-1)
    shuffled = Selection.from_blocks(padded.gather(-1, order), **size)
    results = [
        attend(q, k, v, selector=Given(s), remainder=remainder, impl=impl, return_lse=True, **call.arguments())
        for s in (selection, shuffled)
    ]
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


def test_given_lists_are_the_selector(choice, remainder, call, size, impl):
    """A selector is nothing but its lists."""
    q, k, v, _ = call.tensors(torch.float32)
    selector = choice.part(**size)
    given = Given(selector.select(q, k, call.visibility(), SCALE))
    results = [
        attend(q, k, v, selector=s, remainder=remainder, impl=impl, return_lse=True, **call.arguments())
        for s in (selector, given)
    ]
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


def test_grouped_heads_are_repeated_heads(choice, remainder, call, size, impl):
    """Query head h reads KV head h // G: repeating the KV heads and the lists changes nothing, gradients add up."""
    q, k, v, _ = call.tensors()
    ids = choice.part(**size).select(q, k, call.visibility(), SCALE).ids
    results = []
    for repeat in (1, 2):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        key, value = (x.repeat_interleave(repeat, 2) for x in inputs[1:])
        selector = Given(Selection.from_blocks(ids.repeat_interleave(repeat, 2), **size))
        options = {"selector": selector, "remainder": remainder, "impl": impl, "return_lse": True}
        out, lse = attend(inputs[0], key, value, **call.arguments(), **options)
        live = torch.where(lse > -math.inf, lse, 0.0)
        results.append((out, lse, *torch.autograd.grad(out.square().sum() + live.sum(), inputs)))
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_block_masses_add_to_the_total(call, impl):
    q, k, v, _ = call.tensors()
    _, lse = attend(q, k, v, impl=impl, return_lse=True, **call.arguments())
    parts = block_logmass(q, k, call.visibility(), SCALE, 4, dtype=torch.float64)
    torch.testing.assert_close(torch.logsumexp(parts, -1), lse.double(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("budget", [{"blocks": 2}, {"blocks": 3, "initial": 0}, {"density": 0.4}], ids=str)
def test_oracle_keeps_the_most(call, size, budget):
    """Per tile and KV head, summed over its rows and heads: no list of the same budget keeps more mass."""
    q, k, v, _ = call.tensors()
    visibility = call.visibility()
    kept = []
    for kind in (Oracle, Pooled):
        selection = kind(**size, **budget).select(q, k, visibility, SCALE)
        row = account(q, k, v, selection, None, visibility, SCALE, dtype=torch.float64).per_row
        mass = row.mass_kept.nan_to_num(0.0).unflatten(2, (2, 2)).sum(3)  # [B, T_q, H_kv]
        tile = selection.tables()[0].of_token
        kept.append(torch.zeros(mass.shape[0], int(tile.max()) + 1, 2, dtype=mass.dtype).index_add(1, tile, mass))
    assert bool((kept[0] >= kept[1] - 1e-6).all())


def test_oracle_and_pooled_differ_where_there_is_a_choice():
    q, k, v, _ = Call(96, 96).tensors()
    visibility = Call(96, 96).visibility()
    kept = []
    for kind in (Oracle, Pooled):
        selection = kind(blocks=6, block_q=8, block_k=4).select(q, k, visibility, SCALE)
        kept.append(account(q, k, v, selection, None, visibility, SCALE, dtype=torch.float64).mass_kept)
    assert float(kept[0].mean()) > float(kept[1].mean()) + 1e-2


def test_the_account_describes_attend(choice, remainder, call, size, impl):
    """The errors in the account are those of the engine, and its split is exact."""
    q, k, v, _ = call.tensors()
    selector, visibility = choice.part(**size), call.visibility()
    out = attend(q, k, v, selector=selector, remainder=remainder, impl=impl, **call.arguments())
    dense = attend(q, k, v, impl="reference", **call.arguments())
    selection = selector.select(q, k, visibility, SCALE)
    result = account(q, k, v, selection, remainder, visibility, SCALE, dtype=torch.float64)
    error = (out - dense).norm(dim=-1) / dense.norm(dim=-1)  # nan for dead rows, as in the account
    torch.testing.assert_close(result.per_row.output_error, error, rtol=1e-9, atol=1e-11, equal_nan=True)
    assert float(result.identity_residual.max()) < 1e-12 and float(result.drop_residual.max()) < 1e-12
