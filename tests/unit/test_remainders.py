"""Summaries of blocks, and what the law cards promise about them."""

import math

import pytest
import torch

from tilewise.layout import Visibility, block_table
from tilewise.remainders import Drop, LawCard, Remainder, Taylor, VirtualKeys
from tilewise.remainders.taylor import block_means
from tilewise.selectors.oracle import block_logmass

BOUNDARIES = {
    "whole": (torch.tensor([0, 37]), 37),
    "packed": (torch.tensor([0, 5, 5, 21, 33]), 37),
    "one token": (torch.tensor([0, 1]), 1),
    "short": (torch.tensor([0, 3]), 3),
}


@pytest.mark.parametrize("case", BOUNDARIES)
@pytest.mark.parametrize("block", [1, 4, 8])
def test_taylor_summaries(case, block):
    boundaries, length = BOUNDARIES[case]
    table = block_table(boundaries, length, block)
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(2, length, 3, 4, dtype=torch.float64, generator=generator)
    v = torch.randn(2, length, 3, 6, dtype=torch.float64, generator=generator)
    virtual = Taylor(order=0).virtual_keys(k, v, table)
    assert virtual.k.shape == (2, table.count, 3, 4) and virtual.v.shape == (2, table.count, 3, 6)
    assert virtual.bias.shape == (table.count,)
    real = 0
    for m, (start, end) in enumerate(zip(table.start.tolist(), table.end.tolist(), strict=True)):
        if start == end:
            assert not virtual.k[:, m].any() and not virtual.v[:, m].any() and math.isfinite(virtual.bias[m])
            continue
        real += end - start
        torch.testing.assert_close(virtual.k[:, m], k[:, start:end].mean(1))
        torch.testing.assert_close(virtual.v[:, m], v[:, start:end].mean(1))
        assert float(virtual.bias[m]) == pytest.approx(math.log(end - start))
    assert real == int(boundaries[-1])


@pytest.mark.parametrize("dtype, wanted", [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_taylor_works_in_fp32_or_better(dtype, wanted):
    table = block_table(torch.tensor([0, 300]), 300, 256)
    k = torch.full((1, 300, 1, 2), 1.0, dtype=dtype)
    k[:, 0] = 256.0  # 256 + 1 + 1 + ... stays at 256 in bfloat16
    virtual = Taylor().virtual_keys(k, k, table)
    assert {virtual.k.dtype, virtual.v.dtype, virtual.bias.dtype} == {wanted}
    assert float(virtual.k[0, 0, 0, 0]) == (256 + 255) / 256


def test_taylor_gradients():
    table = block_table(torch.tensor([0, 5, 11]), 13, 4)
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(1, 13, 2, 3, dtype=torch.float64, requires_grad=True, generator=generator)
    assert torch.autograd.gradcheck(lambda x: block_means(x, table), (k,))
    virtual = Taylor().virtual_keys(k, k.detach(), table)
    (gradient,) = torch.autograd.grad(virtual.k.sum(), k)
    assert not gradient[:, 11:].any()  # tokens of no sequence
    assert float(gradient.sum()) == pytest.approx(24.0)  # 4 blocks x 2 heads x 3 numbers


def test_tokens_of_no_sequence_reach_no_summary():
    table = block_table(torch.tensor([0, 5]), 8, 4)
    k = torch.ones(1, 8, 1, 2)
    k[:, 5:] = math.nan
    assert torch.equal(Taylor().virtual_keys(k, k, table).k[:, :2], torch.ones(1, 2, 1, 2))


def test_taylor_never_claims_more_than_the_truth():
    """Jensen: log B + scale q . kbar <= log sum exp(scale q . k_j), for every row and block."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 20, 4, 8, dtype=torch.float64, generator=generator)
    k = 3 * torch.randn(1, 37, 2, 8, dtype=torch.float64, generator=generator)
    visibility = Visibility(20, 37)
    true = block_logmass(q, k, visibility, 0.7, 8, dtype=torch.float64)
    virtual = Taylor().virtual_keys(k, k, block_table(torch.tensor([0, 37]), 37, 8))
    claimed = 0.7 * torch.einsum("bthd,bmhd->bthm", q, virtual.k.repeat_interleave(2, 2)) + virtual.bias
    assert bool((claimed <= true + 1e-12).all())
    assert float((true - claimed).max()) > 1.0  # and the gap is real


def test_drop_has_no_virtual_keys():
    table = block_table(torch.tensor([0, 8]), 8, 4)
    assert Drop().virtual_keys(torch.randn(1, 8, 1, 2), torch.randn(1, 8, 1, 2), table) is None


@pytest.mark.parametrize("remainder", [Drop(), Taylor()])
def test_cards(remainder):
    assert isinstance(remainder, Remainder) and isinstance(remainder.card, LawCard)
    assert remainder.card.mass_bias in ("none", "under", "over", "either")
    assert hash(remainder) == hash(type(remainder)())


def test_orders_that_do_not_exist():
    with pytest.raises(NotImplementedError, match="have: Taylor\\(order=0\\)"):
        Taylor(order=1)
    with pytest.raises(ValueError, match="expected 0, got 2"):
        Taylor(order=2)
    virtual = Taylor().virtual_keys(*torch.randn(2, 1, 4, 1, 2), block_table(torch.tensor([0, 4]), 4, 2))
    assert isinstance(virtual, VirtualKeys)
