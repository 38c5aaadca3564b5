"""The eager walk against whole matrices in float64: values, all gradients, dead rows, NaN, and what it may skip."""

import math

import pytest
import torch
from tolerances import DOUBLE, GRADCHECK, SINGLE, storage_limit

from tilewise import Selection, attend, remainders, selectors
from tilewise.eager import Membership, membership, passes, plan, split, walk
from tilewise.layout import Visibility

CU_Q = torch.tensor([0, 11, 11, 17, 31], dtype=torch.int32)
CU_K = torch.tensor([0, 7, 19, 19, 37], dtype=torch.int32)
CALLS = {
    "full": dict(shape=(2, 29, 37)),
    "causal": dict(shape=(2, 29, 37), causal=True),
    "dead rows": dict(shape=(2, 37, 23), causal=True),
    "window": dict(shape=(2, 29, 37), causal=True, window=5),
    "packed": dict(shape=(1, 31, 37), cu_seqlens=CU_Q, cu_seqlens_k=CU_K),
    "packed causal": dict(shape=(1, 31, 37), causal=True, cu_seqlens=CU_Q, cu_seqlens_k=CU_K),
    "packed window": dict(shape=(1, 31, 37), causal=True, window=3, cu_seqlens=CU_Q, cu_seqlens_k=CU_K),
    "one token": dict(shape=(3, 1, 1), causal=True),
    "negative scale": dict(shape=(2, 29, 37), causal=True, scale=-0.7),
    "zero scale": dict(shape=(2, 29, 37), scale=0.0),
}
calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
HEADS = {"grouped": (6, 3), "one KV head": (5, 1), "equal": (3, 3)}


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 4 rows x 7 keys (5 under lists), so that small calls have interior, boundary and skipped tiles."""
    for name, value in (("KEYS_PER_TILE", 7), ("KEYS_PER_LISTED_TILE", 5), ("LEAST_ROWS", 4), ("MOST_ROWS", 4)):
        monkeypatch.setattr(plan, name, value)


@pytest.fixture(params=["reads ranges", "reads nothing"])
def small_tiles_both_ways(request, monkeypatch, small_tiles):
    """Also the way of devices other than the CPU: every tile visited, no value read."""
    if request.param == "reads nothing":
        for module in (membership, plan, passes, split):
            monkeypatch.setattr(module, "readable", lambda x: False)


def inputs(shape, heads=(6, 3), widths=(5, 7), dtype=torch.float64):
    batch, queries, keys = shape
    generator = torch.Generator().manual_seed(0)
    sizes = [
        (batch, queries, heads[0], widths[0]),
        (batch, keys, heads[1], widths[0]),
        (batch, keys, heads[1], widths[1]),
    ]
    return [torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for size in sizes]


def results(impl, tensors, options):
    """out, lse and the gradients of every tensor (and of the sink), through out and lse."""
    out, lse = attend(*tensors, return_lse=True, impl=impl, **options)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in (out, lse)]
    leaves = list(tensors) + ([options["sink"]] if options.get("sink") is not None else [])
    return out, lse, *torch.autograd.grad((out, lse), leaves, upstream)


def compare(got, expected, tolerance=DOUBLE):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b.double(), **tolerance)


def arguments_of(call):
    return call["shape"], {name: value for name, value in call.items() if name != "shape"}


@pytest.mark.usefixtures("small_tiles_both_ways")
@calls
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
def test_dense_is_the_reference(call, heads):
    shape, options = arguments_of(call)
    tensors = inputs(shape, heads)
    options["sink"] = torch.randn(heads[0], dtype=torch.float64, requires_grad=True)
    compare(results("eager", tensors, options), results("reference", tensors, options))


@pytest.mark.usefixtures("small_tiles_both_ways")
@calls
@pytest.mark.parametrize("remainder", [None, remainders.Drop(), remainders.Taylor(0)], ids=["none", "drop", "taylor0"])
@pytest.mark.parametrize("list_heads", [1, 3, 6])
def test_selected_blocks_are_the_reference(call, remainder, list_heads):
    shape, options = arguments_of(call)
    tensors = inputs(shape)
    tiles = sum(-(-n // 3) for n in CU_Q.diff().tolist()) if "cu_seqlens" in options else -(-shape[1] // 3)
    generator = torch.Generator().manual_seed(2)
    draws = [torch.randperm(10, generator=generator)[:4] for _ in range(shape[0] * tiles * list_heads)]
    ids = (
        torch.stack(draws).view(shape[0], tiles, list_heads, 4) - 1
    )  # blocks of 4 keys: some ids are -1, some too large
    selection = Selection.from_blocks(ids, block_q=3, block_k=4)
    options |= {"selector": Lists(selection), "remainder": remainder}
    options["sink"] = torch.randn(6, dtype=torch.float64, requires_grad=True)
    compare(results("eager", tensors, options), results("reference", tensors, options))


class Lists(selectors.Given):
    """Ready lists without their value checks, so that ids past the last block go through."""

    def select(self, q, k, visibility, scale):
        return self.selection.bound_to(visibility)


def whole_matrix(q, k, v, first, end, scale, key_bias, listed):
    """The walk's definition, written out. `listed` bool `[B, H_q, T_q, T_k]`."""
    groups = q.shape[2] // k.shape[2]
    logits = scale * torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(groups, 2))
    logits = logits + key_bias.repeat_interleave(groups, 1)[:, :, None]
    token = torch.arange(k.shape[1])
    seen = (token >= first[:, None]) & (token < end[:, None]) & listed
    dead = ~seen.any(-1)
    safe = logits.masked_fill(~seen, -math.inf).masked_fill(dead[..., None], 0.0)
    lse = torch.logsumexp(safe, -1)
    weights = torch.exp(safe - lse[..., None]) * ~dead[..., None]
    out = torch.einsum("bhij,bjhd->bihd", weights, v.repeat_interleave(groups, 2))
    return out, lse.masked_fill(dead, -math.inf).transpose(1, 2)


