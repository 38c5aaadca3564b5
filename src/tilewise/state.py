"""The attention state: the one algebra under every method, and the only file that does LSE arithmetic.

A state stands for softmax attention over a set of keys I, with logits s_j and values v_j:

    lse = log sum_{j in I} exp(s_j)            natural log
    out = sum_{j in I} exp(s_j - lse) v_j

Disjoint sets merge (docs/methods/dense.md, section "State"); the identity is (0, -inf): a row that sees nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NEGATIVE_INFINITY = float("-inf")


@dataclass(frozen=True)
class AttentionState:
    """Normalised output and log-sum-exp of attention over a set of keys.

    Attributes:
        out: `[..., H, d_v]`, fp32 (fp64 where the inputs were fp64). 0 for a row that sees no key.
        lse: `[..., H]`, same dtype, natural log. `-inf` for a row that sees no key.
    """

    out: Tensor
    lse: Tensor

    def __post_init__(self) -> None:
        if self.out.shape[:-1] != self.lse.shape:
            raise ValueError(
                f"lse: expected shape {tuple(self.out.shape[:-1])} (out without its last dimension), "
                f"got {tuple(self.lse.shape)}"
            )

    @classmethod
    def empty(
        cls,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> AttentionState:
        """Make the identity of the merge, `(0, -inf)`; `shape` is that of `out`, `[..., H, d_v]`."""
        out = torch.zeros(*shape, dtype=dtype, device=device)
        lse = torch.full(tuple(shape[:-1]), NEGATIVE_INFINITY, dtype=dtype, device=device)
        return cls(out, lse)

    def merge(self, other: AttentionState) -> AttentionState:
        """Merge with the state of a disjoint set of keys."""
        return merge_all([self, other])

    def finish(self, sink: Tensor | None = None) -> Tensor:
        """Return the output, with the attention sink applied once: `out * sigmoid(lse - sink)`.

        Args:
            sink: `[H]` fp32 logit per head with a zero value (finite or -inf), or None.

        Returns:
            `[..., H, d_v]`; 0 for a row that sees no key, whatever the sink.
        """
        if sink is None:
            return self.out
        dead = self.lse == NEGATIVE_INFINITY
        # the inner where keeps -inf - (-inf) out of both the value and the gradient
        live_lse = torch.where(dead, 0.0, self.lse)
        share = torch.where(dead, 0.0, torch.sigmoid(live_lse - sink.to(self.lse.dtype)))
        return self.out * share[..., None]


def merge(a: AttentionState, b: AttentionState) -> AttentionState:
    """Merge the states of two disjoint sets of keys; associative, commutative, identity `(0, -inf)`."""
    return merge_all([a, b])


def merge_all(states: Sequence[AttentionState]) -> AttentionState:
    """Merge the states of pairwise disjoint sets of keys in one pass, in the order given.

    Args:
        states: at least one state, all of one shape.

    Returns:
        The state of the union: `lse = log sum exp(lse_i)`, `out = sum out_i exp(lse_i - lse)`. Differentiable in every
        `out` and `lse`, also where some or all are `-inf` (their gradients are 0, never NaN).

    Raises:
        ValueError: no states, or shapes that differ.
    """
    if not states:
        raise ValueError("states: expected at least one AttentionState, got none; AttentionState.empty is the identity")
    first = states[0]
    for state in states[1:]:
        if state.out.shape != first.out.shape:
            raise ValueError(
                f"states: expected one shape, got out {tuple(first.out.shape)} and {tuple(state.out.shape)}"
            )
    maximum = first.lse.detach()
    for state in states[1:]:
        maximum = torch.maximum(maximum, state.lse.detach())
    # the result does not depend on the shift, so it carries no gradient; 0 stands in for -inf - (-inf)
    shift = torch.where(maximum == NEGATIVE_INFINITY, 0.0, maximum)
    weights = [torch.exp(state.lse - shift) for state in states]
    total = weights[0]
    out = states[0].out * weights[0][..., None]
    for state, weight in zip(states[1:], weights[1:], strict=True):
        total = total + weight
        out = out + state.out * weight[..., None]
    dead = total == 0
    divisor = torch.where(dead, 1.0, total)
    lse = torch.where(dead, NEGATIVE_INFINITY, shift + torch.log(divisor))
    return AttentionState(out / divisor[..., None], lse)
