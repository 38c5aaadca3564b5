"""Drop and renormalise: the unselected keys contribute nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tilewise.layout import BlockTable
from tilewise.remainders.base import LawCard, VirtualKeys


@dataclass(frozen=True)
class Drop:
    """Softmax over the selected keys alone: `out = N_E / D_E`, `lse = log D_E` (natural log).

    Against dense attention it errs by exactly `(1 - D_E / D) (o_U - o_E)`: docs/methods/block-sparse.md.
    """

    card: ClassVar[LawCard] = LawCard(
        name="drop",
        weights_sum_to_one=True,
        mass_bias="under",
        differentiable_in=("q", "k", "v"),
        summaries=(),
        merge_across_ranks=True,
        causal_rule="covers no block",
        empty_row="output 0, LSE -inf, gradients 0",
    )

    def virtual_keys(self, k: Tensor, v: Tensor, table: BlockTable) -> VirtualKeys | None:
        """Return None: no block has a stand-in."""
        return None
