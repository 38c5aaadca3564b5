"""What the dense operators run: inputs the kernels can read, tiles, launches."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels.triton.config import dense_tiles
from tilewise.kernels.triton.dense_backward import launch_dense_backward
from tilewise.kernels.triton.dense_forward import empty_outputs, launch_dense_forward
from tilewise.kernels.triton.launch import INTERPRETED, Call, describe_call

LARGEST_TOKEN_STRIDE = 2**31 // 256  # offsets within a tile of up to 256 rows are 32-bit


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, sink: Tensor | None,
    causal: bool, window: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Forward of `tilewise::dense_forward`; see kernels/ops.py."""
    _require_kernels(q)
    q, k, v = (_readable(x) for x in (q, k, v))
    call = describe_call(q, k, v, cu_q, cu_k, causal, window, scale)
    out, lse = empty_outputs(call, q)
    if out.numel() == 0:
        return out, lse
    if call.key_length == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    launch_dense_forward(call, q, k, v, sink, out, lse, _tiles(call, q).forward)
    return out, lse


def backward(
    dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_q: Tensor | None, cu_k: Tensor | None, sink: Tensor | None, causal: bool, window: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Backward of `tilewise::dense_forward`; see kernels/ops.py."""
    _require_kernels(q)
    no_sink = torch.empty(0, dtype=torch.float32, device=q.device)
    if out.numel() == 0 or k.numel() == 0:
        dsink = torch.zeros_like(sink) if sink is not None else no_sink
        return tuple(torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)) + (dsink,)
    q, k, v, dout = (_readable(x) for x in (q, k, v, dout))
    call = describe_call(q, k, v, cu_q, cu_k, causal, window, scale)
    dq, dk, dv, dsink = launch_dense_backward(
        call, dout, dlse.contiguous(), q, k, v, sink, out.contiguous(), lse.contiguous(), _tiles(call, q)
    )
    return dq, dk, dv, dsink if dsink is not None else no_sink


def _tiles(call: Call, q: Tensor):
    return dense_tiles(q.dtype, call.d_k, call.d_v, call.causal, q.device)


def _readable(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy if its last dim is not dense or a tile's tokens span 2^31 elements."""
    if tensor.stride(-1) == 1 and tensor.stride(1) < LARGEST_TOKEN_STRIDE:
        return tensor
    return tensor.contiguous()


def _require_kernels(q: Tensor) -> None:
    if q.device.type == "cpu" and not INTERPRETED:
        raise NotImplementedError(
            "impl: 'triton' needs tensors on a GPU, got cpu; use impl='eager', or TRITON_INTERPRET=1 to debug the kernels"
        )
