"""Measure an operation on this machine's GPU and append the results as JSON lines.

    python -m benchmarks.run dense [--quick] [--only NAMES] [--batch N] [--out FILE] [--seed N]

Nothing is written for a shape at which the results of this project fail the correctness check. Without git, the commit is
taken from the variable TILEWISE_COMMIT.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks import results, tables
from benchmarks.measure import CheckFailed, Measurement, measure_case, measure_floors, quiet
from benchmarks.registry import OPERATIONS, Case, Operation

Measure = Callable[[Operation, Case, int], list[Measurement]]


def run_cases(cases: Sequence[Case], run: results.Run, out: Path, measure: Measure) -> int:
    """Measure cases, print each as it comes, and append those that passed the check; the number that failed.

    A case may be of another operation than the run: its lines carry its own.
    """
    failed, written = 0, []
    for case in cases:
        start = time.monotonic()
        print(f"{case}", flush=True)
        try:
            found = measure(OPERATIONS[case.op], case, run.seed)
        except CheckFailed as failure:
            failed += 1
            print(f"  NOT WRITTEN, the correctness check failed: {failure}", flush=True)
            continue
        lines = [results.line(OPERATIONS[case.op], case, measurement, run) for measurement in found]
        results.append(out, lines)
        written += lines
        print(tables.terminal_table(lines, OPERATIONS[case.op].ours[0]))
        print(f"  {time.monotonic() - start:.1f} s", flush=True)
    beside_dense = tables.dense_table(written)
    if beside_dense:
        print(f"beside the dense rate of this run\n{beside_dense}", flush=True)
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; the exit status is 0 only if every shape passed its check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", choices=sorted(OPERATIONS))
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--only", default="", help="comma-separated implementations and peers; default: all")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/OP.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    if options.batch < 1:
        parser.error(f"--batch: expected at least 1, got {options.batch}")
    try:
        cases = OPERATIONS[options.op].cases(options.quick, options.batch)
    except ValueError as error:
        parser.error(str(error))
    chosen = tuple(name for name in options.only.split(",") if name)
    measured = {name for case in cases for name in OPERATIONS[case.op].names(case)}
    if not measured.issuperset(chosen):
        parser.error(f"--only: expected some of {', '.join(sorted(measured))}, got {options.only}")
    if not torch.cuda.is_available():
        print("benchmarks need a CUDA device, and torch finds none here", file=sys.stderr)
        return 2
    quiet()
    run = results.Run.here(measure_floors(), options.seed, " ".join(["python -m benchmarks.run", *given]))
    rates = f"bf16 product {run.floors.matmul_tflops:.0f} TFLOP/s, copy {run.floors.copy_tb_s:.2f} TB/s"
    print(f"{run.device}, torch {run.torch}, triton {run.triton}, commit {run.commit}; {rates}; run {run.run}")
    out = options.out or results.FOLDER / f"{options.op}.jsonl"
    failed = run_cases(cases, run, out, functools.partial(measure_case, chosen=chosen))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
