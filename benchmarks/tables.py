"""Tables from result lines: the ratios of one run, for the terminal and for the README."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.registry import OPERATIONS

Line = dict[str, Any]
Rows = list[tuple[Line, dict[str, float]]]


def case_key(entry: Line) -> tuple:
    """What two lines must share to be compared, the run aside."""
    return (
        entry["op"],
        entry["pass"],
        entry["dtype"],
        tuple(entry["shape"].items()),
        entry["causal"],
        entry["density"],
    )


def comparisons(entries: Iterable[Line], impl: str) -> Rows:
    """Each line of `impl`, of the latest run that measured its case, with its speed relative to each peer of that run.

    A ratio is the peer's median time over ours: above 1 means that ours is faster.
    """
    groups: dict[tuple, dict[str, dict[str, Line]]] = {}
    for entry in entries:
        groups.setdefault(case_key(entry), {}).setdefault(entry["run"], {})[entry["impl"]] = entry
    found = []
    for runs in groups.values():
        measured = [by_impl for by_impl in runs.values() if impl in by_impl]
        if measured:
            latest = measured[-1]  # files are appended to: later lines are later runs
            ours = latest[impl]
            ratios = {
                n: e["ms"]["p50"] / ours["ms"]["p50"] for n, e in latest.items() if n not in OPERATIONS[e["op"]].ours
            }
            found.append((ours, ratios))
    return found


def readme_table(entries: Iterable[Line], op: str, impl: str) -> str:
    """Markdown table of one operation, a row a case and pass; "" without results."""
    rows = comparisons((entry for entry in entries if entry["op"] == op), impl)
    if not rows:
        return ""
    rows.sort(key=lambda row: _order(row[0]))
    peers = [peer for peer in OPERATIONS[op].peers if any(peer in ratios for _, ratios in rows)]
    head = ["pass", "D", "mask", "T", "ms", "TFLOP/s", "share", *(f"x {peer}" for peer in peers), "MiB"]
    body = []
    for ours, ratios in rows:
        shape = ours["shape"]
        dims = str(shape["d_k"]) if shape["d_k"] == shape["d_v"] else f"{shape['d_k']}/{shape['d_v']}"
        length = f"{shape['T']:,}" if shape["B"] == 1 else f"{shape['B']} x {shape['T']:,}"
        cells = [ours["pass"], dims, "causal" if ours["causal"] else "full", length, f"{ours['ms']['p50']:.3f}"]
        cells += [f"{ours['tflops']:.0f}", f"{ours['tflops'] / ours['matmul_tflops']:.0%}"]
        cells += [f"{ratios[peer]:.2f}" if peer in ratios else "" for peer in peers]
        body.append([*cells, f"{ours['peak_mib']:.0f}"])
    lines = [head, ["---"] * len(head), *body]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return f"{text}\n\n{provenance([ours for ours, _ in rows])}"


def provenance(lines: list[Line]) -> str:
    """Where the figures come from: device, versions and commits, one sentence."""
    setups = {(e["device"], e["torch"], e["triton"]) for e in lines}
    commits = sorted({e["commit"] for e in lines})
    where = "; ".join(f"{device}, torch {torch}, triton {triton}" for device, torch, triton in sorted(setups))
    rates = sorted({e["matmul_tflops"] for e in lines})
    return f"{where}; matrix product {' and '.join(f'{r:.0f}' for r in rates)} TFLOP/s; commit {', '.join(commits)}."


def terminal_table(entries: list[Line], impl: str) -> str:
    """Lines of one case as text: each implementation, and how fast ours is beside each peer."""
    head = f"  {'pass':<9}{'impl':<12}{'ms':>9}{'p20..p80':>18}{'TFLOP/s':>9}{'share':>7}{'ours/it':>9}{'MiB':>8}{'error':>10}"
    head += "  bits"
    text = [head]
    ratios = {
        (ours["pass"], peer): ratio for ours, found in comparisons(entries, impl) for peer, ratio in found.items()
    }
    for e in entries:
        ratio = ratios.get((e["pass"], e["impl"]))
        span = f"{e['ms']['p20']:.3f}..{e['ms']['p80']:.3f}"
        text.append(
            f"  {e['pass']:<9}{e['impl']:<12}{e['ms']['p50']:>9.3f}{span:>18}{e['tflops']:>9.0f}"
            f"{e['tflops'] / e['matmul_tflops']:>7.0%}{'' if ratio is None else f'{ratio:.2f}x':>9}{e['peak_mib']:>8.0f}"
            f"{e['error']:>10.1e}  {'same' if e['deterministic'] else 'vary'}"
        )
    return "\n".join(text)


def _order(entry: Line) -> tuple:
    shape = entry["shape"]
    return (entry["pass"] != "forward", -shape["d_k"], -shape["d_v"], -shape["T"], shape["B"], entry["causal"])
