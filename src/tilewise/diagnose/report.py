"""What `compare` found: plain records, as a terminal table and as JSON. The HTML report is in html.py."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from tilewise.diagnose.curve import CurvePoint
from tilewise.diagnose.timing import Floor

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Quantities:
    """The account of one selection and remainder: a number per layer, or one per query head.

    All are means over query rows; errors are norms relative to the exact output's.
    """

    density: float  # selected over visible pairs
    mass_kept: float
    mass_left_out: float  # the truth
    mass_claimed: float  # what the remainder says that share is
    output_error: float
    mass_error: float  # the term of the error that a wrong claim makes
    value_error: float  # the term that wrong values for the rest make


@dataclass(frozen=True)
class MethodResult:
    """One method on one layer."""

    layer: int
    selector: str
    remainder: str
    mean: Quantities
    heads: list[Quantities]
    oracle: Quantities  # the best selection with as many blocks, and the same remainder
    attend_error: float  # of attend's own output, in the capture's dtype
    attend_gap: float  # largest difference, over rows and heads, between that and the account's error
    seconds: float  # of attend, selection included
    predicted_cost: float  # FLOP relative to dense attention
    path: str  # the implementation that attend chose: "eager", "triton", ...

    @property
    def name(self) -> str:
        return self.selector if self.remainder == "none" else f"{self.selector}, {self.remainder}"


@dataclass(frozen=True)
class Report:
    """Everything that `compare` measured."""

    capture: dict[str, str]
    settings: dict[str, Any]
    environment: dict[str, str]
    results: list[MethodResult]
    curve: list[CurvePoint]
    floors: list[Floor] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def layers(self) -> list[int]:
        return list(dict.fromkeys(result.layer for result in self.results))

    def of_layer(self, layer: int) -> list[MethodResult]:
        """The results of one layer, in the order of the methods."""
        return [result for result in self.results if result.layer == layer]

    def relative_time(self, result: MethodResult) -> float:
        """Measured time over that of dense attention on the same layer."""
        dense = next(r for r in self.of_layer(result.layer) if r.remainder == "none")
        return result.seconds / dense.seconds if dense.seconds > 0 else math.nan

    def to_json(self) -> str:
        """One JSON object; NaN becomes null."""
        return json.dumps(_finite(asdict(self)), indent=1, allow_nan=False)

    def table(self) -> Table:
        """A rich table, one section a layer."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        title = f"{self.title()} (shares and errors in percent)"
        table = Table(title=title, caption=CAPTION, caption_justify="left", title_justify="left", box=SIMPLE_HEAD)
        table.add_column("method", no_wrap=True)
        for heading in HEADINGS:
            table.add_column(heading, justify="right", no_wrap=True)
        for layer in self.layers:
            table.add_row(f"[bold]layer {layer}[/bold]")
            for result in self.of_layer(layer):
                table.add_row(f"  {result.name}", *(cell.rstrip("%") for cell in self.cells(result)))
            table.add_section()
        return table

    def title(self) -> str:
        """What was compared, in one line."""
        settings = self.settings
        return (
            f"{self.capture.get('model', 'capture')} on {self.capture.get('source', 'its text')}: {settings['rows']} query "
            f"rows, {settings['keys']} keys, {settings['blocks']} blocks of {settings['block']} besides the row's own"
        )

    def cells(self, result: MethodResult) -> list[str]:
        """The numbers under HEADINGS."""
        mean, oracle = result.mean, result.oracle
        dense = result.remainder == "none"
        return [
            percent(mean.density),
            percent(mean.mass_kept),
            percent(mean.mass_left_out),
            percent(mean.mass_claimed),
            percent(mean.output_error),
            percent(mean.mass_error),
            percent(mean.value_error),
            "" if dense else percent(oracle.mass_left_out),
            "" if dense else percent(oracle.output_error),
            percent(result.attend_error),
            milliseconds(result.seconds),
            f"{self.relative_time(result):.2f}",
            f"{result.predicted_cost:.2f}",
            result.path,
        ]


HEADINGS = [
    "density",
    "mass\nkept",
    "left\nout",
    "rest\nclaims",
    "output\nerror",
    "mass\nterm",
    "value\nterm",
    "oracle\nleft out",
    "oracle\nerror",
    "attend\nerror",
    "ms",
    "time /\ndense",
    "cost /\ndense",
    "path",
]
CAPTION = (
    "Means over rows and heads. left out: softmax mass of the keys that were not selected; rest claims: what the remainder "
    "says it is. output error: |out - exact| / |exact|, from the account in fp32; it is the sum of two vectors, of which "
    "mass term and value term are the lengths. oracle: the best blocks at the same budget, same remainder. attend error: the "
    "same for what attend returned, in the capture's dtype. cost: FLOP, predicted. path: the "
    "implementation that attend chose; times of different paths do not compare methods."
)


def percent(value: float) -> str:
    """A share in percent, three figures; a dash for NaN."""
    if math.isnan(value):
        return "-"
    if value == 0:
        return "0%"
    return f"{value:.2%}" if value < 0.0995 else f"{value:.1%}"


def milliseconds(seconds: float) -> str:
    """Three figures, never in powers of ten."""
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