def walk_case():
    q, k, v = inputs((2, 13, 17))
    generator = torch.Generator().manual_seed(3)
    first = torch.randint(0, 9, (13,), generator=generator)
    end = first + torch.randint(-2, 9, (13,), generator=generator)  # some rows see nothing
    key_bias = torch.randn(2, 3, 17, generator=generator, dtype=torch.float64).requires_grad_()
    ids = torch.stack([torch.randperm(6, generator=generator)[:3] - 1 for _ in range(2 * 5 * 3)]).view(2, 5, 3, 3)
    return q, k, v, first, end, key_bias, ids.int(), torch.arange(13) // 3, torch.arange(17) // 4


@pytest.mark.usefixtures("small_tiles_both_ways")
@pytest.mark.parametrize("complement", [None, False, True])
def test_walk_with_bias_and_lists(complement):
    q, k, v, first, end, key_bias, ids, row_tile, key_block = walk_case()
    lists = None if complement is None else Membership(ids, row_tile, key_block, 5, complement)
    state = walk(q, k, v, first=first, end=end, scale=0.6, key_bias=key_bias, membership=lists)
    listed = torch.ones(2, 6, 13, 17, dtype=torch.bool)
    if complement is not None:
        inside = (ids[:, row_tile][..., None, :] == key_block[:, None]).any(-1)  # [B, T_q, H_kv, T_k]
        listed = (inside ^ complement).transpose(1, 2).repeat_interleave(2, 1)
    out, lse = whole_matrix(q, k, v, first, end, 0.6, key_bias, listed)
    compare((state.out, state.lse), (out, lse))
    assert bool((lse == -math.inf).any())
    upstream = torch.randn_like(out), torch.randn_like(lse)
    leaves = (q, k, v, key_bias)
    compare(
        torch.autograd.grad((state.out, state.lse), leaves, upstream), torch.autograd.grad((out, lse), leaves, upstream)
    )


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("complement", [None, False, True])
def test_walk_gradients_by_finite_differences(complement):
    first, end = torch.tensor([0, 2, 3, 1, 0]), torch.tensor([8, 2, 9, 4, 11])
    q, k, v = inputs((1, 5, 11), heads=(2, 1), widths=(2, 3))
    key_bias = torch.randn(1, 1, 11, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[[[0, 2]], [[1, -1]], [[3, 0]]]], dtype=torch.int32)
    lists = None
    if complement is not None:
        lists = Membership(ids, torch.arange(5) // 2, torch.arange(11) // 3, 4, complement)

    def call(q, k, v, key_bias):
        state = walk(q, k, v, first=first, end=end, scale=0.8, key_bias=key_bias, membership=lists)
        return state.out, state.lse.masked_fill(state.lse == -math.inf, 0.0)

    assert torch.autograd.gradcheck(call, (q, k, v, key_bias), **GRADCHECK)


def test_attend_gradients_by_finite_differences():
    q, k, v = inputs((1, 5, 7), heads=(2, 1), widths=(2, 3))
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)
    selector = selectors.Given(
        Selection.from_blocks(torch.tensor([[[[0]], [[1]], [[2]]]]), block_q=2, block_k=2),
    )

    def call(q, k, v, sink):
        options = {"selector": selector, "remainder": remainders.Taylor(0), "impl": "eager", "sink": sink}
        return attend(q, k, v, causal=True, return_lse=True, **options)

    assert torch.autograd.gradcheck(call, (q, k, v, sink), **GRADCHECK)


