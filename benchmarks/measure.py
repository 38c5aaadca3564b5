"""Time candidates beside each other in one process, and judge their results at the same shape first."""

from __future__ import annotations

import gc
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.check import Judge, Verdict
from benchmarks.peers import Candidate, Inputs, make_candidate
from benchmarks.registry import PASSES, Case, Floors, Operation, Pass

QUANTILES = {"p20": 0.2, "p50": 0.5, "p80": 0.8}
ROUNDS = 3
WARMUP_MS, REPEAT_MS = 15, 60


class CheckFailed(Exception):
    """An implementation of this project is not exact enough, or not repeatable, at the shape that was to be timed."""


@dataclass(frozen=True)
class Measurement:
    """One implementation, one pass, one case.

    Attributes:
        ms: quantiles of the time, by name.
        peak_mib: memory during one pass above what was allocated before it, outputs included.
        error: `Verdict.error` of the pass.
        deterministic: whether two runs gave the same bits.
    """

    impl: str
    which: Pass
    ms: dict[str, float]
    peak_mib: float
    error: float
    deterministic: bool


def measure_case(operation: Operation, case: Case, seed: int, chosen: tuple[str, ...] = ()) -> list[Measurement]:
    """Judge and time every implementation of one case, or the chosen ones.

    Raises:
        CheckFailed: an implementation of this project failed the check. A peer that fails or does not run is left out,
            with a printed line.
    """
    inputs = Inputs.random(case, seed, "cuda")
    judge = Judge(inputs, case)
    candidates, verdicts, repeatable = [], {}, {}
    for name in chosen or (*operation.ours, *operation.peers):
        ours = name in operation.ours
        try:
            candidate = make_candidate(name, inputs, case)
            verdict, same = assess(candidate, judge)
        except (RuntimeError, NotImplementedError) as error:
            if ours:
                raise
            print(f"  {name}: does not run here: {str(error).splitlines()[0][:160]}")
            continue
        print(f"  {name}: {verdict}")
        refuse_unless_sound(name, verdict, same, required=ours)
        if not verdict.passed:
            print(f"  {name}: not exact enough, left out")
            continue
        candidates.append(candidate)
        verdicts[name], repeatable[name] = verdict, same
    del judge
    found = []
    for which in PASSES:
        calls = {candidate.name: timed_call(candidate, which) for candidate in candidates}
        times = interleaved(calls)
        for name, call in calls.items():
            peak = peak_mib(call)
            error = verdicts[name].error(which)
            found.append(Measurement(name, which, quantiles(times[name]), peak, error, repeatable[name][which]))
    return found


def assess(candidate: Candidate, judge: Judge) -> tuple[Verdict, dict[Pass, bool]]:
    """Verdict on a candidate's results, and whether a second run repeats them to the bit."""
    first, second = candidate.results(), candidate.results()
    same: dict[Pass, bool] = {
        "forward": torch.equal(first["out"], second["out"]),
        "backward": all(torch.equal(first[name], second[name]) for name in ("dq", "dk", "dv")),
    }
    return judge(first, candidate.lse()), same


def refuse_unless_sound(name: str, verdict: Verdict, repeatable: dict[Pass, bool], *, required: bool) -> None:
    """Raise CheckFailed for an implementation of this project that failed; peers are only reported."""
    if not required:
        return
    if not verdict.passed:
        raise CheckFailed(f"{name}: {verdict}")
    # the reduce-add form promises the forward only
    promised = {which: same for which, same in repeatable.items() if which == "forward" or not name.endswith("-reduce")}
    if not all(promised.values()):
        raise CheckFailed(f"{name}: expected two runs to give the same bits, got {repeatable}")


def timed_call(candidate: Candidate, which: Pass) -> Callable[[], object]:
    """The call to time. Backward is timed alone: its forward ran before, and its graph is kept."""
    if which == "forward":
        return candidate.forward
    out = candidate.forward()
    return lambda: candidate.backward(out)


def interleaved(calls: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Milliseconds of each call, taken in turns, so that a clock that drifts meets all alike; cold L2 cache."""
    from triton.testing import do_bench

    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name].extend(do_bench(call, warmup=WARMUP_MS, rep=REPEAT_MS, return_mode="all"))
    return times


def quantiles(times: list[float]) -> dict[str, float]:
    """p20, p50 and p80, interpolated."""
    values = torch.tensor(times, dtype=torch.float64)
    return {name: float(values.quantile(q)) for name, q in QUANTILES.items()}


def peak_mib(call: Callable[[], object]) -> float:
    """Largest memory in use during a call, above what was in use before it."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak / 2**20


def measure_floors() -> Floors:
    """Rates of this device now: a bf16 8192^3 product of random matrices, and a copy of 1 GiB (read plus written)."""
    from triton.testing import do_bench

    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product_ms = statistics.median(do_bench(lambda: a @ b, return_mode="all"))
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy_ms = statistics.median(do_bench(lambda: target.copy_(source), return_mode="all"))
    return Floors(2 * size**3 / product_ms / 1e9, 2 * 2**30 / copy_ms / 1e9)


def quiet() -> None:
    """Silence warnings of peers about their own future; they are no part of a result."""
    warnings.filterwarnings("ignore", module="torch.*")
