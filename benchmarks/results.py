"""Results as JSON lines: one line a measurement, appended, never rewritten."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from benchmarks.measure import Measurement
from benchmarks.registry import Case, Floors, Operation

FOLDER = Path(__file__).resolve().parent / "results"
KEYS = (
    "op", "impl", "pass", "dtype", "shape", "causal", "density", "deterministic", "ms", "tflops", "flop_formula", "floor_ms",
    "peak_mib", "error", "matmul_tflops", "copy_tb_s", "device", "torch", "triton", "commit", "seed", "command", "run",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What all lines of one run share; ratios are computed within one run only."""

    floors: Floors
    device: str
    torch: str
    triton: str
    commit: str
    seed: int
    command: str
    run: str

    @classmethod
    def here(cls, floors: Floors, seed: int, command: str) -> Run:
        """The run that starts now on the current CUDA device."""
        import torch
        import triton

        device = torch.cuda.get_device_name()
        return cls(floors, device, torch.__version__, triton.__version__, commit(), seed, command, new_run_id())


def new_run_id() -> str:
    """UTC time and four random hexadecimal digits."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{uuid4().hex[:4]}"


def commit(folder: Path = FOLDER.parent.parent) -> str:
    """Commit of the code, "-dirty" when tracked files differ from it (results aside).

    Where git does not answer, the variable TILEWISE_COMMIT, or "unknown".
    """

    def git(*arguments: str) -> str | None:
        try:
            answer = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return answer.stdout.strip()

    head = git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return os.environ.get("TILEWISE_COMMIT", "unknown")
    changes = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)benchmarks/results")
    return f"{head}-dirty" if changes != "" else head


def line(operation: Operation, case: Case, found: Measurement, run: Run) -> dict[str, Any]:
    """One measurement in the form that is stored; keys are KEYS."""
    flops = operation.flops(case, found.which)
    return {
        "op": operation.name,
        "impl": found.impl,
        "pass": found.which,
        "dtype": case.dtype,
        "shape": case.sizes,
        "causal": case.causal,
        "density": case.density,
        "deterministic": found.deterministic,
        "ms": {name: round(value, 5) for name, value in found.ms.items()},
        "tflops": round(flops / found.ms["p50"] / 1e9, 2),
        "flop_formula": operation.flop_formula[found.which],
        "floor_ms": round(operation.floor_ms(case, found.which, run.floors), 5),
        "peak_mib": round(found.peak_mib, 1),
        "error": float(f"{found.error:.3e}"),
        "matmul_tflops": round(run.floors.matmul_tflops, 1),
        "copy_tb_s": round(run.floors.copy_tb_s, 3),
        "device": run.device,
        "torch": run.torch,
        "triton": run.triton,
        "commit": run.commit,
        "seed": run.seed,
        "command": run.command,
        "run": run.run,
    }


def append(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Append lines to a file, making its folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for entry in lines:
            file.write(json.dumps(entry, allow_nan=False) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """Lines of a result file; none where there is no file.

    Raises:
        ValueError: a line that lacks a key.
    """
    if not path.exists():
        return []
    entries = [json.loads(text) for text in path.read_text().splitlines() if text.strip()]
    for number, entry in enumerate(entries, 1):
        lacking = [key for key in KEYS if key not in entry]
        if lacking:
            raise ValueError(f"{path.name} line {number}: expected the keys {', '.join(KEYS)}, got none of {lacking}")
    return entries
