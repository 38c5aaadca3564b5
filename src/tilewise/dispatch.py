"""One literal table: which implementations compute a (selector, remainder) pair, for what dtypes and devices.

Every launcher's module imports torch only; a kernel is imported when its operator first runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.eager import dense as eager_dense
from tilewise.eager import sparse as eager_sparse
from tilewise.kernels import ops, walk_ops
from tilewise.reference import blocks as reference_blocks
from tilewise.reference import dense as reference_dense
from tilewise.selection import Selection

IMPLEMENTATIONS = ("auto", "reference", "eager", "triton", "hopper")
# what "auto" tries, best first; the reference is for judging and is never chosen
AUTO_ORDER = ("hopper", "triton", "eager")
HALF = (torch.float16, torch.bfloat16)
HALF_AND_SINGLE = (*HALF, torch.float32)
ALL_FLOATS = (*HALF_AND_SINGLE, torch.float64)


@dataclass(frozen=True)
class Request:
    """What of a call decides which implementations can take it."""

    dtype: torch.dtype
    device: torch.device
    head_dims: tuple[int, int]  # (d_k, d_v)
    kv_heads: int = 1
    scale: float = 1.0
    selection: Selection | None = None


def _walk_obstacle(request: Request) -> str | None:
    return walk_ops.obstacle(request.device, request.head_dims, request.scale, request.selection, request.kv_heads)


@dataclass(frozen=True)
class Row:
    """One implementation of a pair."""

    launcher: Callable[
        ..., tuple[Tensor, Tensor]
    ]  # (q, k, v, *, visibility, scale, sink, deterministic, ...) -> (out, lse)
    dtypes: tuple[torch.dtype, ...]
    devices: tuple[str, ...]  # ("any",): every device type
    largest_head_dim: int | None = None  # of d_k and d_v; None: any
    backward: bool = True
    compiles: bool = True  # torch.compile(fullgraph=True) of attend works with it
    limits: Callable[[Request], str | None] | None = None  # further obstacles, in words

    def obstacle(self, request: Request) -> str | None:
        """What keeps this row from a call, in words; None: nothing."""
        dtype, device, head_dims = request.dtype, request.device, request.head_dims
        if dtype not in self.dtypes:
            return f"dtype {dtype} (have: {', '.join(str(d) for d in self.dtypes)})"
        if self.largest_head_dim is not None and max(head_dims) > self.largest_head_dim:
            return f"head dims d_k = {head_dims[0]}, d_v = {head_dims[1]} (at most {self.largest_head_dim})"
        if self.devices != ("any",) and device.type not in self.devices and not self._interpreted_on(device):
            return f"device {device.type!r} (have: {', '.join(self.devices)}, or the CPU under TRITON_INTERPRET=1)"
        return self.limits(request) if self.limits is not None else None

    def _interpreted_on(self, device: torch.device) -> bool:
        return device.type == "cpu" and ops.interpreted()


TABLE: dict[tuple[str, str], dict[str, Row]] = {
    ("all", "none"): {
        "hopper": Row(walk_ops.attention, HALF, ("any",), limits=_walk_obstacle),
        "triton": Row(ops.dense_attention, HALF_AND_SINGLE, ("cuda",), largest_head_dim=256),
        "eager": Row(eager_dense.attention, ALL_FLOATS, ("any",)),
        "reference": Row(reference_dense.attention, ALL_FLOATS, ("any",), compiles=False),
    },
    ("block", "drop"): {
        "hopper": Row(walk_ops.attention, HALF, ("any",), limits=_walk_obstacle),
        "eager": Row(eager_sparse.attention, ALL_FLOATS, ("any",)),
        "reference": Row(reference_blocks.launch, ALL_FLOATS, ("any",), compiles=False),
    },
    ("block", "taylor0"): {
        "eager": Row(eager_sparse.attention, ALL_FLOATS, ("any",)),
        "reference": Row(reference_blocks.launch, ALL_FLOATS, ("any",), compiles=False),
    },
    ("token", "drop"): {
        "eager": Row(eager_sparse.attention, ALL_FLOATS, ("any",)),
        "reference": Row(reference_blocks.launch, ALL_FLOATS, ("any",), compiles=False),
    },
    ("token", "taylor0"): {
        "eager": Row(eager_sparse.attention, ALL_FLOATS, ("any",)),
        "reference": Row(reference_blocks.launch, ALL_FLOATS, ("any",), compiles=False),
    },
}


def choose(
    impl: str,
    selector_kind: str,
    remainder_kind: str,
    request: Request,
) -> str:
    """Name the implementation of one call.

    Args:
        impl: one of IMPLEMENTATIONS. "auto" takes the first of hopper, triton, eager that fits the call.
        selector_kind: "all" (no selector), "block" or "token".
        remainder_kind: "none" (no selector), "drop" or "taylor0".
        request: dtype, device, head dims and the rest that decides.

    Returns:
        A key of the pair's entry in TABLE. An explicit request is met or refused, never replaced.

    Raises:
        ValueError: impl is not one of IMPLEMENTATIONS.
        NotImplementedError: the pair, or the pair with this impl, dtype, device or head dim, is not in the table.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl: expected one of {', '.join(map(repr, IMPLEMENTATIONS))}, got {impl!r}")
    rows = TABLE.get((selector_kind, remainder_kind))
    if rows is None:
        have = ", ".join(f"({s}, {r})" for s, r in TABLE)
        raise NotImplementedError(
            f"selector, remainder: the pair ({selector_kind}, {remainder_kind}) has no implementation; have: {have}"
        )
    if impl != "auto":
        row = rows.get(impl)
        if row is None:
            raise NotImplementedError(
                f"impl: {impl!r} has no ({selector_kind}, {remainder_kind}); have: {', '.join(rows)}"
            )
        obstacle = row.obstacle(request)
        if obstacle is not None:
            raise NotImplementedError(f"impl: {impl!r} does not take {obstacle}; use impl='auto' or impl='eager'")
        return impl
    # interpreted kernels are for tests: on a CPU "auto" means eager
    order = AUTO_ORDER if request.device.type != "cpu" else ("eager",)
    for name in order:
        row = rows.get(name)
        if row is not None and row.obstacle(request) is None:
            return name
    raise NotImplementedError(
        f"impl: nothing takes ({selector_kind}, {remainder_kind}) for {request.dtype} on {request.device.type!r};"
        f" have: {', '.join(rows)}"
    )


