"""The exact account of mass and error, against float64 written out densely."""

import math

import pytest
import torch

from tilewise.diagnose import account, mass
from tilewise.layout import Visibility
from tilewise.remainders import Drop, Taylor
from tilewise.selection import Selection
from tilewise.selectors import Oracle, Pooled

CALLS = {
    "causal": Visibility(40, 40, causal=True),
    "full": Visibility(24, 37),
    "last rows": Visibility(11, 40, causal=True),
    "dead rows": Visibility(40, 29, causal=True),
    "window": Visibility(40, 40, causal=True, window=17),
    "packed": Visibility(40, 44, True, cu_seqlens_q=torch.tensor([0, 12, 40]), cu_seqlens_k=torch.tensor([0, 9, 44])),
}


def inputs(visibility, spread=2.0):
    generator = torch.Generator().manual_seed(0)
    q = spread * torch.randn(2, visibility.query_length, 4, 8, dtype=torch.float64, generator=generator)
    k = torch.randn(2, visibility.key_length, 2, 8, dtype=torch.float64, generator=generator)
    return q, k, torch.randn(2, visibility.key_length, 2, 5, dtype=torch.float64, generator=generator)


def dense_account(q, k, v, selection, visibility, scale, taylor):
    """lambda, claimed share, output and method output, from T_q x T_k matrices."""
    k, v = k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)
    bound = selection.bound_to(visibility)
    exact = bound.to_mask().repeat_interleave(4 // selection.ids.shape[2], 1)
    visible = visibility.to_mask("cpu")
    weight = (scale * torch.einsum("bthd,bshd->bhts", q, k)).exp() * visible
    kept = weight * exact
    claim = torch.zeros_like(weight)  # each covered key gets the weight of its block's mean
    claim_value = v.clone()
    if taylor:
        _, blocks = bound.tables()
        for start, end in zip(blocks.start.tolist(), blocks.end.tolist(), strict=True):
            if start < end:
                mean = k[:, start:end].mean(1)
                whole = visible[:, start:end].all(1) & ~exact[..., start:end].any(-1)  # [B, H, T_q]
                estimate = (scale * torch.einsum("bthd,bhd->bht", q, mean)).exp() * whole
                claim[..., start:end] = estimate[..., None]
                claim_value[:, start:end] = v[:, start:end].mean(1, keepdim=True)
    out = torch.einsum("bhts,bshd->bthd", weight / weight.sum(-1, keepdim=True), v)
    total = (kept + claim).sum(-1, keepdim=True)
    total = torch.where(total == 0, 1.0, total)
    method = torch.einsum("bhts,bshd->bthd", kept / total, v)
    method = method + torch.einsum("bhts,bshd->bthd", claim / total, claim_value)
    share = (kept.sum(-1) / weight.sum(-1)).transpose(1, 2)
    claimed = (claim.sum(-1) / total[..., 0]).transpose(1, 2)
    return share, claimed, out, method, (claim.sum(-1) / (weight - kept).sum(-1)).transpose(1, 2)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("taylor", [False, True], ids=["drop", "taylor"])
@pytest.mark.parametrize("kind", [Pooled, Oracle])
def test_account_against_dense_float64(call, taylor, kind):
    visibility = CALLS[call]
    q, k, v = inputs(visibility)
    selection = kind(blocks=2, block_q=4, block_k=4).select(q, k, visibility, 0.4)
    remainder = Taylor() if taylor else Drop()
    result = account(q, k, v, selection, remainder, visibility, 0.4, dtype=torch.float64)
    share, claimed, out, method, ratio = dense_account(q, k, v, selection, visibility, 0.4, taylor)
    first, end = visibility.key_range("cpu")
    live = end > first
    assert result.live_rows == int(live.sum())
    row = result.per_row
    assert bool(row.output_error[:, ~live].isnan().all())
    torch.testing.assert_close(row.mass_kept[:, live], share[:, live])
    torch.testing.assert_close(row.mass_left_out[:, live], 1 - share[:, live])
    torch.testing.assert_close(row.mass_claimed[:, live], claimed[:, live])
    error = (method - out).norm(dim=-1) / out.norm(dim=-1)
    torch.testing.assert_close(row.output_error[:, live], error[:, live])
    torch.testing.assert_close(result.output_error, error[:, live].mean(1))
    torch.testing.assert_close(result.density.mean(), selection.density)
    known = row.calibration.isfinite()
    torch.testing.assert_close(row.calibration[known], ratio[known])
    assert float(result.identity_residual.max()) < 1e-12 and float(result.drop_residual.max()) < 1e-12
    if taylor:
        assert bool((row.calibration[known] <= 1 + 1e-12).all())
        assert bool((row.output_error <= row.mass_error + row.value_error + 1e-12)[:, live].all())
    else:
        torch.testing.assert_close(row.output_error, row.drop_error, equal_nan=True)
        assert not row.value_error[:, live].any() and not row.mass_claimed[:, live].any()


def test_toy_example():
    """Logits 0, 0, 0 and values 0, 3, 9: dense 4, the first two 1.5, error 2.5 = (1/3)(9 - 1.5)."""
    q, k = torch.zeros(1, 1, 1, 1, dtype=torch.float64), torch.zeros(1, 3, 1, 1, dtype=torch.float64)
    v = torch.tensor([0.0, 3.0, 9.0], dtype=torch.float64).view(1, 3, 1, 1)
    selection = Selection.from_tokens(torch.tensor([[[0, 1]]]))
    result = account(q, k, v, selection, Drop(), Visibility(1, 3), 1.0, dtype=torch.float64)
    assert float(result.mass_kept) == pytest.approx(2 / 3)
    assert float(result.mass_left_out) == pytest.approx(1 / 3)
    assert float(result.output_error) == pytest.approx(2.5 / 4)
    assert float(result.mass_error) == pytest.approx((1 / 3) * (9 - 1.5) / 4)
    assert float(result.drop_residual) < 1e-15
    # one-token blocks are their own mean: the remainder is then the truth
    exact = account(q, k, v, selection, Taylor(), Visibility(1, 3), 1.0, dtype=torch.float64)
    assert float(exact.output_error) < 1e-15 and float(exact.calibration) == pytest.approx(1.0)


def test_an_empty_list_keeps_nothing_and_the_split_still_holds():
    visibility = CALLS["causal"]
    q, k, v = inputs(visibility)
    selection = Selection.from_blocks(torch.full((2, 10, 1, 1), -1, dtype=torch.int32), block_q=4, block_k=4)
    result = account(q, k, v, selection, Drop(), visibility, 0.4, dtype=torch.float64)
    assert not result.mass_kept.any() and not result.density.any()
    torch.testing.assert_close(result.output_error, torch.ones_like(result.output_error))
    assert float(result.identity_residual.max()) < 1e-12 and float(result.drop_residual.max()) < 1e-12
    result = account(q, k, v, selection, Taylor(), visibility, 0.4, dtype=torch.float64)
    assert float(result.identity_residual.max()) < 1e-12
    assert bool((result.per_row.mass_claimed[:, 3:] == 1).all()) and not result.per_row.mass_claimed[:, :3].any()


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_lists_per_head_and_rows_in_pieces(heads, monkeypatch):
    visibility = CALLS["causal"]
    q, k, v = inputs(visibility)
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(2, 10, heads, 10, generator=generator).argsort(-1)[..., :4].to(torch.int32)
    selection = Selection.from_blocks(ids, block_q=4, block_k=4)
    whole = account(q, k, v, selection, Taylor(), visibility, 0.4, dtype=torch.float64)
    share, *_ = dense_account(q, k, v, selection, visibility, 0.4, True)
    torch.testing.assert_close(whole.per_row.mass_kept, share)
    monkeypatch.setattr(mass, "LOGIT_ELEMENTS", 1)
    part = account(q, k, v, selection, Taylor(), visibility, 0.4, rows=slice(7, 20), dtype=torch.float64)
    torch.testing.assert_close(part.per_row.output_error, whole.per_row.output_error[:, 7:20])
    assert part.live_rows == 13
    with pytest.raises(ValueError, match="at least one"):
        account(q, k, v, selection, Taylor(), visibility, 0.4, rows=slice(3, 3))


def test_large_logits_do_not_overflow():
    visibility = CALLS["causal"]
    q, k, v = inputs(visibility, spread=300.0)
    selection = Pooled(blocks=2, block_q=4, block_k=4).select(q, k, visibility, 1.0)
    result = account(q, k, v, selection, Taylor(), visibility, 1.0)  # fp32: exp(1000) would be inf
    assert all(math.isfinite(x) for x in result.summary().values())
