"""What the laws are run over. Adding a selector or a remainder to every law is one line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.layout import Visibility
from tilewise.remainders import Drop, Remainder, Taylor
from tilewise.selectors import Oracle, Pooled, Selector, Window


@dataclass(frozen=True)
class Choice:
    """A selector, twice: with a part of the blocks, and with all of them. Both take `block_q` and `block_k`."""

    part: Callable[..., Selector]
    everything: Callable[..., Selector]


SELECTORS: dict[str, Choice] = {
    "pooled": Choice(lambda **size: Pooled(blocks=3, **size), lambda **size: Pooled(density=1.0, **size)),
    "oracle": Choice(lambda **size: Oracle(density=0.4, **size), lambda **size: Oracle(blocks=99, **size)),
    "window": Choice(lambda **size: Window(7, initial=1, **size), lambda **size: Window(999, **size)),
}
REMAINDERS: dict[str, Callable[[], Remainder]] = {
    "drop": Drop,
    "taylor0": Taylor,
}
# no size is a multiple of another: a transposed or a padded dimension shows
BLOCKS = {"tiles": {"block_q": 8, "block_k": 4}, "tokens": {"block_q": 1, "block_k": 5}}


@dataclass(frozen=True)
class Call:
    """Arguments of one call of attend, apart from the tensors."""

    query_length: int
    key_length: int
    causal: bool = True
    window: int | None = None
    cu_seqlens: tuple[int, ...] | None = None
    cu_seqlens_k: tuple[int, ...] | None = None
    batch: int = 2

    def arguments(self) -> dict:
        """Keyword arguments of attend."""
        result: dict = {"causal": self.causal, "window": self.window}
        for name in ("cu_seqlens", "cu_seqlens_k"):
            if getattr(self, name) is not None:
                result[name] = torch.tensor(getattr(self, name), dtype=torch.int32)
        return result

    def visibility(self) -> Visibility:
        """What the arguments mean."""
        packed = self.arguments()
        return Visibility(
            self.query_length,
            self.key_length,
            self.causal,
            self.window,
            packed.get("cu_seqlens"),
            packed.get("cu_seqlens_k"),
        )

    def tensors(self, dtype: torch.dtype = torch.float64, heads: int = 4, kv_heads: int = 2, seed: int = 0):
        """q `[B, T_q, H_q, 6]`, k `[B, T_k, H_kv, 6]`, v `[B, T_k, H_kv, 5]`, sink `[H_q]`."""
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)

        q = 2 * draw(self.batch, self.query_length, heads, 6)
        k, v = draw(self.batch, self.key_length, kv_heads, 6), draw(self.batch, self.key_length, kv_heads, 5)
        return q, k, v, draw(heads).to(torch.float64 if dtype == torch.float64 else torch.float32)


CALLS: dict[str, Call] = {
    "causal": Call(29, 29),
    "full": Call(19, 31, causal=False),
    "few queries": Call(11, 37),
    "dead rows": Call(29, 17),
    "window": Call(37, 37, window=13),
    "packed": Call(
        37, 40, cu_seqlens=(0, 13, 13, 30, 37), cu_seqlens_k=(0, 11, 14, 37, 40), batch=1
    ),  # one sequence without queries, one with more queries than keys
    "packed, full": Call(23, 29, causal=False, cu_seqlens=(0, 5, 23), cu_seqlens_k=(0, 9, 29), batch=1),
}