@pytest.mark.parametrize("shape", [(2, 0, 5), (2, 5, 0), (2, 0, 0), (0, 5, 7)])
@pytest.mark.parametrize("sparse", [False, True])
def test_empty_calls(shape, sparse):
    tensors = inputs(shape)
    options = {"selector": selectors.Pooled(density=0.5), "remainder": remainders.Taylor(0)} if sparse else {}
    out, lse, *gradients = results("eager", tensors, options | {"causal": True})
    assert out.shape == (*shape[:2], 6, 7) and lse.shape == (*shape[:2], 6)
    assert not out.any() and bool((lse == -math.inf).all())
    for gradient, x in zip(gradients, tensors, strict=True):
        assert gradient.shape == x.shape and not gradient.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.usefixtures("small_tiles")
def test_error_is_one_rounding_of_the_inputs_dtype(dtype):
    tensors = inputs((2, 29, 37), dtype=dtype)
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    out, lse = attend(*tensors, causal=True, return_lse=True)
    exact = attend(*doubles, causal=True, return_lse=True, impl="reference")
    upstream = torch.randn_like(out), torch.randn_like(lse)
    gradients = torch.autograd.grad((out, lse), tensors, upstream)
    exact_gradients = torch.autograd.grad(exact, doubles, [x.double() for x in upstream])
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), exact[1], **SINGLE)
    for got, expected in zip((out, *gradients), (exact[0], *exact_gradients), strict=True):
        assert got.dtype == dtype
        error = ((got.double() - expected).norm() / expected.norm()).item()
        print(f"{dtype}: relative error {error:.2e}, limit {storage_limit(dtype):.2e}")
        assert error <= storage_limit(dtype)


def laid_out(x, how):
    if how == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "every second":
        return torch.stack([x, torch.full_like(x, math.nan)], -1).flatten(-2)[..., ::2]
    return x[..., :1].expand_as(x)


@pytest.mark.parametrize("how", ["transposed", "every second", "expanded"])
def test_any_strides(how):
    tensors = [laid_out(x.detach(), how).requires_grad_() for x in inputs((2, 29, 37))]
    assert not tensors[0].is_contiguous()
    plain = [x.detach().contiguous().requires_grad_() for x in tensors]
    got = results("eager", tensors, {"causal": True})
    compare(got, results("eager", plain, {"causal": True}))
    assert got[0].is_contiguous() and got[1].is_contiguous()