def lookup(
    impl: str,
    selector_kind: str,
    remainder_kind: str,
    request: Request,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Find the launcher of one call. Arguments and errors: see `choose`."""
    name = choose(impl, selector_kind, remainder_kind, request)
    return TABLE[selector_kind, remainder_kind][name].launcher


@dataclass(frozen=True)
class GridRow:
    """What exists for one pair; read off TABLE."""

    selector: str
    remainder: str
    reference: bool
    eager_forward: bool
    eager_backward: bool
    triton_forward: bool
    triton_backward: bool
    hopper_forward: bool  # sm_90: 16-bit, head dims up to 128 or 192 / 128 (backward: up to 128, else Triton's)
    hopper_backward: bool
    compile: bool  # an implementation that "auto" may choose works under torch.compile(fullgraph=True)


def grid() -> list[GridRow]:
    """The selector x remainder grid, one row per pair of TABLE."""
    result = []
    for (selector, remainder), rows in TABLE.items():
        eager, triton, hopper = rows.get("eager"), rows.get("triton"), rows.get("hopper")
        result.append(
            GridRow(
                selector,
                remainder,
                reference="reference" in rows,
                eager_forward=eager is not None,
                eager_backward=eager is not None and eager.backward,
                triton_forward=triton is not None,
                triton_backward=triton is not None and triton.backward,
                hopper_forward=hopper is not None,
                hopper_backward=hopper is not None and hopper.backward,
                compile=any(rows[name].compiles for name in AUTO_ORDER if name in rows),
            )
        )
    return result
