"""What is measured: operations with their cases, FLOP and byte formulas, floors and peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Pass = Literal["forward", "backward"]
PASSES: tuple[Pass, ...] = ("forward", "backward")
DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Shape:
    """Sizes of one call; T_q = T_k = T."""

    B: int
    T: int
    H_q: int
    H_kv: int
    d_k: int
    d_v: int


@dataclass(frozen=True)
class Case:
    """One thing to measure, before the implementation and the pass are chosen."""

    op: str
    shape: Shape
    causal: bool
    dtype: str = "bf16"
    density: float = 1.0

    def __str__(self) -> str:
        s = self.shape
        heads = f"H {s.H_q}" if s.H_q == s.H_kv else f"H {s.H_q}/{s.H_kv}"
        dims = f"D {s.d_k}" if s.d_k == s.d_v else f"D {s.d_k}/{s.d_v}"
        return f"{self.op} {self.dtype} B {s.B} T {s.T} {heads} {dims} {'causal' if self.causal else 'full'}"


@dataclass(frozen=True)
class Floors:
    """Rates of the device, measured in the same run."""

    matmul_tflops: float  # bf16, 8192^3
    copy_tb_s: float  # bytes read plus bytes written


@dataclass(frozen=True)
class Operation:
    """An operation of the benchmark.

    Attributes:
        flops: `(case, pass) -> float`, what the mathematics needs; recomputation that a path chooses is not counted.
        flop_formula: the same in words, written beside every result.
        bytes: `(case, pass) -> float`, every input read once and every output written once.
        cases: `(quick, batch) -> list[Case]`.
        ours: names of implementations of this project: an `impl` of `attend`, "-reduce" for deterministic=False.
        peers: names in `peers.PEERS`.
    """

    name: str
    flops: Callable[[Case, Pass], float]
    flop_formula: dict[Pass, str]
    bytes: Callable[[Case, Pass], float]
    cases: Callable[[bool, int], list[Case]]
    ours: tuple[str, ...]
    peers: tuple[str, ...] = field(default=())

    def floor_ms(self, case: Case, which: Pass, floors: Floors) -> float:
        """The time that no implementation can beat: products at the matmul rate, or bytes at the copy rate."""
        compute = self.flops(case, which) / (floors.matmul_tflops * 1e12)
        traffic = self.bytes(case, which) / (floors.copy_tb_s * 1e12)
        return max(compute, traffic) * 1e3


def dense_flops(case: Case, which: Pass) -> float:
    """2 (d_k + d_v) forward and 2 (3 d_k + 2 d_v) backward per visible pair and query head; causal is half of T^2."""
    s = case.shape
    pairs = s.T * s.T / (2 if case.causal else 1)
    work = 2 * (s.d_k + s.d_v) if which == "forward" else 2 * (3 * s.d_k + 2 * s.d_v)
    return s.B * s.H_q * pairs * work


def dense_bytes(case: Case, which: Pass) -> float:
    """Forward: q, k, v in, out and lse out. Backward: those five and dout in, dq, dk, dv out."""
    s = case.shape
    element = DTYPE_BYTES[case.dtype]
    queries, keys, values = s.H_q * s.d_k, s.H_kv * s.d_k, s.H_kv * s.d_v
    out, lse = s.H_q * s.d_v, s.H_q
    if which == "forward":
        return s.B * s.T * (element * (queries + keys + values + out) + 4 * lse)
    return s.B * s.T * (element * (2 * (queries + keys + values) + 2 * out) + 4 * lse)


def dense_cases(quick: bool, batch: int) -> list[Case]:
    """D 128 and 64, full and causal, T 16,384 and (unless quick) 4 x 4,096 and grouped heads at 32,768; bf16."""
    shapes = [Shape(batch, 16384, 16, 16, dim, dim) for dim in (128, 64)]
    if not quick:
        shapes += [Shape(4 * batch, 4096, 16, 16, dim, dim) for dim in (128, 64)]
        shapes.append(Shape(batch, 32768, 32, 8, 128, 128))
    return [Case("dense", shape, causal) for shape in shapes for causal in (False, True)]


OPERATIONS = {
    "dense": Operation(
        name="dense",
        flops=dense_flops,
        flop_formula={
            "forward": "2 (d_k + d_v) B H_q T^2, half when causal",
            "backward": "2 (3 d_k + 2 d_v) B H_q T^2, half when causal",
        },
        bytes=dense_bytes,
        cases=dense_cases,
        ours=("hopper", "hopper-reduce", "triton"),
        peers=("cudnn", "sdpa-flash", "flex"),
    ),
}
