"""Laws of what attend returns, over selectors x remainders x calls."""

import math

import pytest
import torch

from tilewise import Selection, attend, remainders, selectors

from .grid import CALLS

EXACT = {"rtol": 1e-10, "atol": 1e-12}  # float64, sums of some tens of terms


def run(call, q, k, v, **options):
    return attend(q, k, v, return_lse=True, **call.arguments(), **options)


def test_everything_selected_is_dense(choice, remainder, call, size, impl, with_sink):
    q, k, v, sink = call.tensors()
    sink = sink if with_sink else None
    out, lse = run(call, q, k, v, sink=sink, selector=choice.everything(**size), remainder=remainder, impl=impl)
    dense, dense_lse = run(call, q, k, v, sink=sink, impl="reference")
    torch.testing.assert_close(out, dense, **EXACT)
    torch.testing.assert_close(lse.double(), dense_lse.double(), **EXACT)


def test_eager_is_the_reference_with_all_gradients(choice, remainder, call, size, with_sink):
    results = []
    for impl in ("reference", "eager"):
        q, k, v, sink = (x.requires_grad_() for x in call.tensors())
        inputs = (q, k, v, sink) if with_sink else (q, k, v)
        options = {"selector": choice.part(**size), "remainder": remainder, "sink": sink if with_sink else None}
        out, lse = run(call, q, k, v, impl=impl, **options)
        generator = torch.Generator().manual_seed(1)
        upstream = [torch.randn(x.shape, dtype=x.dtype, generator=generator) for x in (out, lse)]
        results.append((out, lse, *torch.autograd.grad((out, lse), inputs, upstream)))
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, **EXACT)


def test_dead_rows(choice, remainder, impl, size):
    call = CALLS["dead rows"]
    dead = slice(0, call.query_length - call.key_length)
    for fill in (None, 0.5, -math.inf):
        q, k, v, _ = (x.requires_grad_() for x in call.tensors())
        sink = None if fill is None else torch.full((4,), fill, dtype=torch.float64, requires_grad=True)
        options = {"selector": choice.part(**size), "remainder": remainder, "sink": sink, "impl": impl}
        out, lse = run(call, q, k, v, **options)
        assert not out[:, dead].any() and bool((lse[:, dead] == -math.inf).all())
        assert bool(out.isfinite().all()) and bool(lse[:, dead.stop :].isfinite().all())
        inputs = (q, k, v) if sink is None else (q, k, v, sink)
        gradients = torch.autograd.grad((out, lse), inputs, (torch.ones_like(out), torch.ones_like(lse)))
        assert all(bool(g.isfinite().all()) for g in gradients)
        assert not gradients[0][:, dead].any()
        # the upstream gradient of a dead row goes nowhere at all
        out, lse = run(call, q, k, v, **options)
        only_dead = [torch.zeros_like(x) for x in (out, lse)]
        for x in only_dead:
            x[:, dead] = 1.0
        assert not any(g.any() for g in torch.autograd.grad((out, lse), inputs, only_dead))


def test_weights_sum_to_one(choice, remainder, call, size, impl):
    """Values of one give outputs of one; with a sink, its share is missing, and the LSE leaves the sink out."""
    q, k, v, sink = call.tensors()
    ones = torch.ones_like(v)
    options = {"selector": choice.part(**size), "remainder": remainder, "impl": impl}
    out, lse = run(call, q, k, ones, **options)
    live = lse > -math.inf
    if remainder.card.weights_sum_to_one:
        torch.testing.assert_close(out, live[..., None].double().expand_as(out), **EXACT)
    sunk, sunk_lse = run(call, q, k, ones, sink=sink, **options)
    torch.testing.assert_close(sunk_lse, lse, rtol=0, atol=0)
    share = torch.where(live, torch.sigmoid(lse.double() - sink), 0.0)
    torch.testing.assert_close(sunk, out * share[..., None], **EXACT)
    assert float(sunk.max()) < 1.0


def test_claimed_mass_has_the_bias_of_the_card(choice, remainder, call, size, impl):
    """log D_E <= log(D_E + Dh) <= log D where the card says that the claimed mass is under the truth."""
    q, k, v, _ = call.tensors()
    selector = choice.part(**size)
    _, dropped = run(call, q, k, v, selector=selector, impl=impl)
    _, lse = run(call, q, k, v, selector=selector, remainder=remainder, impl=impl)
    _, dense = run(call, q, k, v, impl="reference")
    assert bool((lse >= dropped - 1e-12).all())
    if remainder.card.mass_bias in ("none", "under"):
        assert bool((lse <= dense + 1e-12).all())


def test_toy_example(impl):
    """Logits 0, 0, 0 and values 0, 3, 9: dense 4, the first two 1.5, error 2.5 = (1/3)(9 - 1.5)."""
    q, k = torch.zeros(1, 1, 1, 1, dtype=torch.float64), torch.zeros(1, 3, 1, 1, dtype=torch.float64)
    v = torch.tensor([0.0, 3.0, 9.0], dtype=torch.float64).view(1, 3, 1, 1)
    first_two = selectors.Given(Selection.from_tokens(torch.tensor([[[0, 1]]], dtype=torch.int32)))
    dense, lse = attend(q, k, v, return_lse=True, impl=impl)
    kept, kept_lse = attend(q, k, v, selector=first_two, return_lse=True, impl=impl)
    assert float(dense) == pytest.approx(4.0) and float(kept) == pytest.approx(1.5)
    left_out = 1 - math.exp(float(kept_lse) - float(lse))
    assert left_out == pytest.approx(1 / 3)
    assert float(dense) - float(kept) == pytest.approx(left_out * (9 - 1.5))
    whole = attend(q, k, v, selector=first_two, remainder=remainders.Taylor(order=0), impl=impl)
    assert float(whole) == pytest.approx(4.0)  # a block of one token is its own mean
