"""Where the softmax mass goes, and what leaving some of it out does to the output: the exact account.

Symbols: docs/methods/block-sparse.md. E are the visible keys that the selection computes exactly, U the other visible
keys; `(D, N)` mass and value sum of a set; `(Dh, Nh)` what the remainder claims for U.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tilewise.layout import Visibility
from tilewise.remainders.base import Remainder
from tilewise.selection import Selection
from tilewise.selectors.oracle import LOGIT_ELEMENTS, block_logmass, chosen_rows, grouped_logits

__all__ = ["MassAccount", "RowAccount", "account", "block_logmass"]


@dataclass(frozen=True)
class RowAccount:
    """The account of single rows. Every tensor `[B, R, H_q]`; NaN for dead rows (rows that see no key)."""

    density: Tensor  # selected over visible keys
    mass_kept: Tensor  # lambda = D_E / D
    mass_left_out: Tensor  # D_U / D, summed by itself, not as 1 - lambda
    mass_claimed: Tensor  # Dh / (D_E + Dh): the share that the remainder claims
    calibration: Tensor  # Dh / D_U; NaN where nothing is left out
    output_error: Tensor  # |o_hat - o| / |o|, the method with its remainder
    mass_error: Tensor  # |(lambda - lam_h)(o_E - o_U)| / |o|
    value_error: Tensor  # |(1 - lam_h)(o_U - Nh / Dh)| / |o|
    identity_residual: Tensor  # |(o - o_hat) - mass term - value term| / |o|
    drop_error: Tensor  # |o_E - o| / |o|, the same selection with nothing for the rest
    drop_residual: Tensor  # |(o - o_E) - (1 - lambda)(o_U - o_E)| / |o|


@dataclass(frozen=True)
class MassAccount:
    """The account per batch and query head. Every tensor `[B, H_q]`, a mean over live rows where not said otherwise."""

    density: Tensor  # selected over visible pairs (a ratio of sums)
    mass_kept: Tensor
    mass_left_out: Tensor
    mass_claimed: Tensor
    calibration: Tensor  # median; NaN where no row leaves anything out
    output_error: Tensor
    mass_error: Tensor
    value_error: Tensor
    identity_residual: Tensor  # maximum
    drop_error: Tensor
    drop_residual: Tensor  # maximum
    live_rows: int  # rows that see a key
    per_row: RowAccount

    def summary(self) -> dict[str, float]:
        """One float per quantity: mean over batch and heads (maximum for residuals, median for the calibration)."""
        result: dict[str, float] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, Tensor):
                continue
            if field.name.endswith("residual"):
                result[field.name] = float(value.max())
            elif field.name == "calibration":
                result[field.name] = float(torch.nanmedian(value))
            else:
                result[field.name] = float(value.nanmean())
        return result


@torch.no_grad()
def account(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    remainder: Remainder | None,
    visibility: Visibility,
    scale: float,
    *,
    rows: slice | Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> MassAccount:
    """Compare a selection and its remainder with exact attention, row by row, without a sink.

    The output error splits exactly (docs/methods/block-sparse.md, section "Error"):
    `o - o_hat = (lambda - lam_h)(o_E - o_U) + (1 - lam_h)(o_U - Nh / Dh)`, a mass term and a value term.
    A state of no mass counts as output 0; a live row with `D_E + Dh = 0` has `lam_h = 1`, so the split still holds.

    Args:
        q: `[B, T_q, H_q, d_k]`.
        k: `[B, T_k, H_kv, d_k]`.
        v: `[B, T_k, H_kv, d_v]`.
        selection: lists for this call; H_sel of 1, H_kv or H_q.
        remainder: what stands for the rest; None drops it.
        visibility: which keys each row may see.
        scale: factor of the logits.
        rows: the query rows to account for, a slice or int64 `[R]`; None: all of them.
        dtype: of all arithmetic, fp32 or fp64.

    Returns:
        A `MassAccount`. Logits are held for a few rows at a time, never T_q x T_k.
    """
    device = q.device
    bound = selection.bound_to(visibility)
    tiles, blocks = bound.tables()
    first, end = visibility.key_range(device)
    chosen = chosen_rows(rows, visibility.query_length, device)
    token, inside = blocks.slots()
    slot_token = token.reshape(-1)
    batch, heads, kv_heads = q.shape[0], q.shape[2], k.shape[2]
    keys = k[:, slot_token].to(dtype).permute(0, 2, 3, 1)  # [B, H_kv, d_k, M * block]
    values = torch.where(inside.reshape(-1)[None, :, None, None], v[:, slot_token].to(dtype), 0.0).transpose(1, 2)
    virtual = None if remainder is None else remainder.virtual_keys(k.to(dtype), v.to(dtype), blocks)
    pieces: list[RowAccount] = []
    selected_pairs = torch.zeros(batch, heads, dtype=torch.float64, device=device)
    step = max(1, LOGIT_ELEMENTS // max(1, batch * heads * token.numel()))
    for begin in range(0, chosen.shape[0], step):
        row = chosen[begin : begin + step]
        low, high = first[row, None], end[row, None]
        bits = bound.members(tiles.of_token[row], blocks.count)[..., blocks.local]  # [B, R, H_sel, M], call's numbering
        bits = bits.transpose(1, 2)
        if bits.shape[1] == heads:
            bits = bits.unflatten(1, (kv_heads, heads // kv_heads))
        else:
            bits = bits[:, :, None]  # [B, H_kv or 1, 1, R, M]
        seen = inside & (token >= low[..., None]) & (token < high[..., None])  # [R, M, block]
        logits = grouped_logits(q[:, row].to(dtype), keys, scale).unflatten(-1, token.shape)
        logits.masked_fill_(~seen, float("-inf"))
        shift = logits.amax((-2, -1))  # [B, H_kv, G, R]
        stand_in = None
        if virtual is not None:
            covered = (blocks.start >= low) & (blocks.end <= high) & (blocks.end > blocks.start) & ~bits
            bias = virtual.bias.to(dtype)
            bias = bias[:, :, None, None, :] if bias.dim() == 3 else bias
            stand_in = grouped_logits(q[:, row].to(dtype), virtual.k.to(dtype).permute(0, 2, 3, 1), scale) + bias
            stand_in = stand_in.masked_fill(~covered, float("-inf"))
            shift = torch.maximum(shift, stand_in.amax(-1))
        shift = torch.where(shift == float("-inf"), 0.0, shift)[..., None]
        weight = logits.sub_(shift[..., None]).exp_()
        selected = weight * bits[..., None]
        everything = _sums(weight, values)
        exact = _sums(selected, values)
        omitted = _sums(weight.sub_(selected), values)  # exact: each weight is in one of the two sets
        claimed = None
        if virtual is not None and stand_in is not None:
            mass = (stand_in - shift).exp()
            claimed = mass.sum(-1), _weighted(mass, virtual.v.to(dtype).transpose(1, 2))
        count = (seen.sum(-1) * bits).sum(-1).to(dtype)  # [B, H_kv or 1, G or 1, R]
        count = count.expand(batch, kv_heads, heads // kv_heads, -1)
        selected_pairs += count.double().sum(-1).flatten(1)
        pieces.append(_account_of(everything, exact, omitted, claimed, count / (high - low)[:, 0]))
    return _average(pieces, selected_pairs, (end - first)[chosen])


def _sums(weight: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Mass `[B, H_kv, G, R]` and value sum `[B, H_kv, G, R, d_v]` of weights `[B, H_kv, G, R, M, block]`."""
    flat = weight.flatten(-2)
    return flat.sum(-1), _weighted(flat, values)


