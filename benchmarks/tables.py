"""Tables from result lines: the ratios of one run, for the terminal and for the README."""

from __future__ import annotations

import math
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
        str(entry["shape"]),
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


def dense_ratios(entries: Iterable[Line]) -> list[tuple[Line, Line, float]]:
    """Lines of sparse and packed calls, each beside dense ones: (line, dense line, FLOP rate over that of the dense line).

    The two share run, implementation, pass, head dims and causality.
    """
    entries = list(entries)
    dense = [e for e in entries if e["op"] == "dense"]
    found = []
    for entry in (e for e in entries if e["op"] != "dense"):
        for other in dense:
            if _dense_key(entry) == _dense_key(other) and entry["causal"] == other["causal"]:
                found.append((entry, other, entry["tflops"] / other["tflops"]))
    return found


def nearest_dense(entries: Iterable[Line], ours: Line) -> float | None:
    """Share of the dense rate, that of the dense line nearest in work; None without one."""
    found = [
        (abs(math.log(other["tflops"] * other["ms"]["p50"] / (ours["tflops"] * ours["ms"]["p50"]))), ratio)
        for entry, other, ratio in dense_ratios(entries)
        if entry is ours
    ]
    return min(found)[1] if found else None


def dense_table(entries: Iterable[Line]) -> str:
    """The same as text; "" if there is nothing to compare."""
    rows = [
        f"  {e['op']:<13}{e['pass']:<9}{e['impl']:<14}{tokens(e):<15}D {e['shape']['d_k']:<5}{mask(e):<28}{e['tflops']:>5.0f}"
        f" TFLOP/s, {ratio:.3f} of dense {tokens(other)} ({other['tflops']:.0f})"
        for e, other, ratio in dense_ratios(entries)
    ]
    return "\n".join(rows)


def mask(entry: Line) -> str:
    """What of the pairs is computed, in words."""
    shape = entry["shape"]
    text = "causal" if entry["causal"] else "full"
    if "block_k" in shape:
        return f"density {entry['density']:.2f}, {shape['block_q']} x {shape['block_k']}"
    return text if "lengths" not in shape else f"{text}, {len(shape['lengths'])} sequences"


def tokens(entry: Line) -> str:
    """Batch and length, and the heads if they come in groups."""
    shape = entry["shape"]
    text = f"{shape['T']:,}" if shape["B"] == 1 else f"{shape['B']} x {shape['T']:,}"
    return text if shape["H_q"] == shape["H_kv"] else f"{text}, H {shape['H_q']}/{shape['H_kv']}"


def readme_table(entries: Iterable[Line], op: str, impl: str) -> str:
    """Markdown table of one operation, a row a case and pass; "" without results."""
    entries = list(entries)
    rows = comparisons((entry for entry in entries if entry["op"] == op), impl)
    if not rows:
        return ""
    rows.sort(key=lambda row: _order(row[0]))
    peers = [peer for peer in OPERATIONS[op].peers if any(peer in ratios for _, ratios in rows)]
    dense = [nearest_dense(entries, ours) for ours, _ in rows]
    head = ["pass", "D", "mask", "T", "ms", "TFLOP/s", "share", *(f"x {peer}" for peer in peers)]
    head += [*(["of dense"] if any(dense) else []), "MiB"]
    body = []
    for (ours, ratios), rate in zip(rows, dense, strict=True):
        shape = ours["shape"]
        dims = str(shape["d_k"]) if shape["d_k"] == shape["d_v"] else f"{shape['d_k']}/{shape['d_v']}"
        cells = [ours["pass"], dims, mask(ours), tokens(ours), f"{ours['ms']['p50']:.3f}"]
        cells += [f"{ours['tflops']:.0f}", f"{ours['tflops'] / ours['matmul_tflops']:.0%}"]
        cells += [f"{ratios[peer]:.2f}" if peer in ratios else "" for peer in peers]
        if any(dense):
            cells.append("" if rate is None else f"{rate:.2f}")
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
    head = f"  {'pass':<9}{'impl':<14}{'ms':>9}{'p20..p80':>18}{'TFLOP/s':>9}{'share':>7}{'ours/it':>9}{'MiB':>8}{'error':>10}"
    head += "  bits"
    text = [head]
    ratios = {
        (ours["pass"], peer): ratio for ours, found in comparisons(entries, impl) for peer, ratio in found.items()
    }
    for e in entries:
        ratio = ratios.get((e["pass"], e["impl"]))
        span = f"{e['ms']['p20']:.3f}..{e['ms']['p80']:.3f}"
        text.append(
            f"  {e['pass']:<9}{e['impl']:<14}{e['ms']['p50']:>9.3f}{span:>18}{e['tflops']:>9.0f}"
            f"{e['tflops'] / e['matmul_tflops']:>7.0%}{'' if ratio is None else f'{ratio:.2f}x':>9}{e['peak_mib']:>8.0f}"
            f"{e['error']:>10.1e}  {'same' if e['deterministic'] else 'vary'}"
        )
    return "\n".join(text)


def _dense_key(entry: Line) -> tuple:
    return (entry["run"], entry["impl"], entry["pass"], entry["dtype"], entry["shape"]["d_k"], entry["shape"]["d_v"])


def _order(entry: Line) -> tuple:
    shape = entry["shape"]
    return (
        entry["pass"] != "forward",
        -shape["d_k"],
        -shape["d_v"],
        -shape["T"],
        shape["B"],
        entry["causal"],
        entry["density"],
    )
