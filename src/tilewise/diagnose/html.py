"""The comparison as one HTML file that needs nothing else: tables, plots as inline SVG, a sentence on reading each."""

from __future__ import annotations

from html import escape

from tilewise.diagnose.figures import curve_figure, error_figure, heat_figure
from tilewise.diagnose.report import HEADINGS, MethodResult, Quantities, Report, percent

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1c1c; background: #fff; max-width: 1240px; }
body { margin: 2rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .5rem; }
p, figcaption { max-width: 56rem; margin: .4rem 0; }
.quiet, dt { color: #555; }
figure { margin: .6rem 0 0; }
svg { max-width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .86rem; margin: .4rem 0; }
th, td { padding: .22rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #e5e5e5; }
th { border-bottom: 2px solid #999; vertical-align: bottom; font-weight: 600; }
th:first-child, td:first-child { text-align: left; }
tr.layer td { font-weight: 600; background: #f3f3f3; }
summary { cursor: pointer; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: .86rem; }
dd { margin: 0; overflow-wrap: anywhere; }
"""

READ_CURVE = (
    "Lower is better, on a logarithmic axis; a selector is as good as it is close to the oracle, which ranks blocks by "
    "their true mass. A curve "
    "that stays high while the density grows misses something that no budget of recent or similar blocks buys; if it drops "
    "once the first block is forced in, that something is the attention sink at the start of the text."
)
READ_ERROR = (
    "Length of (output minus exact output) over the length of the exact output, mean over rows and heads, on a logarithmic "
    "axis. Plain bars drop what was not selected, hatched bars put a zeroth-order Taylor term in its place; the black tick "
    "is the oracle with as many blocks and the same remainder. What lies between bar and tick is the selector's fault; the "
    "rest is the budget's and the remainder's."
)
READ_HEAT = (
    "Share of the softmax mass left out, head by head, with the table's budget. A bright column is a head that looks "
    "everywhere, whatever selects; a bright row is a selector that misses the same thing in every head."
)
READ_TABLE = (
    "Each number is a mean over query rows and heads. left out is the truth, rest claims is what the remainder says. "
    "The output error is the length of the sum of two vectors, exactly: the mass term (the rest has another share than "
    "claimed) and the value term (the rest has other values than claimed). With nothing in place of the rest, all of it is "
    "the mass term. attend error is measured on what attend returned in the capture's dtype; the dense line shows what "
    "rounding alone costs. time is measured, choosing the blocks included; cost is the predicted FLOP ratio. "
    "Where time lies far above cost, choosing blocks, summarising keys and moving data weigh more than FLOP, which they do "
    "most for few query rows. path is the implementation that attend chose; times of different paths do not compare methods."
)


def to_html(report: Report) -> str:
    """Write the report as one self-contained page.

    Raises:
        ImportError: matplotlib is not installed (extra `viz`).
    """
    settings = report.settings
    title = f"Sparse attention against exact attention: {report.capture.get('model', 'a capture')}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="quiet">{escape(report.title())}; layers {", ".join(map(str, report.layers))}. '
        f"Every selector has the same budget: {settings['blocks']} blocks of {settings['block']} keys besides those that "
        "overlap the query tile.</p>",
        _findings(report),
        "<h2>Mass left out against density</h2>",
        _figure(curve_figure(report.curve), READ_CURVE),
        "<h2>Output error</h2>",
        _figure(error_figure(report), READ_ERROR),
        "<h2>Mass left out by head</h2>",
        _figure(heat_figure(report), READ_HEAT),
        "<h2>All numbers</h2>",
        f"<p>{escape(READ_TABLE)}</p>",
        _table(report),
        _floors(report),
        "<h2>By head</h2>",
        *(_heads(report, layer) for layer in report.layers),
        "<h2>Where this comes from</h2>",
        _facts(report),
    ]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _findings(report: Report) -> str:
    """Mass left out by each selector over all layers, from the numbers of this report."""
    items = []
    for name in dict.fromkeys(result.selector for result in report.results if result.remainder == "drop"):
        left = [r.mean.mass_left_out for r in report.results if r.selector == name and r.remainder == "drop"]
        layers = ", ".join(percent(value) for value in left)
        items.append(f"<li>{escape(name)}: {percent(sum(left) / len(left))} ({layers})</li>")
    lead = "Softmax mass that each selection leaves out, mean over the layers (and layer by layer):"
    return f"<p>{lead}</p><ul>{''.join(items)}</ul>"


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _rows(header: list[str], rows: list[str]) -> str:
    cells = "".join(f"<th>{escape(h).replace(chr(10), '<br>')}</th>" for h in header)
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _row(cells: list[str]) -> str:
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _table(report: Report) -> str:
    rows = []
    for layer in report.layers:
        rows.append(f'<tr class="layer"><td colspan="{len(HEADINGS) + 1}">layer {layer}</td></tr>')
        rows += [_row([result.name, *report.cells(result)]) for result in report.of_layer(layer)]
    return _rows(["method", *HEADINGS], rows)


def _heads(report: Report, layer: int) -> str:
    header = [
        "method",
        "head",
        "density",
        "mass kept",
        "left out",
        "rest claims",
        "output error",
        "mass term",
        "value term",
    ]
    rows = [
        _row([result.name, str(head), *_head_cells(values)])
        for result in report.of_layer(layer)
        for head, values in enumerate(result.heads)
    ]
    return f"<details><summary>layer {layer}</summary>{_rows(header, rows)}</details>"


def _head_cells(values: Quantities) -> list[str]:
    return [
        percent(value)
        for value in (
            values.density,
            values.mass_kept,
            values.mass_left_out,
            values.mass_claimed,
            values.output_error,
            values.mass_error,
            values.value_error,
        )
    ]


def _floors(report: Report) -> str:
    if not report.floors:
        return ""
    header = ["layer", "kernel", "ms", "floor ms", "floor / time", "TFLOP/s", "matmul TFLOP/s", "copy TB/s"]
    rows = [
        _row(
            [
                str(floor.layer),
                floor.impl,
                f"{floor.milliseconds:.4f}",
                f"{floor.floor_milliseconds:.4f}",
                percent(floor.floor_milliseconds / floor.milliseconds),
                f"{floor.teraflops:.1f}",
                f"{floor.matmul_teraflops:.1f}",
                f"{floor.copy_terabytes:.2f}",
            ]
        )
        for floor in report.floors
    ]
    note = (
        "The floor is the larger of FLOP at this device's measured matmul rate and bytes at its measured copy rate. "
        "Times include the launch."
    )
    return f"<h2>Dense kernel against its floor</h2><p>{note}</p>{_rows(header, rows)}"


def _facts(report: Report) -> str:
    worst: MethodResult = max(report.results, key=lambda result: result.attend_gap)
    facts = report.capture | report.environment | {"seconds": f"{report.seconds:.1f}"}
    facts["largest gap between attend and account"] = f"{worst.attend_gap:.2g} ({worst.name}, layer {worst.layer})"
    items = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in sorted(facts.items()))
    return f"<dl>{items}</dl>"
