"""Make the environment that the Makefile's commands run in. Needs only Python (>= 3.11) and pip.

    python scripts/environment.py FOLDER compare|test [--system-torch]

Afterwards FOLDER/python runs the right interpreter with `src` on its path. With --system-torch the machine's own torch,
triton and numpy are used and only what is missing is installed; if nothing can be downloaded but all of it is there, the
machine's own interpreter is used as it is.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = {"compare": "cli,viz", "test": "triton,cli,viz,hf,test"}
# module -> requirement; what a purpose cannot do without, and what it can (tests then skip, with a reason)
NEEDED = {
    "compare": ("torch", "numpy", "rich", "typer", "safetensors", "matplotlib"),
    "test": ("torch", "numpy", "rich", "typer", "safetensors", "matplotlib", "pytest", "pytest_timeout", "hypothesis"),
}
USEFUL = {"compare": (), "test": ("ruff", "pyright", "psutil", "xdist", "triton", "transformers", "gguf", "accelerate")}
OF_THE_MACHINE = ("torch", "triton", "numpy")
REQUIREMENT = {"pytest_timeout": "pytest-timeout", "xdist": "pytest-xdist", "pyright": "pyright[nodejs]"}


def run(*command: object) -> bool:
    """Run a command with its output shown; whether it succeeded."""
    print("+", shlex.join(str(word) for word in command), flush=True)
    return subprocess.run([str(word) for word in command], cwd=ROOT, check=False).returncode == 0


def missing(python: Path | str, modules: tuple[str, ...]) -> list[str]:
    """Modules that an interpreter cannot find."""
    program = "import importlib.util, sys; print(*(m for m in sys.argv[1:] if importlib.util.find_spec(m) is None))"
    result = subprocess.run([str(python), "-c", program, *modules], capture_output=True, text=True, check=True)
    return result.stdout.split()


def without(constraints: Path, names: tuple[str, ...]) -> Path:
    """A copy of the constraints that leaves some packages free."""
    lines = [line for line in constraints.read_text().splitlines() if line.partition("==")[0] not in names]
    copy = Path(tempfile.mkdtemp()) / "constraints.txt"
    copy.write_text("\n".join(lines) + "\n")
    return copy


def make_own(folder: Path, purpose: str) -> Path | None:
    """A virtual environment with the pinned versions; its interpreter, or None."""
    python = folder / "bin" / "python"
    if not python.exists() and not run(sys.executable, "-m", "venv", folder):
        return None
    constraints = ROOT / "constraints.txt"
    install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-e", f".[{EXTRAS[purpose]}]", "-c"]
    if run(*install, constraints):
        return python
    # a GPU build of torch asks for the triton of its own release
    print("the pinned versions do not fit together here; once more with the triton that torch asks for", flush=True)
    return python if run(*install, without(constraints, ("triton",))) else None


def see_packages_of_this_python(python: Path) -> None:
    """Let an environment see what this interpreter sees: --system-site-packages skips a virtual environment's own."""
    program = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    target = Path(
        subprocess.run([str(python), "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    )
    paths = sysconfig.get_paths()
    (target / "packages_of_the_machine.pth").write_text("".join(f"{paths[name]}\n" for name in ("purelib", "platlib")))


def make_beside_system(folder: Path, purpose: str) -> Path | str | None:
    """An environment over the machine's packages, or the machine's interpreter itself; None if something is missing."""
    needed, useful = NEEDED[purpose], USEFUL[purpose]
    lacking = missing(sys.executable, needed + useful)
    if "torch" in lacking:
        print("SYSTEM_TORCH=1: expected a torch that this Python can import, got none; run without it to install one")
        return None
    if not lacking:
        return sys.executable
    python = folder / "bin" / "python"
    if python.exists() or run(sys.executable, "-m", "venv", "--system-site-packages", folder):
        see_packages_of_this_python(python)
        constraints = without(ROOT / "constraints.txt", OF_THE_MACHINE)
        for group in (needed, useful):
            wanted = [name for name in missing(python, group) if name not in OF_THE_MACHINE]
            names = [REQUIREMENT.get(name, name) for name in wanted]
            if names:
                run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *names, "-c", constraints)
    chosen = python if python.exists() else sys.executable
    still = missing(chosen, needed)
    if still:
        print(f"not installed and not to be had here: {', '.join(still)}")
        return None
    for name in missing(chosen, useful):
        print(f"going on without {name}")
    return chosen


def write_launcher(folder: Path, python: Path | str) -> None:
    """FOLDER/python: the interpreter with `src` first on its path."""
    launcher = folder / "python"
    source = shlex.quote(str(ROOT / "src"))
    path = f'PYTHONPATH={source}"${{PYTHONPATH:+:$PYTHONPATH}}"'
    launcher.write_text(f'#!/bin/sh\n{path} exec {shlex.quote(str(python))} "$@"\n')
    launcher.chmod(0o755)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("purpose", choices=sorted(EXTRAS))
    parser.add_argument("--system-torch", action="store_true")
    arguments = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036, an older Python must be told so
        print(f"Python: expected 3.11 or later, got {sys.version.split()[0]}; name another with `make PYTHON=...`")
        return 1
    folder = (ROOT / arguments.folder).absolute()
    make = make_beside_system if arguments.system_torch else make_own
    python = make(folder, arguments.purpose)
    if python is None:
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    write_launcher(folder, python)
    return 0


if __name__ == "__main__":
    sys.exit(main())