@pytest.mark.parametrize("size", [1e3, 1e30])
def test_large_logits(size):
    q, k, v = (x.detach().float() for x in inputs((2, 29, 37)))
    out, lse, *gradients = results("eager", [(q * size).requires_grad_(), k.requires_grad_(), v.requires_grad_()], {})
    assert bool(out.isfinite().all()) and bool(lse.isfinite().all())
    assert all(bool(g.isfinite().all()) for g in gradients)


@pytest.mark.usefixtures("small_tiles_both_ways")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_bad_key_reaches_only_rows_that_see_it(value):
    q, k, v = (x.detach() for x in inputs((1, 29, 37)))
    clean = attend(q, k, v, causal=True, return_lse=True)
    k[:, 30] = value
    out, lse = attend(q, k, v, causal=True, return_lse=True)
    unaware = 30 - (37 - 29)  # rows that stand before key 30
    assert torch.equal(out[:, :unaware], clean[0][:, :unaware]) and torch.equal(lse[:, :unaware], clean[1][:, :unaware])
    if math.isnan(value):
        assert bool(out[:, unaware:].isnan().all()) and bool(lse[:, unaware:].isnan().all())


UNSEEN = {
    # (call, tokens that no row sees)
    "window": (dict(shape=(1, 5, 37), causal=True, window=3), slice(0, 30)),
    "empty query sequence": (dict(shape=(1, 31, 37), cu_seqlens=CU_Q, cu_seqlens_k=CU_K), slice(7, 19)),
}


@pytest.mark.usefixtures("small_tiles_both_ways")
@pytest.mark.parametrize(("call", "hidden"), UNSEEN.values(), ids=UNSEEN.keys())
@pytest.mark.parametrize("impl", ["eager", "reference"])
@pytest.mark.parametrize("selector", [None, selectors.Pooled(blocks=2, block_q=4, block_k=4)], ids=["dense", "pooled"])
def test_tokens_that_no_row_sees_reach_nothing(call, hidden, impl, selector):
    shape, options = arguments_of(call)
    options["selector"] = selector
    expected = results(impl, inputs(shape), options)
    tensors = inputs(shape)
    with torch.no_grad():
        tensors[1][:, hidden] = math.nan
        tensors[2][:, hidden] = math.inf
    got = results(impl, tensors, options)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
    assert not got[3][:, hidden].any() and not got[4][:, hidden].any()


@pytest.mark.usefixtures("small_tiles_both_ways")
@pytest.mark.parametrize("impl", ["eager", "reference"])
def test_what_a_dead_row_holds_reaches_nothing(impl):
    tensors, clean = inputs((2, 37, 23)), inputs((2, 37, 23))
    dead = slice(0, 37 - 23)
    with torch.no_grad():
        tensors[0][:, dead] = math.nan
    out, lse = attend(*tensors, causal=True, return_lse=True, impl=impl)
    assert not out[:, dead].any() and bool((lse[:, dead] == -math.inf).all())
    upstream = [torch.randn_like(x) for x in (out, lse)]
    poisoned = [x.clone() for x in upstream]
    if impl == "eager":
        for x in poisoned:
            x[:, dead] = math.nan
    gradients = torch.autograd.grad((out, lse), tensors, poisoned)
    exact = torch.autograd.grad(attend(*clean, causal=True, return_lse=True, impl="reference"), clean, upstream)
    compare(gradients, exact)
    assert not gradients[0][:, dead].any()


