"""Time candidates beside each other in one process, and judge their results at the same shape first."""

from __future__ import annotations

import gc
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.case import PASSES, Case, Pass
from benchmarks.check import Judge, Verdict
from benchmarks.peers import Candidate, Inputs, make_candidate
from benchmarks.registry import Floors, Operation

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
        deterministic: whether two runs gave the same bits; false of a form that does not promise it.
    """

    impl: str
    which: Pass
    ms: dict[str, float]
    peak_mib: float
    error: float
    deterministic: bool


def measure_case(
    operation: Operation, case: Case, seed: int, chosen: tuple[str, ...] = (), device: str = "cuda"
) -> list[Measurement]:
    """Judge and time every implementation of one case, or those of the chosen that it has.

    What is this project's is judged first on `case.small()`, every head of it, then at the size that is timed.

    Raises:
        CheckFailed: an implementation of this project failed the check, or none of them takes the case. A peer that fails
            or does not run is left out, with a printed line; so is an implementation that says it does not take the case.
    """
    names = [name for name in operation.names(case) if not chosen or name in chosen]
    if not names:
        return []
    checks = [prepare(case.small(), seed, device, every_head=True), prepare(case, seed, device, every_head=False)]
    candidates, verdicts, repeatable = [], {}, {}
    for name in names:
        ours = name in operation.ours
        try:
            for this_case, inputs, judge in checks if ours else checks[-1:]:
                candidate = make_candidate(name, inputs, this_case)
                verdict, same = assess(candidate, judge)
                refuse_unless_sound(name, verdict, same, required=ours)
        except RuntimeError as error:
            if ours and not isinstance(error, NotImplementedError):
                raise
            print(f"  {name}: does not run here: {str(error).splitlines()[0][:160]}")
            continue
        print(f"  {name}: {verdict}")
        if not verdict.passed:
            print(f"  {name}: not exact enough, left out")
            continue
        candidates.append(candidate)
        verdicts[name], repeatable[name] = verdict, same
    wanted = [name for name in names if name in operation.ours]
    if wanted and not any(name in verdicts for name in wanted):
        raise CheckFailed(f"expected one of {', '.join(wanted)} to take the case, got none")
    del checks, inputs, judge
    found = []
    for which in PASSES:
        calls = {c.name: timed_call(c, which) for c in candidates if which in c.passes}
        times = interleaved(calls)
        for name, call in calls.items():
            peak = peak_mib(call)
            same = repeatable[name][which] and promises(name, which)
            found.append(Measurement(name, which, quantiles(times[name]), peak, verdicts[name].error(which), same))
    return found


def prepare(case: Case, seed: int, device: str, *, every_head: bool) -> tuple[Case, Inputs, Judge]:
    """Inputs of a case and what their results are judged by."""
    inputs = Inputs.random(case, seed, device)
    return case, inputs, Judge(inputs, case, list(range(case.shape.H_kv)) if every_head else None)


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
    if not all(same for which, same in repeatable.items() if promises(name, which)):
        raise CheckFailed(f"{name}: expected two runs to give the same bits, got {repeatable}")


def promises(name: str, which: Pass) -> bool:
    """Whether two runs must give the same bits: always, but for the backward of a reduce-add form."""
    return which == "forward" or not name.endswith("-reduce")


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
