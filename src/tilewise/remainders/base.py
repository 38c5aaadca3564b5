"""What a remainder is: the answer to "what happens to the blocks that were not selected?"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor

from tilewise.layout import BlockTable


@dataclass(frozen=True)
class LawCard:
    """What a remainder promises; documentation, the law tests and the diagnosis read it."""

    name: str  # what dispatch and error messages call it
    weights_sum_to_one: bool  # without a sink, for rows that see a key
    mass_bias: str  # claimed mass of the unselected keys against the truth: "none", "under", "over" or "either"
    differentiable_in: tuple[str, ...]  # arguments of attend that get a gradient through the remainder
    summaries: tuple[str, ...]  # what it keeps of each key block
    merge_across_ranks: bool  # may states that hold it be merged, each rank owning whole blocks?
    causal_rule: str  # which unselected blocks it covers
    empty_row: str  # what a row gets that neither selects nor covers a visible key


@dataclass(frozen=True)
class VirtualKeys:
    """One key per block that stands for all keys of the block.

    Virtual key m adds `exp(scale * q . k[m] + bias[m])` to the mass of a row and `v[m]` times that to its output.

    Attributes:
        k: `[B, M, H_kv, d_k]`, fp32 (fp64 where the inputs were fp64), M = the block table's count.
        v: `[B, M, H_kv, d_v]`, same dtype.
        bias: `[B, H_kv, M]` or `[M]`, same dtype, natural logarithm.
    """

    k: Tensor
    v: Tensor
    bias: Tensor


@runtime_checkable
class Remainder(Protocol):
    """Two members: the summaries of the blocks, and the law card.

    The engine decides who reads virtual key m: rows of the block's own sequence that see every key of block m and did
    not select it. A partly visible block that was not selected contributes nothing.
    """

    card: ClassVar[LawCard]

    def virtual_keys(self, k: Tensor, v: Tensor, table: BlockTable) -> VirtualKeys | None:
        """Summarise the blocks of `k [B, T_k, H_kv, d_k]` and `v [B, T_k, H_kv, d_v]`; None: nothing stands in."""
        ...