def test_two_runs_are_bitwise_equal():
    options = {"causal": True, "selector": selectors.Pooled(density=0.4, block_q=8, block_k=4)}
    runs = [results("eager", inputs((2, 29, 37), dtype=torch.float32), options) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.usefixtures("small_tiles")
def test_a_future_token_changes_no_earlier_bit():
    q, k, v = (x.detach().float() for x in inputs((2, 37, 37)))
    before = attend(q, k, v, causal=True)
    k[:, 20:], v[:, 20:] = 3 * k[:, 20:], -v[:, 20:]
    after = attend(q, k, v, causal=True)
    assert torch.equal(before[:, :20], after[:, :20]) and not torch.equal(before[:, 20:], after[:, 20:])


def visited(visibility, lists=None):
    """Key tiles per chunk, and whether each is masked."""
    first, end = visibility.key_range("cpu")
    chunks = plan.row_chunks(first, end, visibility.key_length, 1, lists is not None)
    return [[(t.begin, t.stop, t.hidden is not None) for t in plan.key_tiles(c, first, end, 1, lists)] for c in chunks]


@pytest.mark.usefixtures("small_tiles")
def test_tiles_outside_the_ranges_are_left_out_and_interior_tiles_have_no_mask():
    assert visited(Visibility(4, 21)) == [[(0, 7, False), (7, 14, False), (14, 21, False)]]
    causal = visited(Visibility(8, 21, causal=True))
    assert causal[0] == [(0, 7, False), (7, 14, False), (14, 17, True)]
    assert causal[1] == [(0, 7, False), (7, 14, False), (14, 21, True)]
    assert visited(Visibility(4, 21, causal=True, window=5)) == [[(13, 20, True), (20, 21, True)]]
    assert visited(Visibility(4, 0)) == [[]]


@pytest.mark.usefixtures("small_tiles")
def test_tiles_without_a_selected_block_are_left_out():
    ids = torch.tensor([[[[1]], [[3]]]], dtype=torch.int32)
    lists = Membership(ids, torch.arange(8) // 4, torch.arange(20) // 5, 4)
    assert visited(Visibility(8, 20), lists) == [[(5, 10, True)], [(15, 20, True)]]


def test_heads_with_lists_of_their_own_are_walked_apart():
    """A tile is visited only for the heads that selected it; the lists of all heads cover the call, one head's do not."""
    q, k, _ = inputs((2, 29, 37))
    row_tile, key_block = torch.arange(29) // 8, torch.arange(37) // 8
    found = {}
    for heads in (1, 3, 6):
        ids = torch.arange(2 * 4 * heads).view(2, 4, heads, 1).int() % 5
        lists = Membership(ids, row_tile, key_block, 5)
        found[heads] = [(b.start, h.start, h.stop, g.start, g.stop) for b, h, g, _ in split.parts(q, k, lists)]
        for b, h, _, own in split.parts(q, k, lists):
            first = h.start * heads // 3
            expected = ids[b, :, first : first + max(1, heads // 3)]
            assert torch.equal(own.ids, expected)
        assert split.parts(q, k, Membership(ids, row_tile, key_block, 5, complement=True)) is None
    assert found[1] == [(0, 0, 3, 0, 6), (1, 0, 3, 0, 6)]
    assert found[3] == found[6] == [(b, h, h + 1, 2 * h, 2 * h + 2) for b in range(2) for h in range(3)]


def test_other_devices_read_no_value():
    """On the meta device there are no values: any read of one raises."""
    q, k, v = (x.detach().to("meta") for x in inputs((2, 29, 37)))
    first, end = Visibility(29, 37, True, 5).key_range("meta")
    key_bias = torch.empty(2, 3, 37, device="meta")
    ids = torch.empty(2, 10, 3, 4, dtype=torch.int32, device="meta")
    lists = Membership(ids, torch.arange(29, device="meta") // 3, torch.arange(37, device="meta") // 4, 10)
    out, lse = split.forward(q, k, v, first, end, 0.5, key_bias, lists)
    gradients = split.backward(out, lse, q, k, v, out, lse, first, end, 0.5, key_bias, lists)
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape, key_bias.shape]


def test_a_second_derivative_is_refused():
    q, k, v = inputs((1, 5, 7))
    (gradient,) = torch.autograd.grad(attend(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="walk_backward"):
        torch.autograd.grad(gradient.sum(), k)
