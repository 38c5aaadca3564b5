"""What the Hopper operators run: inputs the copy engine can read, order of work, launches."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels.hopper import launch
from tilewise.kernels.hopper.config import backward_covers
from tilewise.kernels.hopper.launch import Lists, WalkCall
from tilewise.kernels.triton import dense as portable
from tilewise.kernels.triton.dense_backward import launch_prepare
from tilewise.kernels.triton.dense_forward import empty_outputs
from tilewise.kernels.triton.launch import device_of


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, sink: Tensor | None,
    ids: Tensor | None, block_q: int, causal: bool, window: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Out `[B, T_q, H_q, d_v]` and lse `[B, H_q, T_q]`; see kernels/walk_ops.py."""
    q, k, v = (readable(x) for x in (q, k, v))
    call = WalkCall(q, k, v, cu_q, cu_k, causal, window, scale)
    out, lse = empty_outputs(call.portable, q)
    if out.numel() == 0:
        return out, lse
    if k.shape[1] == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    with device_of(q):
        launch.launch_forward(call, q, k, v, sink, out, lse, Lists.forward(call, ids, block_q))
    return out, lse


def backward(
    dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor | None,
    cu_k: Tensor | None, sink: Tensor | None, ids: Tensor | None, block_q: int, causal: bool, window: int, scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and sink (empty without one); see kernels/walk_ops.py."""
    if not backward_covers(q.shape[3], v.shape[3]) or out.numel() == 0 or k.numel() == 0:
        # one convention for (out, lse): what this path does not cover, the portable kernels finish; lists never come here
        # with head dims that are not covered, and where there is nothing to attend they change nothing
        return portable.backward(dout, dlse, q, k, v, out, lse, cu_q, cu_k, sink, causal, window, scale)
    q, k, v, dout = (readable(x) for x in (q, k, v, dout))
    call = WalkCall(q, k, v, cu_q, cu_k, causal, window, scale)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk = torch.empty(k.shape, dtype=k.dtype, device=q.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=q.device)
    with device_of(q):
        statistics = launch_prepare(
            call.portable, dout, dlse.contiguous(), out.contiguous(), lse.contiguous(), sink, dq
        )
        if deterministic or ids is not None:
            lists = Lists.forward(call, ids, block_q)
            launch.launch_query_gradient(call, q, k, v, dout, sink, statistics, dq, lists)
            launch.launch_key_gradient(
                call, q, k, v, dout, sink, statistics, dk, dv, None, Lists.transposed(call, ids, block_q)
            )
        else:
            total = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
            launch.launch_key_gradient(call, q, k, v, dout, sink, statistics, dk, dv, total, None)
            torch.mul(total, scale, out=dq)
    dsink = statistics.sink_gradient(sink)
    return dq, dk, dv, dsink if dsink is not None else torch.empty(0, dtype=torch.float32, device=q.device)


def readable(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy where the copy engine cannot read it: rows of 16 bytes, a dense last dim."""
    unit = 16 // tensor.itemsize
    aligned = tensor.data_ptr() % 16 == 0 and tensor.stride(-1) == 1
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        aligned = aligned and (size == 1 or (stride % unit == 0 and stride > 0))
    return tensor if aligned else tensor.contiguous()
