"""attend(): the one public function. It checks its arguments, asks the selector, and looks the launcher up."""

from __future__ import annotations

import dataclasses
from typing import Literal, overload

import torch
from torch import Tensor

from tilewise import checks, dispatch
from tilewise.remainders.base import Remainder
from tilewise.selectors.base import Selector


@overload
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    window: int | None = ...,
    scale: float | None = ...,
    selector: Selector | None = ...,
    remainder: Remainder | None = ...,
    cu_seqlens: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
    sink: Tensor | None = ...,
    return_lse: Literal[False] = ...,
    impl: str = ...,
    deterministic: bool = ...,
) -> Tensor: ...


@overload
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    window: int | None = ...,
    scale: float | None = ...,
    selector: Selector | None = ...,
    remainder: Remainder | None = ...,
    cu_seqlens: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
    sink: Tensor | None = ...,
    return_lse: Literal[True],
    impl: str = ...,
    deterministic: bool = ...,
) -> tuple[Tensor, Tensor]: ...


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    selector: Selector | None = None,
    remainder: Remainder | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    impl: str = "auto",
    deterministic: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from q to k and v: exactly, or where a selector says, with a written account of the rest.

    Over the keys j that row i sees, with logits `s_ij = scale * q_i . k_j`:

        lse_i = log sum_j exp(s_ij)        out_i = sum_j exp(s_ij - lse_i) v_j

    With a selector the sum runs over the visible keys of the selected blocks (or tokens); the remainder adds what it says
    about the other blocks. Memory is O(T * block) on every path but the reference; everything is differentiable in q, k,
    v and sink, through out and through lse. No gradient passes through the choice of blocks.

    Args:
        q: `[B, T_q, H_q, d_k]`, fp16, bf16, fp32 or fp64; any strides.
        k: `[B, T_k, H_kv, d_k]`, same dtype and device. H_q is a multiple of H_kv; query head h reads KV head
            `h // (H_q / H_kv)`.
        v: `[B, T_k, H_kv, d_v]`, same dtype and device; d_v may differ from d_k.
        causal: row t stands at position `p = t + T_k - T_q` (bottom-right alignment) and sees keys `0 .. p`. Rows with
            `p < 0` see nothing.
        window: number of keys, at least 1: rows see keys `p - window + 1 .. p` only. Needs `causal=True`. It masks the
            remainder too.
        scale: factor of the logits, any finite number; None: `d_k ** -0.5`.
        selector: which blocks or tokens are computed exactly, from `tilewise.selectors`; None: all of them.
        remainder: what stands in for the blocks that were not selected, from `tilewise.remainders`; None with a selector
            means `remainders.Drop()`. A block of which a row sees only a part is never stood in for.
        cu_seqlens: int32 `[N+1]`, boundaries of N sequences packed along T_q (then B = 1): starts at 0, does not fall,
            ends at T_q. A sequence may be empty. The values are checked on the CPU outside torch.compile; elsewhere bad
            values are clamped into range.
        cu_seqlens_k: the same along T_k, for as many sequences; None: `cu_seqlens`.
        sink: fp32 `[H_q]` (fp64 beside fp64 inputs): one more logit per head, with a zero value, in every row's softmax:
            `out *= sigmoid(lse - sink)`. The lse leaves it out.
        return_lse: return `(out, lse)`.
        impl: "auto" takes the fastest path that exists for the call; "reference", "eager", "triton" and "hopper" ask for
            one path and raise where it does not exist. There is no silent fallback.
        deterministic: True: two runs give the same bits, backward too. False lets a path be quicker: on Hopper GPUs the
            gradient of q is then added up in no fixed order (dense calls; every other path repeats its bits anyway).

    Returns:
        out `[B, T_q, H_q, d_v]` in q's dtype; with `return_lse` also lse `[B, T_q, H_q]`, fp32 (fp64 for fp64 inputs),
        natural logarithm. A row that sees no key: out 0, lse -inf, gradients 0.

    Raises:
        ValueError: shapes, devices, lengths, window, scale or impl that do not fit; a remainder without a selector.
        TypeError: an argument of the wrong type or dtype.
        NotImplementedError: a combination that no implementation covers; the message names what exists.

    Source: docs/methods/dense.md, docs/methods/block-sparse.md.
    """
    checks.check_tensors(q, k, v)
    visibility = checks.check_layout(q, k, causal, window, cu_seqlens, cu_seqlens_k)
    scale = checks.check_scale(scale, q.shape[3])
    checks.check_sink(sink, q)
    checks.check_axes(selector, remainder)
    head_dims = (q.shape[3], v.shape[3])
    request = dispatch.Request(q.dtype, q.device, head_dims, k.shape[2], scale)
    if selector is None:
        launch = dispatch.lookup(impl, "all", "none", request)
        out, lse = launch(q, k, v, visibility=visibility, scale=scale, sink=sink, deterministic=deterministic)
        return (out, lse) if return_lse else out
    with torch.no_grad():
        selection = selector.select(q.detach(), k.detach(), visibility, scale)
    remainder_kind = "drop" if remainder is None else remainder.card.name
    # the selection, not the selector, knows its granularity: ready lists may be either
    request = dataclasses.replace(request, selection=selection)
    launch = dispatch.lookup(impl, selection.kind, remainder_kind, request)
    out, lse = launch(
        q,
        k,
        v,
        visibility=visibility,
        scale=scale,
        sink=sink,
        deterministic=deterministic,
        selection=selection,
        remainder=remainder,
    )
    return (out, lse) if return_lse else out
