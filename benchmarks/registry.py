"""What is measured: operations with their cases, FLOP and byte formulas, floors and peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.case import PASSES, Case, Pass, Shape
from benchmarks.shapes import block_sparse_cases, dense_cases, packed_cases

__all__ = ["OPERATIONS", "PASSES", "Case", "Floors", "Operation", "Pass", "Shape", "attention_bytes", "attention_flops"]

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
ID_BYTES = 4


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
        cases: `(quick, batch) -> list[Case]`; those of another operation are measured for a ratio within one run.
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

    def names(self, case: Case) -> tuple[str, ...]:
        """Who is measured on a case, this project first."""
        everyone = (*self.ours, *self.peers)
        return tuple(name for name in everyone if not case.implementations or name in case.implementations)


def attention_flops(case: Case, which: Pass) -> float:
    """2 (d_k + d_v) forward and 2 (3 d_k + 2 d_v) backward per computed pair and query head."""
    s = case.shape
    work = 2 * (s.d_k + s.d_v) if which == "forward" else 2 * (3 * s.d_k + 2 * s.d_v)
    return s.B * s.H_q * case.pairs * work


def attention_bytes(case: Case, which: Pass) -> float:
    """Forward: q, k, v, the lists in, out and lse out. Backward: all those and dout in, dq, dk, dv out."""
    s = case.shape
    element = DTYPE_BYTES[case.dtype]
    rows = s.H_q * (s.d_k + s.d_v) + s.H_kv * (s.d_k + s.d_v)  # of q and out, k and v
    times = 1 if which == "forward" else 2
    lists = 0 if case.blocks is None else s.H_kv * (s.T // case.blocks.block_q) * case.blocks.count
    return s.B * (s.T * (times * element * rows + 4 * s.H_q) + ID_BYTES * lists)


def formulas(pairs: str) -> dict[Pass, str]:
    """The FLOP formulas in words, from the count of computed pairs of all heads in words."""
    return {"forward": f"2 (d_k + d_v) {pairs}", "backward": f"2 (3 d_k + 2 d_v) {pairs}"}


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation(
            name="dense",
            flops=attention_flops,
            flop_formula=formulas("B H_q T^2, half when causal"),
            bytes=attention_bytes,
            cases=dense_cases,
            ours=("hopper", "hopper-reduce", "triton"),
            peers=("cudnn", "sdpa-flash", "flex"),
        ),
        Operation(
            name="block_sparse",
            flops=attention_flops,
            flop_formula=formulas("density B H_q T^2"),
            bytes=attention_bytes,
            cases=block_sparse_cases,
            ours=("hopper",),
        ),
        Operation(
            name="packed",
            flops=attention_flops,
            flop_formula=formulas("H_q (sum of lengths^2), half when causal"),
            bytes=attention_bytes,
            cases=packed_cases,
            ours=("hopper", "hopper-reduce", "triton"),
        ),
    )
}
