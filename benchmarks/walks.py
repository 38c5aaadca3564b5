"""Block-sparse and packed calls on the Hopper path, beside its dense rate in the same run.

    python -m benchmarks.walks [--out FOLDER] [--seed N]

Writes block_sparse.jsonl and packed.jsonl. FLOPs count the pairs that are computed for the result: selected, or visible.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import tilewise
from benchmarks import results
from benchmarks.measure import CheckFailed, Measurement, interleaved, measure_floors, peak_mib, quantiles
from benchmarks.registry import OPERATIONS, PASSES, Case, Operation, Shape, dense_bytes, dense_flops
from tilewise import Selection, selectors

DENSITIES = (0.05, 0.1, 0.2, 0.4, 1.0)
BLOCK_Q, BLOCK_K = 128, 64
MEAN_LENGTH = 2048


def scaled_flops(case: Case, which) -> float:
    """The dense count times the density: the share of pairs that are selected, or visible."""
    return dense_flops(replace(case, causal=False), which) * case.density


def operation(name: str) -> Operation:
    formula = {which: f"density x ({text.split(',')[0]})" for which, text in OPERATIONS["dense"].flop_formula.items()}
    return Operation(name, scaled_flops, formula, dense_bytes, lambda quick, batch: [], ("hopper",))


def random_lists(shape: Shape, density: float) -> Selection | None:
    """Sorted random blocks for each query tile and KV head; None at density 1: the dense call."""
    if density == 1.0:
        return None
    tiles, blocks = -(-shape.T // BLOCK_Q), -(-shape.T // BLOCK_K)
    order = torch.rand(shape.B, tiles, shape.H_kv, blocks, device="cuda").argsort(-1)
    ids = order[..., : round(density * blocks)].sort(-1).values.to(torch.int32)
    return Selection.from_blocks(ids.contiguous(), block_q=BLOCK_Q, block_k=BLOCK_K)


def tensors(shape: Shape) -> list[Tensor]:
    """q, k, v and the gradient of out: standard normal, bf16."""
    sizes = ((shape.H_q, shape.d_k), (shape.H_kv, shape.d_k), (shape.H_kv, shape.d_v), (shape.H_q, shape.d_v))
    made = [torch.randn(shape.B, shape.T, h, d, device="cuda", dtype=torch.bfloat16) for h, d in sizes]
    return [x.requires_grad_() for x in made[:3]] + [made[3]]


def outcome(call: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    out = call(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def error_of(ours: list[Tensor], theirs: list[Tensor]) -> tuple[float, float]:
    """Relative errors (2-norm) of out and of the worst gradient against another path's."""
    errors = [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(ours, theirs, strict=True)]
    if not max(errors) < 8e-3:  # two results, each rounded to bf16 a few times
        raise CheckFailed(f"errors of out, dq, dk, dv against impl='eager': {errors}")
    return errors[0], max(errors[1:])


def measure(case: Case, call: Callable[..., Tensor], errors: tuple[float, float], impl: str) -> list[Measurement]:
    """Time the forward, and the backward on a kept graph."""
    q, k, v, dout = tensors(case.shape)
    out = call(q, k, v)
    calls = {
        "forward": lambda: call(q, k, v),
        "backward": lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True),
    }
    times = interleaved(calls)
    return [
        Measurement(impl, which, quantiles(times[which]), peak_mib(calls[which]), error, True)
        for which, error in zip(PASSES, errors, strict=True)
    ]


def block_sparse(run: results.Run) -> list[dict]:
    lines = []
    for dim in (128, 64):
        small = Shape(1, 1024, 8, 2, dim, dim)
        selector = selectors.Given(random_lists(small, 0.25))
        inputs = tensors(small)
        ours, theirs = (
            outcome(lambda *x, impl=impl: tilewise.attend(*x, selector=selector, impl=impl), *inputs)  # noqa: B023
            for impl in ("hopper", "eager")
        )
        errors = error_of(ours, theirs)
        for density in DENSITIES:
            case = Case("block_sparse", Shape(1, 32768, 32, 8, dim, dim), False, density=density)
            lists = random_lists(case.shape, density)
            given = None if lists is None else selectors.Given(lists)
            found = measure(
                case, lambda *x: tilewise.attend(*x, selector=given, impl="hopper"), errors, "hopper"  # noqa: B023
            )  # fmt: skip
            lines += report(run, case, found)
    return lines


def packed(run: results.Run) -> list[dict]:
    total, heads, dim = 32768, 16, 128
    generator = torch.Generator().manual_seed(run.seed)
    lengths = torch.randint(256, 2 * MEAN_LENGTH - 256, (total // MEAN_LENGTH - 1,), generator=generator)
    ends = [0, *lengths.cumsum(0).tolist(), total]
    boundaries = torch.tensor(ends, dtype=torch.int32, device="cuda")
    pairs = sum((b - a) * (b - a + 1) / 2 for a, b in zip(ends, ends[1:], strict=False))
    case = Case("packed", Shape(1, total, heads, heads, dim, dim), True, density=pairs / total**2)
    q, k, v, dout = tensors(Shape(1, total, 2, 2, dim, dim))
    ours, theirs = (
        outcome(lambda *x, impl=impl: tilewise.attend(*x, causal=True, cu_seqlens=boundaries, impl=impl), q, k, v, dout)
        for impl in ("hopper", "triton")
    )
    errors = error_of(ours, theirs)
    lines = []
    for impl in ("hopper", "triton"):
        found = measure(
            case, lambda *x: tilewise.attend(*x, causal=True, cu_seqlens=boundaries, impl=impl), errors, impl  # noqa: B023
        )  # fmt: skip
        lines += report(run, case, found)
    # the same FLOPs in one causal sequence for each head
    side = round((2 * pairs) ** 0.5 / 128) * 128
    dense = Case("packed", Shape(1, side, heads, heads, dim, dim), True, density=0.5)
    lines += report(
        run, dense, measure(dense, lambda *x: tilewise.attend(*x, causal=True, impl="hopper"), errors, "hopper")
    )
    return lines


def report(run: results.Run, case: Case, found: list[Measurement]) -> list[dict]:
    lines = [results.line(operation(case.op), case, measurement, run) for measurement in found]
    for entry in lines:
        shape = entry["shape"]
        print(
            f"{entry['op']} {entry['impl']} D {shape['d_k']} T {shape['T']} density {entry['density']:.3f} {entry['pass']}: "
            f"{entry['ms']['p50']:.3f} ms, {entry['tflops']:.0f} TFLOP/s",
            flush=True,
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=results.FOLDER)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks need a CUDA device, and torch finds none here", file=sys.stderr)
        return 2
    torch.manual_seed(options.seed)
    run = results.Run.here(measure_floors(), options.seed, "python -m benchmarks.walks")
    for name, measured in (("packed", packed), ("block_sparse", block_sparse)):
        results.append(options.out / f"{name}.jsonl", measured(run))
    return 0


if __name__ == "__main__":
    sys.exit(main())
