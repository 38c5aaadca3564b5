"""Exact attention by one walk over every visible key."""

from __future__ import annotations

from torch import Tensor

from tilewise.eager.walk import walk
from tilewise.layout import Visibility


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visibility: Visibility,
    scale: float,
    sink: Tensor | None,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return `(out, lse)`: `[B, T_q, H_q, d_v]` in q's dtype and `[B, T_q, H_q]` fp32 (fp64), without the sink.

    Natural log; a row that sees no key holds 0 and -inf. `deterministic` changes nothing: this path always is.
    """
    first, end = visibility.key_range(q.device)
    state = walk(q, k, v, first=first, end=end, scale=scale)
    return state.finish(sink).to(q.dtype), state.lse
