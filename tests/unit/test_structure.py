"""The house keeps its shape: import direction, file sizes, errors instead of asserts, documented public names."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tilewise

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "tilewise"

BASE = {"state", "layout", "selection"}
AXES = BASE | {"selectors", "remainders"}
BELOW_API = AXES | {"reference", "eager", "kernels", "dispatch", "checks", "api"}
PUBLIC_PATHS = {"", "selectors", "remainders", "diagnose", "capture"}
# part of the house -> the parts it may import besides itself; "" is the package `tilewise` and its public names
ALLOWED = {
    "": AXES | {"api", "methods", "parallel", "diagnose", "capture"},
    "__main__": {"cli"},
    "state": set(),
    "layout": set(),
    "selection": {"layout"},
    "selectors": BASE,
    "remainders": BASE,
    "reference": BASE,
    "kernels": {"layout", "selection"},
    "eager": BASE,
    "dispatch": BASE | {"kernels", "eager", "reference"},
    "checks": BASE,
    "api": AXES | {"checks", "dispatch"},
    "methods": BELOW_API,
    "parallel": BELOW_API | {"methods"},
    "diagnose": BELOW_API | {"", "methods", "capture"},
    "capture": {"layout", "capture_hooks"},
    "capture_hooks": {"layout"},
    "integrations": PUBLIC_PATHS,
    "cli": {"commands"},
    "commands": PUBLIC_PATHS | {"dispatch"},
}
# packages beside the standard library and torch, and the files or folders that may import them as they load
OPTIONAL_PACKAGES = {
    "numpy": set(),
    "triton": {"kernels/triton", "kernels/hopper"},
    "rich": {"commands"},
    "typer": {"commands"},
    "matplotlib": set(),
    "safetensors": set(),
    "transformers": set(),
    "gguf": set(),
}
KERNEL_LINES, OTHER_LINES, TEST_LINES = 400, 250, 500
LONGER_FILES: dict[str, int] = {}
LARGEST_PUBLIC_SURFACE = 25


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def part_of(path: Path) -> str:
    """The part of the house a source file belongs to: its folder or its own name, "" for the package itself."""
    first = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def module_of(path: Path) -> list[str]:
    parts = ["tilewise", *path.relative_to(SOURCE).with_suffix("").parts]
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(path: Path, tree: ast.AST) -> list[tuple[str, bool]]:
    """Every module that a file imports, in full, and whether only later than it loads (in a function, for types)."""
    found = []

    def visit(node: ast.AST, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            lazily = inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            lazily = lazily or (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING")
            if isinstance(child, ast.Import):
                found.extend((alias.name, lazily) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                name = child.module or ""
                if child.level:
                    package = module_of(path) if path.name == "__init__.py" else module_of(path)[:-1]
                    package = package[: len(package) - (child.level - 1)]
                    name = ".".join([*package, *([name] if name else [])])
                # `from package import module` names the module only in its alias
                found.extend((f"{name}.{alias.name}", lazily) for alias in child.names)
            else:
                visit(child, lazily)

    visit(tree, False)
    return found


def target_part(name: str) -> str:
    """The part of the house that an imported name `tilewise.x.y` lies in; "" for a name of the package itself."""
    first, _, _ = name.removeprefix("tilewise").removeprefix(".").partition(".")
    exists = (SOURCE / first).is_dir() or (SOURCE / f"{first}.py").is_file()
    return first if first and exists else ""


def violations(path: Path, tree: ast.AST) -> list[str]:
    part = part_of(path)
    if part not in ALLOWED:
        return [f"{part}: not in the table ALLOWED"]
    wrong = []
    for name, lazily in imports(path, tree):
        package = name.partition(".")[0]
        if package == "tilewise":
            target = target_part(name)
            if target != part and target not in ALLOWED[part]:
                wrong.append(f"{part or 'tilewise'} imports {name}")
            if name.startswith(("tilewise.kernels.triton", "tilewise.kernels.hopper")) and not lazily:
                inside = path.relative_to(SOURCE).parts[:2]
                if inside not in (("kernels", "triton"), ("kernels", "hopper")):
                    wrong.append(f"{part} imports {name} as it loads; kernels are imported when they first run")
        elif package in OPTIONAL_PACKAGES and not lazily:
            place = path.relative_to(SOURCE).with_suffix("").as_posix()
            if not any(place == owner or place.startswith(f"{owner}/") for owner in OPTIONAL_PACKAGES[package]):
                wrong.append(f"{part} imports the optional package {package} as it loads")
        elif package not in OPTIONAL_PACKAGES and package != "torch" and package not in sys.stdlib_module_names:
            wrong.append(f"{part} imports {package}, which is in no list")
    return wrong


@pytest.mark.parametrize("path", python_files("src/tilewise"), ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_imports_go_one_way(path):
    assert violations(path, ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("reference/dense.py", "from tilewise.selectors import Pooled"),
        ("reference/dense.py", "from tilewise import selectors"),
        ("reference/dense.py", "from ..eager import walk"),
        ("state.py", "import tilewise.layout"),
        ("kernels/triton/dense.py", "from tilewise.reference import dense"),
        ("kernels/ops.py", "from tilewise.kernels.triton import dense"),
        ("kernels/ops.py", "import triton"),
        ("dispatch.py", "from tilewise.kernels.triton import dense"),
        ("selectors/pooled.py", "def select():\n    from tilewise import api"),
        ("api.py", "import rich"),
        ("diagnose/mass.py", "import rich"),
        ("kernels/triton/dense.py", "import matplotlib"),
        ("api.py", "import pandas"),
        ("commands.py", "from tilewise.eager import walk"),
        ("cli.py", "import rich"),
        ("surprise.py", "import torch"),
    ],
)
def test_the_import_test_can_fail(file, text):
    assert violations(SOURCE / file, ast.parse(text)) != []


@pytest.mark.parametrize("path", python_files("benchmarks", "examples"), ids=lambda path: path.name)
def test_benchmarks_and_examples_use_public_names_only(path):
    for name, _ in imports_outside(path):
        if name.partition(".")[0] == "tilewise":
            first = name.removeprefix("tilewise").removeprefix(".").partition(".")[0]
            assert first in {"", *tilewise.__all__, *PUBLIC_PATHS}, f"{path.name} imports {name}"


def imports_outside(path: Path) -> list[tuple[str, bool]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.extend((alias.name, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.extend((f"{node.module}.{alias.name}", False) for alias in node.names)
    return found


def test_importing_the_package_loads_torch_only():
    """In a fresh interpreter in which the optional packages cannot be imported at all."""
    program = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(set(OPTIONAL_PACKAGES) - {"numpy", "triton"})!r}:
            raise ImportError("refused: " + name)
sys.meta_path.insert(0, Refuse())
import torch
before = set(sys.modules)
import tilewise
loaded = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(*sorted(loaded & {set(OPTIONAL_PACKAGES)!r}))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


@pytest.mark.parametrize(
    "path",
    python_files("src", "benchmarks", "scripts", "examples", "tests"),
    ids=lambda p: p.relative_to(ROOT).as_posix(),
)
def test_files_stay_short(path):
    name = path.relative_to(ROOT).as_posix()
    limit = KERNEL_LINES if "/kernels/" in name and name.startswith("src") else OTHER_LINES
    if name.startswith("tests/"):
        limit = TEST_LINES
    limit = LONGER_FILES.get(name, limit)
    lines = len(path.read_text().splitlines())
    assert lines <= limit, f"{name}: expected at most {limit} lines, got {lines}"


def test_exceptions_to_the_length_are_needed():
    assert len(LONGER_FILES) <= 3
    for name in LONGER_FILES:
        assert len((ROOT / name).read_text().splitlines()) > OTHER_LINES


@pytest.mark.parametrize("path", python_files("src"), ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_no_assert_in_the_library(path):
    lines = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)]
    assert lines == []


def public_callables() -> list[tuple[str, object]]:
    """Functions, classes and their methods that a user reaches from the public names."""
    found: dict[str, object] = {}

    def add(name: str, value: object) -> None:
        if inspect.ismodule(value):
            for inner in getattr(value, "__all__", [n for n in vars(value) if not n.startswith("_")]):
                attribute = getattr(value, inner)
                if getattr(attribute, "__module__", "").startswith("tilewise"):
                    add(f"{name}.{inner}", attribute)
        elif inspect.isclass(value):
            found[name] = value
            for inner, attribute in vars(value).items():
                if inner.startswith("_") or generated(value, inner):
                    continue
                function = attribute.__func__ if isinstance(attribute, classmethod | staticmethod) else attribute
                function = function.fget if isinstance(function, property) else function
                if inspect.isfunction(function):
                    found[f"{name}.{inner}"] = function
        elif inspect.isfunction(value):
            found[name] = value

    for name in tilewise.__all__:
        add(name, getattr(tilewise, name))
    return sorted(found.items())


def generated(owner: type, name: str) -> bool:
    return dataclasses.is_dataclass(owner) and name in {field.name for field in dataclasses.fields(owner)}


@pytest.mark.parametrize(("name", "value"), public_callables(), ids=[name for name, _ in public_callables()])
def test_public_names_are_documented_and_annotated(name, value):
    documentation = value.__doc__ or ""
    # a dataclass without a docstring is given its signature as one
    assert len(documentation) > 10, f"{name} has no docstring"
    assert not documentation.startswith(f"{getattr(value, '__name__', '')}("), f"{name} has no docstring"
    if inspect.isfunction(value):
        signature = inspect.signature(value)
        bare = [
            p.name for p in signature.parameters.values() if p.annotation is p.empty and p.name not in ("self", "cls")
        ]
        assert bare == [], f"{name}: expected annotations, got none for {bare}"
        assert signature.return_annotation is not signature.empty, f"{name}: expected a return annotation"


def test_the_public_surface_is_small():
    assert len(tilewise.__all__) <= LARGEST_PUBLIC_SURFACE
    assert sorted(set(tilewise.__all__)) == sorted(tilewise.__all__)
    public = {
        name for name in vars(tilewise) if not name.startswith("_") and not inspect.ismodule(getattr(tilewise, name))
    }
    assert public <= set(tilewise.__all__)


def tracked_files() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode == 0:
        return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]
    folders = ("src", "tests", "benchmarks", "scripts", "docs", "examples")
    return [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]


def test_no_machine_paths_in_tracked_text():
    forbidden = [f"/{folder}/" for folder in ("work", "tmp", "root")]
    found = []
    for path in tracked_files():
        data = path.read_bytes()
        if b"\0" in data[:8192] or path.suffix in (".safetensors", ".svg"):
            continue
        text = data.decode("utf-8", errors="replace")
        found.extend(f"{path.relative_to(ROOT)}: {word}" for word in forbidden if word in text)
    assert found == []
