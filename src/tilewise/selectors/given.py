"""The caller's own lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tilewise.layout import Visibility
from tilewise.selection import Selection
from tilewise.selectors.base import SelectorCard


@dataclass(frozen=True, eq=False)
class Given:
    """Use a ready `Selection`. Nothing is forced in: a row whose blocks are all masked is dead, legally.

    Args:
        selection: block or token lists for the calls to come; ids int32 `[B, n_q_tiles, H_sel, n]`.

    Raises:
        TypeError: not a Selection.
    """

    selection: Selection

    card: ClassVar[SelectorCard] = SelectorCard(
        name="given",
        granularity="given",
        causality="token",  # of the call; how the lists were made is the caller's matter
        cost="none",
    )

    def __post_init__(self) -> None:
        if not isinstance(self.selection, Selection):
            raise TypeError(
                f"selection: expected a Selection, got {type(self.selection).__name__}; "
                "make one with Selection.from_blocks or Selection.from_tokens"
            )

    def select(self, q: Tensor, k: Tensor, visibility: Visibility, scale: float) -> Selection:
        """Return the lists, bound to this call; q and k give the shapes to check against.

        Raises:
            ValueError: batch, heads, device or number of tiles that do not fit the call; on the CPU also a wrong id.
        """
        ids = self.selection.ids
        batch, heads, kv_heads = q.shape[0], q.shape[2], k.shape[2]
        if ids.device != q.device:
            raise ValueError(f"selection: expected ids on {q.device}, where q is, got {ids.device}")
        if ids.shape[0] != batch:
            raise ValueError(f"selection: expected batch {batch} as in q, got ids {tuple(ids.shape)}")
        if ids.shape[2] not in (1, kv_heads, heads):
            raise ValueError(
                f"selection: expected H_sel of 1, H_kv = {kv_heads} or H_q = {heads}, got ids {tuple(ids.shape)}"
            )
        needed = -(-visibility.query_length // self.selection.block_q)
        if not visibility.packed and ids.shape[1] < needed:
            raise ValueError(
                f"selection: expected {needed} query tiles of {self.selection.block_q} rows, got {ids.shape[1]}"
            )
        bound = self.selection.bound_to(visibility)
        if ids.device.type == "cpu" and not torch.compiler.is_compiling():
            bound.check()
        return bound
