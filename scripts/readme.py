"""Fill the generated parts of README.md: the selector x remainder grid and the benchmark table.

python scripts/readme.py            rewrite README.md
python scripts/readme.py --check    exit 1 if it is out of date
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import results, tables  # noqa: E402
from benchmarks.registry import OPERATIONS  # noqa: E402
from tilewise import dispatch  # noqa: E402

COLUMNS = (
    "reference", "eager_forward", "eager_backward", "triton_forward", "triton_backward", "hopper_forward",
    "hopper_backward", "compile",
)  # fmt: skip


def grid_table() -> str:
    """One row per pair that `attend` takes, as markdown."""
    head = ["selector", "remainder", *(column.replace("_", " ") for column in COLUMNS)]
    rows = [head, ["---"] * len(head)]
    for row in dispatch.grid():
        rows.append([row.selector, row.remainder, *("yes" if getattr(row, column) else "" for column in COLUMNS)])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def benchmark_table(op: str) -> str:
    """Tables of committed results of one operation, one for each implementation that has some."""
    entries = results.read(results.FOLDER / f"{op}.jsonl")
    found = ((impl, tables.readme_table(entries, op, impl)) for impl in OPERATIONS[op].ours)
    return "\n\n".join(f'`impl="{impl}"`:\n\n{table}' for impl, table in found if table)


def parts() -> dict[str, Callable[[], str]]:
    """Marker name -> what stands between its markers."""
    found: dict[str, Callable[[], str]] = {"grid": grid_table}
    for op in (op for op in OPERATIONS if (results.FOLDER / f"{op}.jsonl").exists()):
        found[f"benchmark {op}"] = lambda op=op: benchmark_table(op)
    return found


def filled(text: str) -> str:
    """The README with every generated part replaced.

    Raises:
        ValueError: a part without its markers.
    """
    for name, make in parts().items():
        pattern = re.compile(rf"(<!-- {name}: begin[^>]*-->\n).*?(<!-- {name}: end -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"README.md: expected the markers of {name!r}, got none")
        content = make()
        content = f"{content}\n" if content else ""
        text = pattern.sub(lambda match, content=content: match[1] + content + match[2], text)
    return text


def main() -> int:
    path = ROOT / "README.md"
    before = path.read_text()
    after = filled(before)
    if "--check" in sys.argv[1:]:
        if before != after:
            print("README.md is out of date: run `make readme`")
        return int(before != after)
    path.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
