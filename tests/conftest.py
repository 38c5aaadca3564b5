"""What every test gets: fixed seeds, skips that are counted, and outputs that are NaN until something writes them."""

from __future__ import annotations

import collections
import functools
import importlib.util
import os
import random
import sys
from collections.abc import Callable, Iterator

import hypothesis
import pytest
import torch

# tests must not depend on the day: hypothesis draws the same examples each time
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("fixed")

POISONED_FOLDERS = ("kernels", "gpu")
# what these print is a result (registers and spills, errors beside eager's, memory), and is shown when they pass too
REPORTING_TESTS = ("tests/aot/", "tests/kernels/", "tests/gpu/", "tests/unit/test_memory.py")
FACTORIES = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)


def interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def reason_to_skip(markers: set[str], cuda_devices: int, interpreted: bool, triton_installed: bool) -> str | None:
    """Why a test with these markers cannot run here, or None."""
    if "interpret" in markers and not triton_installed:
        return "needs the package triton"
    if "interpret" in markers and not interpreted:
        return "needs TRITON_INTERPRET=1 (the second pytest run of `make test`)"
    if "aot" in markers and not triton_installed:
        return "needs the package triton"
    if "aot" in markers and interpreted:
        return "compiles kernels, which the interpreter replaces"
    if "multigpu" in markers and cuda_devices < 2:
        return "needs two CUDA devices"
    if "gpu" in markers and cuda_devices < 1:
        return "needs a CUDA device"
    if "gpu" in markers and interpreted:
        return "runs kernels on the GPU, which the interpreter replaces"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    triton_installed = importlib.util.find_spec("triton") is not None
    for item in items:
        markers = {mark.name for mark in item.iter_markers()}
        reason = reason_to_skip(markers, devices, interpreting(), triton_installed)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what the reporting tests measured, and count skips by reason, so that a test that never runs is seen."""
    for report in terminalreporter.stats.get("passed", []):
        if report.when == "call" and report.nodeid.startswith(REPORTING_TESTS) and report.capstdout:
            terminalreporter.write(report.capstdout)
    counts = collections.Counter()
    for report in terminalreporter.stats.get("skipped", []):
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        counts[text.removeprefix("Skipped: ")] += 1
    for reason, count in counts.most_common():
        terminalreporter.write_line(f"skipped {count}: {reason}")


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    random.seed(0)
    torch.manual_seed(0)


def poisoned(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A tensor factory that fills with NaN what it returns to code of the library."""

    @functools.wraps(original)
    def factory(*args: object, **kwargs: object) -> torch.Tensor:
        result = original(*args, **kwargs)
        if torch.compiler.is_compiling():
            return result
        if result.dtype.is_floating_point and sys._getframe(1).f_globals.get("__name__", "").startswith("tilewise"):
            result.fill_(float("nan"))
        return result

    return factory


@pytest.fixture
def nan_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` and its kind, called from the library, return NaN: an output that nothing wrote fails loudly."""
    for owner, name in FACTORIES:
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture(autouse=True)
def poison_kernel_tests(request: pytest.FixtureRequest) -> Iterator[None]:
    folder = request.node.path.parent.name
    marked = any(request.node.get_closest_marker(name) for name in ("gpu", "multigpu", "interpret"))
    if marked or folder in POISONED_FOLDERS:
        request.getfixturevalue("nan_poison")
    yield
