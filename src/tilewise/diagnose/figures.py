"""The plots of the comparison, as SVG text. Needs the extra `viz` (matplotlib), imported inside the functions."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import Any

from tilewise.diagnose.curve import CurvePoint
from tilewise.diagnose.report import Report

# one colour per selector, from the palette of Okabe and Ito, which colour-blind readers can tell apart
COLOURS = {
    "window": "#CC79A7",
    "window + first block": "#56B4E9",
    "pooled": "#D55E00",
    "pooled + first block": "#0072B2",
    "oracle": "#555555",
}
MARKERS = {"window": "v", "window + first block": "^", "pooled": "s", "pooled + first block": "o", "oracle": "D"}
STYLE = {
    "font.size": 9.5,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
}


def curve_figure(
    points: Sequence[CurvePoint], selectors: Sequence[str] | None = None, *, text_as_paths: bool = False
) -> str:
    """Mass left out against density, one panel a layer, one line a selector."""
    wanted = [name for name in COLOURS if selectors is None or name in selectors]
    layers = list(dict.fromkeys(point.layer for point in points))
    with _figure(len(layers), text_as_paths, height=3.3) as (figure, panels, svg):
        for panel, layer in zip(panels, layers, strict=True):
            for name in wanted:
                line = [p for p in points if p.layer == layer and p.selector == name]
                panel.plot(
                    [100 * p.density for p in line],
                    [100 * p.mass_left_out for p in line],
                    color=COLOURS[name],
                    marker=MARKERS[name],
                    markersize=4,
                    linewidth=1.5,
                    label=name,
                    clip_on=False,
                )
            panel.set_title(f"layer {layer}", loc="left")
            panel.set_xlabel("density: selected of visible pairs, %")
            panel.set_xlim(0, None)
            panel.set_yscale("log")
            _plain_numbers(panel.yaxis)
        low = min((p.mass_left_out for p in points if p.mass_left_out > 0), default=1.0)
        for panel in panels:
            panel.set_ylim(max(60 * low, 0.02), 110)
            if panel is not panels[0]:
                panel.tick_params(labelleft=False)
        panels[0].set_ylabel("softmax mass left out, % (log)")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(wanted))
    return svg[0]


def error_figure(report: Report) -> str:
    """Output error of every method, one panel a layer; bars share a logarithmic axis."""
    sparse = [result for result in report.results if result.remainder != "none"]
    low = 100 * min(result.oracle.output_error for result in sparse)
    high = 100 * max(result.mean.output_error for result in sparse)
    with _figure(len(report.layers), False, height=3.9) as (_, panels, svg):
        for panel, layer in zip(panels, report.layers, strict=True):
            results = [result for result in report.of_layer(layer) if result.remainder != "none"]
            places = range(len(results))
            values = [100 * result.mean.output_error for result in results]
            colours = [COLOURS[result.selector] for result in results]
            hatches = ["" if result.remainder == "drop" else "////" for result in results]
            panel.barh(places, values, color=colours, hatch=hatches, edgecolor="white", linewidth=0, height=0.75)
            best = [100 * result.oracle.output_error for result in results]
            panel.plot(
                best, places, "|", color="black", markersize=14, markeredgewidth=1.6, label="oracle, same budget"
            )
            for place, value in zip(places, values, strict=True):
                panel.text(value * 1.12, place, f"{value:.3g}", va="center", fontsize=8.5)
            panel.set_xscale("log")
            _plain_numbers(panel.xaxis)
            panel.set_xlim(low * 0.5, high * 4)
            panel.set_yticks(list(places), [result.name for result in results])
            panel.invert_yaxis()
            panel.grid(axis="y", visible=False)
            panel.set_title(f"layer {layer}", loc="left")
            panel.set_xlabel("output error, % of the exact output")
            if panel is not panels[0]:
                panel.tick_params(labelleft=False)
    return svg[0]


def heat_figure(report: Report) -> str:
    """Mass left out by head, one panel a layer, rows are selectors."""
    with _figure(len(report.layers), False, height=2.5) as (figure, panels, svg):
        image = None
        for panel, layer in zip(panels, report.layers, strict=True):
            results = [result for result in report.of_layer(layer) if result.remainder == "drop"]
            values = [[100 * head.mass_left_out for head in result.heads] for result in results]
            image = panel.imshow(values, aspect="auto", cmap="viridis", vmin=0, vmax=100)
            for row, line in enumerate(values):
                for column, value in enumerate(line):
                    colour = "black" if value > 60 else "white"
                    size = 8 if len(line) <= 12 else 5
                    panel.text(column, row, f"{value:.0f}", ha="center", va="center", color=colour, fontsize=size)
            panel.set_yticks(range(len(results)), [result.selector for result in results])
            panel.set_xticks(range(len(values[0])))
            panel.grid(visible=False)
            panel.set_title(f"layer {layer}", loc="left")
            panel.set_xlabel("query head")
            if panel is not panels[0]:
                panel.tick_params(labelleft=False)
        if image is not None:
            figure.colorbar(image, ax=panels, label="mass left out, %", fraction=0.03, pad=0.01)
    return svg[0]


def _plain_numbers(axis: Any) -> None:
    """Ticks of a logarithmic axis at 1, 3, 10, 30, ..., written as plain numbers."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis.set_major_locator(FixedLocator([a * 10.0**b for b in range(-3, 4) for a in (1, 3)]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def require_matplotlib() -> Any:
    """Import matplotlib, or say which extra holds it."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'tilewise[viz]'") from error
    return matplotlib


@contextlib.contextmanager
def _figure(count: int, text_as_paths: bool, height: float) -> Iterator[tuple[Any, list[Any], list[str]]]:
    """A row of panels; what is drawn in the block lands as SVG text in the list."""
    matplotlib = require_matplotlib()
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    settings = STYLE | {"svg.fonttype": "path" if text_as_paths else "none", "svg.hashsalt": "tilewise"}
    svg: list[str] = []
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(3.4 * count + 1.6, height), layout="constrained")
        FigureCanvasSVG(figure)
        panels = list(figure.subplots(1, count, squeeze=False)[0])
        yield figure, panels, svg
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        text = buffer.getvalue()
        svg.append(text[text.index("<svg") :])  # without the XML header, which HTML has no use for