def _weighted(weight: Tensor, values: Tensor) -> Tensor:
    """`[B, H_kv, G, R, S]` times `[B, H_kv, S, d_v]`."""
    return (weight.flatten(2, 3) @ values).unflatten(2, weight.shape[2:4])


def _account_of(
    everything: tuple[Tensor, Tensor],
    exact: tuple[Tensor, Tensor],
    omitted: tuple[Tensor, Tensor],
    claimed: tuple[Tensor, Tensor] | None,
    density: Tensor,
) -> RowAccount:
    """The row account from masses and value sums `[B, H_kv, G, R(, d_v)]`."""
    (total, _), (kept, kept_sum), (left, _) = everything, exact, omitted
    claim, claim_sum = claimed if claimed is not None else (torch.zeros_like(kept), torch.zeros_like(kept_sum))
    live = total > 0
    out, out_exact, out_omitted = _output(*everything), _output(*exact), _output(*omitted)
    method = _output(kept + claim, kept_sum + claim_sum)
    share = kept / torch.where(live, total, 1.0)
    # no mass at all: output 0 and share 1, which the identity needs
    method_share = torch.where(kept + claim > 0, kept / _nonzero(kept + claim), 1.0)
    mass_term = (share - method_share)[..., None] * (out_exact - out_omitted)
    value_term = (1 - method_share)[..., None] * (out_omitted - _output(claim, claim_sum))
    drop_share = torch.where(kept > 0, share, 0.0)
    drop_term = (1 - drop_share)[..., None] * (out_omitted - out_exact)
    size = out.norm(dim=-1)

    def relative(difference: Tensor) -> Tensor:
        return difference.norm(dim=-1) / _nonzero(size)

    def tidy(x: Tensor) -> Tensor:
        return torch.where(live, x, float("nan")).flatten(1, 2).transpose(1, 2)  # [B, R, H_q]

    return RowAccount(
        density=tidy(density),
        mass_kept=tidy(share),
        mass_left_out=tidy(left / _nonzero(total)),
        mass_claimed=tidy(claim / _nonzero(kept + claim)),
        calibration=tidy(torch.where(left > 0, claim / _nonzero(left), float("nan"))),
        output_error=tidy(relative(method - out)),
        mass_error=tidy(relative(mass_term)),
        value_error=tidy(relative(value_term)),
        identity_residual=tidy(relative(out - method - mass_term - value_term)),
        drop_error=tidy(relative(out_exact - out)),
        drop_residual=tidy(relative(out - out_exact - drop_term)),
    )


def _nonzero(x: Tensor) -> Tensor:
    return torch.where(x == 0, 1.0, x)


def _output(mass: Tensor, value_sum: Tensor) -> Tensor:
    return value_sum / _nonzero(mass)[..., None]


def _average(pieces: list[RowAccount], selected_pairs: Tensor, visible: Tensor) -> MassAccount:
    """Join the pieces along the rows and average over live rows."""
    names = [field.name for field in fields(RowAccount)]
    if not pieces:
        raise ValueError("rows: expected at least one query row, got none")
    joined = {name: torch.cat([getattr(piece, name) for piece in pieces], dim=1) for name in names}
    means: dict[str, Tensor] = {}
    for name, value in joined.items():
        if name.endswith("residual"):
            means[name] = value.nan_to_num(nan=0.0).amax(1)
        elif name == "calibration":
            means[name] = value.nanmedian(dim=1).values
        else:
            means[name] = value.nanmean(dim=1)
    means["density"] = (selected_pairs / visible.sum().clamp(min=1)).to(means["density"].dtype)
    return MassAccount(**means, live_rows=int((visible > 0).sum()), per_row=RowAccount(**joined))
