"""Taylor terms of the block mass around the block mean of the keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tilewise.layout import BlockTable
from tilewise.remainders.base import LawCard, VirtualKeys


@dataclass(frozen=True)
class Taylor:
    """Each unselected, wholly visible block b counts as `B_b` copies of its mean key, with its mean value.

    `Dh_ib = B_b exp(scale q_i . kbar_b)`, `Nh_ib = Dh_ib vbar_b`. By Jensen's inequality `Dh_ib <= Z_ib`: the claimed
    mass never exceeds the true one; the gap in the logarithm is about half the variance of the block's logits.

    Args:
        order: 0. The first-order term is not written yet.

    Raises:
        NotImplementedError: order 1.
        ValueError: any other order.

    Source: docs/methods/block-sparse.md, section "Taylor".
    """

    order: int = 0

    card: ClassVar[LawCard] = LawCard(
        name="taylor0",
        weights_sum_to_one=True,
        mass_bias="under",
        differentiable_in=("q", "k", "v"),
        summaries=("mean key", "mean value", "log block size"),
        merge_across_ranks=True,
        causal_rule="covers unselected blocks of which the row sees every key",
        empty_row="output 0, LSE -inf, gradients 0",
    )

    def __post_init__(self) -> None:
        if self.order == 1:
            raise NotImplementedError("order: Taylor(order=1) is not written; have: Taylor(order=0), Drop()")
        if self.order != 0:
            raise ValueError(f"order: expected 0, got {self.order!r}; have: Taylor(order=0)")

    def virtual_keys(self, k: Tensor, v: Tensor, table: BlockTable) -> VirtualKeys:
        """Mean key, mean value and log size of each block.

        Args:
            k: `[B, T_k, H_kv, d_k]`, any floating dtype.
            v: `[B, T_k, H_kv, d_v]`.
            table: the blocks of the key axis, M of them.

        Returns:
            fp32 (fp64 for fp64 inputs) `VirtualKeys`, differentiable in k and v; an empty block holds zeros.
        """
        size = (table.end - table.start).clamp(min=1)
        mean_key, mean_value = block_means(k, table), block_means(v, table)
        return VirtualKeys(mean_key, mean_value, size.to(mean_key.dtype).log())


def block_means(x: Tensor, table: BlockTable) -> Tensor:
    """Mean over the tokens of each block, in fp32 (fp64 for fp64): `[B, T, H, D] -> [B, M, H, D]`; empty blocks: 0.

    Differentiable. A token fills one slot at most, so its gradient is one term and has no order of summation to fix.
    """
    if x.dtype != torch.float64:
        x = x.float()
    batch, length, heads, width = x.shape
    if table.count == 0 or length == 0:
        return x.new_zeros(batch, 0, heads, width)
    token, inside = table.slots()
    gathered = x.index_select(1, token.reshape(-1)).view(batch, table.count, table.block, heads, width)
    # where, not a product: a slot past the end may read a token of no sequence, which may hold NaN
    total = torch.where(inside[None, :, :, None, None], gathered, 0.0).sum(2)
    return total / (table.end - table.start).clamp(min=1)[None, :, None, None]
