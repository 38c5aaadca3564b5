"""Checks of attend's arguments. Every message says: argument, expected, got, and the nearest thing that works."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewise.layout import Visibility

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Types, ranks, dtypes, devices and shapes of q, k and v.

    Raises:
        TypeError: not a tensor, or a dtype that is unsupported or differs from q's.
        ValueError: anything else.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(
                f"{name}: expected [B, T, H, D] (rank 4), got rank {x.dim()}, shape {tuple(x.shape)}; "
                "packed sequences are [1, T_total, H, D] with cu_seqlens"
            )
    if q.dtype not in DTYPES:
        raise TypeError(
            f"q: expected float16, bfloat16, float32 or float64, got {q.dtype}; cast with .to(torch.bfloat16)"
        )
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: expected {q.dtype} as q, got {x.dtype}; cast with .to(q.dtype)")
        if x.device != q.device:
            raise ValueError(f"{name}: expected device {q.device} as q, got {x.device}; move it with .to(q.device)")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name}: expected batch {q.shape[0]} as q, got {x.shape[0]}")
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"v: expected T_k = {k.shape[1]} tokens as k, got {v.shape[1]}")
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"v: expected H_kv = {k.shape[2]} heads as k, got {v.shape[2]}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"k: expected d_k = {q.shape[3]} as q, got {k.shape[3]} (only v may have another head dim)")
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads < 1 or kv_heads < 1 or q.shape[3] < 1 or v.shape[3] < 1:
        raise ValueError(
            "q, k, v: expected at least one head and one channel, "
            f"got shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if heads % kv_heads != 0:
        raise ValueError(
            f"q: expected H_q to be a multiple of H_kv = {kv_heads}, got H_q = {heads}; "
            "query head h reads KV head h // (H_q / H_kv)"
        )


def check_layout(
    q: Tensor,
    k: Tensor,
    causal: bool,
    window: int | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> Visibility:
    """Check window and cu_seqlens, and put together what each row sees. cu_seqlens alone serves both sides.

    Raises:
        TypeError: causal not a bool, window not an int, cu_seqlens not int32.
        ValueError: anything else.
    """
    if not isinstance(causal, bool):
        raise TypeError(f"causal: expected True or False, got {type(causal).__name__}; convert with bool(...)")
    if window is not None:
        if isinstance(window, bool) or not isinstance(window, (int, torch.SymInt)):
            raise TypeError(f"window: expected an int or None, got {type(window).__name__}")
        if window < 1:
            raise ValueError(f"window: expected at least 1 key (the row's own), got {window}; None means no window")
        if not causal:
            raise ValueError(f"window: expected causal=True beside window={window}, got causal=False; pass causal=True")
    if cu_seqlens is None and cu_seqlens_k is not None:
        raise ValueError(
            "cu_seqlens_k: expected cu_seqlens beside it, got cu_seqlens=None; pass the query boundaries too"
        )
    if cu_seqlens is None:
        return Visibility(q.shape[1], k.shape[1], causal, window)
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens
    if q.shape[0] != 1:
        raise ValueError(
            f"cu_seqlens: expected B = 1 in q, k and v (sequences lie end to end), got B = {q.shape[0]}; "
            "flatten to [1, T_total, H, D]"
        )
    _check_boundaries("cu_seqlens", cu_seqlens, q, "T_q")
    _check_boundaries("cu_seqlens_k", cu_seqlens_k, k, "T_k")
    if cu_seqlens.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k: expected {cu_seqlens.shape[0] - 1} sequences as cu_seqlens, got {cu_seqlens_k.shape[0] - 1}; "
            "a sequence may have length 0 on either side"
        )
    return Visibility(q.shape[1], k.shape[1], causal, window, cu_seqlens, cu_seqlens_k)


def _check_boundaries(name: str, cu_seqlens: Tensor, x: Tensor, length_name: str) -> None:
    """Type, shape and device; on the CPU, outside torch.compile, the values too."""
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(
            f"{name}: expected an int32 tensor, got {type(cu_seqlens).__name__}; use torch.tensor(..., dtype=torch.int32)"
        )
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"{name}: expected int32, got {cu_seqlens.dtype}; cast with .to(torch.int32)")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"{name}: expected shape [N+1] for N >= 1 sequences, got {tuple(cu_seqlens.shape)}")
    if cu_seqlens.device != x.device:
        raise ValueError(
            f"{name}: expected device {x.device} as q, got {cu_seqlens.device}; move it with .to(q.device)"
        )
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        return
    values, length = cu_seqlens.tolist(), x.shape[1]
    if values[0] != 0:
        raise ValueError(f"{name}: expected to start at 0, got {values[0]}")
    for i in range(1, len(values)):
        if values[i] < values[i - 1]:
            raise ValueError(f"{name}: expected values that do not fall, got {values[i - 1]} then {values[i]} at {i}")
    if values[-1] != length:
        raise ValueError(f"{name}: expected to end at {length_name} = {length}, got {values[-1]}")


def check_scale(scale: float | None, head_dim: int) -> float:
    """Return the factor of the logits: `scale`, or `d_k ** -0.5` for None.

    Raises:
        TypeError: not a number.
        ValueError: not finite.
    """
    if scale is None:
        return head_dim**-0.5
    if isinstance(scale, bool) or not isinstance(scale, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"scale: expected a float or None, got {type(scale).__name__}; a tensor can multiply q instead")
    if not math.isfinite(scale):
        raise ValueError(f"scale: expected a finite number, got {scale}; None means d_k ** -0.5 = {head_dim**-0.5:.6g}")
    return float(scale)


def check_sink(sink: Tensor | None, q: Tensor) -> None:
    """Sink: `[H_q]` fp32 (fp64 beside fp64 inputs) on q's device.

    Raises:
        TypeError: not a tensor, or another dtype.
        ValueError: another shape or device.
    """
    if sink is None:
        return
    heads = q.shape[2]
    if not isinstance(sink, Tensor):
        raise TypeError(f"sink: expected a float32 tensor [H_q] = [{heads}], got {type(sink).__name__}")
    if sink.shape != (heads,):
        raise ValueError(f"sink: expected one logit per query head, shape [{heads}], got {tuple(sink.shape)}")
    if sink.dtype != torch.float32 and not (sink.dtype == torch.float64 == q.dtype):
        raise TypeError(f"sink: expected float32 (float64 beside float64 inputs), got {sink.dtype}; cast with .float()")
    if sink.device != q.device:
        raise ValueError(f"sink: expected device {q.device} as q, got {sink.device}; move it with .to(q.device)")


def check_axes(selector: object, remainder: object) -> None:
    """Selector and remainder, by the members that the engine calls.

    Raises:
        TypeError: an object that is not a selector, or not a remainder.
        ValueError: a remainder without a selector.
    """
    if selector is None and remainder is not None:
        raise ValueError(
            f"remainder: needs a selector, which leaves something out; got remainder={type(remainder).__name__} with "
            "selector=None; pass for example selector=selectors.Pooled(density=0.1)"
        )
    if selector is not None and not _is_instance_with(selector, "select"):
        raise TypeError(
            f"selector: expected an instance from tilewise.selectors, got {_describe(selector)}; "
            "ready lists go in as selectors.Given(selection)"
        )
    if remainder is not None and not _is_instance_with(remainder, "virtual_keys"):
        raise TypeError(
            f"remainder: expected an instance from tilewise.remainders, got {_describe(remainder)}; "
            "for example remainders.Drop() or remainders.Taylor(order=0)"
        )


def _is_instance_with(value: object, member: str) -> bool:
    return not isinstance(value, type) and callable(getattr(value, member, None)) and hasattr(value, "card")


def _describe(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    return type(value).__name__
