"""Selections judged by true block mass: the oracle at the budget of another selection, and mass left out by budget."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.capture import LayerCapture
from tilewise.diagnose.mass import block_logmass
from tilewise.diagnose.methods import selectors_at
from tilewise.selection import Selection
from tilewise.selectors.choose import tile_table

BUDGETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)


@dataclass(frozen=True)
class CurvePoint:
    """Mass left out by one selector at one budget, mean over rows and heads of a layer."""

    layer: int
    selector: str
    blocks: int
    density: float
    mass_left_out: float


def block_mass(layer: LayerCapture, block: int) -> Tensor:
    """Softmax mass of every key block: fp32 `[B, T_q, H_q, M]`, rows sum to 1 (dead rows: 0)."""
    log_mass = block_logmass(layer.q, layer.k, layer.visibility, layer.scale, block)
    return torch.softmax(log_mass, dim=-1).nan_to_num(nan=0.0)


def oracle_at_budget_of(selection: Selection, mass: Tensor, kv_heads: int) -> Selection:
    """The lists that keep the most mass with as many blocks in each list as `selection` has.

    Blocks that overlap the tile's own positions are kept wherever the selection has room, so that both have the same
    density. One unpacked sequence.

    Args:
        selection: bound to its call; H_sel 1, H_kv or H_q.
        mass: `[B, T_q, H_q, M]` from `block_mass`.
        kv_heads: H_kv; lists that all heads share become lists per KV head.
    """
    if selection.visibility is None:
        raise ValueError("selection: expected one that is bound to its call; use selection.bound_to(visibility)")
    batch, rows, heads, blocks = mass.shape
    lists = max(selection.ids.shape[2], kv_heads)
    tiles = tile_table(selection.visibility, selection.block_q, selection.block_k, mass.device)
    count = tiles.rows.count
    shared = mass.unflatten(2, (lists, heads // lists)).sum(3)
    rank = mass.new_zeros(batch, count, lists, blocks).index_add_(1, tiles.rows.of_token, shared)
    start, end = tiles.keys.start, tiles.keys.end
    own = (start < tiles.own_end[:, None]) & (end > tiles.own_first[:, None])
    seen = (start < tiles.end[:, None]) & (end > tiles.first[:, None])
    rank = rank.masked_fill(own[:, None], float("inf")).masked_fill(~seen[:, None], float("-inf"))
    order = torch.sort(rank, dim=-1, descending=True, stable=True)
    quota = (selection.ids >= 0).sum(-1, keepdim=True)
    taken = (torch.arange(blocks, device=mass.device) < quota) & (order.values > float("-inf"))
    ids = torch.where(taken, order.indices, blocks).sort(-1).values
    ids = torch.where(ids < blocks, ids, -1)
    return Selection.from_blocks(
        ids, block_q=selection.block_q, block_k=selection.block_k, visibility=selection.visibility
    )


def left_out(selection: Selection, mass: Tensor) -> Tensor:
    """Mass in blocks that are not selected, `[B, T_q, H_q]`; `mass` from `block_mass` with the same block size."""
    rows, _ = selection.tables()
    selected = selection.members(rows.of_token, mass.shape[3])  # [B, T_q, H_sel, M]
    selected = selected.repeat_interleave(mass.shape[2] // selected.shape[2], dim=2)
    return mass.masked_fill(selected, 0.0).sum(-1)


def curve(number: int, layer: LayerCapture, block: int, mass: Tensor) -> list[CurvePoint]:
    """Mass left out by every selector over BUDGETS (those that leave something out)."""
    points: list[CurvePoint] = []
    for blocks in BUDGETS:
        if blocks * block >= layer.k.shape[1]:
            break
        for name, selector in selectors_at(blocks, block).items():
            if name == "oracle":
                window = selectors_at(blocks, block)["window"]  # any list of this budget, at no cost
                like = window.select(layer.q, layer.k, layer.visibility, layer.scale)
                selection = oracle_at_budget_of(like, mass, layer.k.shape[2])
            else:
                selection = selector.select(layer.q, layer.k, layer.visibility, layer.scale)
            value = float(left_out(selection, mass).mean())
            points.append(CurvePoint(number, name, blocks, float(selection.density), value))
    return points
