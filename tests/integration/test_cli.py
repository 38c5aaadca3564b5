"""The command line: a frozen list of options, machine-readable output, errors in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from tilewise import dispatch
from tilewise.capture import Capture, LayerCapture

pytest.importorskip("typer")
pytest.importorskip("safetensors")

OPTIONS = {
    "compare": ["--block", "--blocks", "--capture", "--device", "--html", "--json", "--rows"],
    "grid": ["--json"],
}
SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, t, h, 8, generator=generator).bfloat16() for t, h in ((32, 2), (96, 1), (96, 1)))
    return Capture({5: LayerCapture(q, k, v, 8**-0.5)}, {"model": "random"}).save(tmp_path / "small.safetensors")


def run(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run the entry point in a fresh process; `before` is Python that runs first."""
    code = f"import sys\n{before}\nfrom tilewise.cli import main\nsys.argv = ['tilewise', *sys.argv[1:]]\nmain()"
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "COLUMNS": "100"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)


def test_the_option_list_is_frozen() -> None:
    import typer.main

    from tilewise.commands import app

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    found = {
        name: sorted(option for parameter in command.params for option in parameter.opts if option != "--help")
        for name, command in commands.items()
    }
    assert found == OPTIONS


def test_compare_prints_a_table_and_writes_the_report(small_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "made" / "report.html"
    done = run("compare", "--capture", str(small_file), "--blocks", "2", "--block", "8", "--html", str(page))
    assert done.returncode == 0, done.stderr
    for words in ("layer 5", "pooled + first block, taylor 0", "oracle, drop", f"report: {page}"):
        assert words in done.stdout
    assert page.read_text().startswith("<!doctype html>")


def test_json_is_alone_on_stdout(small_file: Path) -> None:
    done = run("compare", "--capture", str(small_file), "--blocks", "2", "--block", "8", "--rows", "16", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["settings"] == {"rows": 16, "keys": 96, "blocks": 2, "block": 8}
    assert {result["layer"] for result in data["results"]} == {5}


def test_grid_is_the_dispatch_table() -> None:
    done = run("grid", "--json")
    assert json.loads(done.stdout) == [asdict(row) for row in dispatch.grid()]
    text = run("grid").stdout
    assert "taylor0" in text and "reference" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("compare", "--capture", "nowhere.safetensors"), "found no file at nowhere.safetensors"),
        (("compare", "--capture", __file__), "tilewise: path: expected a safetensors file"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], words: str) -> None:
    done = run(*arguments)
    assert done.returncode == 1 and done.stdout == ""
    assert words in done.stderr and "Traceback" not in done.stderr


def test_option_values_out_of_range_are_refused() -> None:
    done = run("compare", "--blocks", "0")
    assert done.returncode == 2 and "--blocks" in done.stderr


@pytest.mark.parametrize(
    ("package", "arguments", "extra"),
    [
        ("typer", ("grid",), "tilewise[cli,viz]"),
        ("rich", ("grid",), "tilewise[cli,viz]"),
        ("safetensors", ("compare",), "tilewise[cli"),
        ("matplotlib", ("compare", "--html", "unwritten.html"), "tilewise[viz]"),
    ],
)
def test_a_missing_package_names_its_extra(package: str, arguments: tuple[str, ...], extra: str) -> None:
    done = run(*arguments, before=f"sys.modules[{package!r}] = None")
    assert done.returncode == 2 and done.stdout == ""
    assert f"pip install '{extra}" in done.stderr and "Traceback" not in done.stderr
    assert not Path("unwritten.html").exists()
