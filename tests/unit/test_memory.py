"""Memory of the eager path on the CPU: O(T * block), measured as the peak resident size of a fresh process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tolerances import LONG_CALL_GROWTH_BYTES

SOURCE = Path(__file__).resolve().parents[2] / "src"
PROGRAM = """
import resource, sys, time
import torch
from tilewise import attend, remainders, selectors

length, kind = int(sys.argv[1]), sys.argv[2]
unit = 1 if sys.platform == "darwin" else 1024
options = {}
if kind == "sparse":
    options = {"selector": selectors.Pooled(blocks=8), "remainder": remainders.Taylor(0)}
q, k, v = (torch.randn(1, length, 8, 64, requires_grad=True) for _ in range(3))
upstream = torch.randn(1, length, 8, 64)
attend(q[:, :64], k[:, :64], v[:, :64], causal=True, **options).sum().backward()
q.grad = k.grad = v.grad = None
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
begin = time.perf_counter()
attend(q, k, v, causal=True, **options).backward(upstream)
seconds = time.perf_counter() - begin
growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - before
finite = all(bool(x.grad.isfinite().all()) and bool(x.grad.any()) for x in (q, k, v))
print(growth, seconds, finite)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_long_call_stays_under_the_limit(kind):
    command = [sys.executable, "-c", PROGRAM, "16384", kind]
    # one thread: several that wait for each other on a busy machine take ten times as long
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=580, env=environment)
    assert result.returncode == 0, result.stderr
    growth, seconds, finite = result.stdout.split()
    print(f"{kind}: peak resident growth {int(growth) / 2**20:.0f} MiB in {float(seconds):.1f} s")
    assert finite == "True"
    assert int(growth) < LONG_CALL_GROWTH_BYTES
