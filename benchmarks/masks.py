"""Which keys a row does not see, from the sizes and lists of a case alone: what the check of results is built on."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.case import Blocks, Case


def hidden(case: Case, ids: Tensor | None, kv_head: int, rows: slice, device: torch.device) -> Tensor | None:
    """bool `[rows, T]` for one KV head of the last batch entry; None: every row sees every key.

    Args:
        ids: `[B, tiles, H_kv, n]` of a case with blocks.
    """
    row = torch.arange(rows.start, rows.stop, device=device)
    key = torch.arange(case.shape.T, device=device)
    if case.blocks is not None and ids is not None:
        return unlisted(ids[-1, :, kv_head], case.blocks, row, key)
    mask = key[None, :] > row[:, None] if case.causal else None
    if case.lengths is not None:
        lengths = torch.tensor(case.lengths, device=device)
        sequence = torch.repeat_interleave(torch.arange(lengths.shape[0], device=device), lengths)
        foreign = sequence[None, :] != sequence[row, None]
        mask = foreign if mask is None else mask | foreign
    return mask


def unlisted(ids: Tensor, blocks: Blocks, row: Tensor, key: Tensor) -> Tensor:
    """bool `[rows, keys]`: keys outside the blocks that the list of the row's tile names; ids `[tiles, n]`."""
    outside = torch.ones(ids.shape[0], key.shape[0] // blocks.block_k, dtype=torch.bool, device=ids.device)
    outside.scatter_(1, ids.long(), False)
    return outside[row // blocks.block_q].repeat_interleave(blocks.block_k, dim=1)
