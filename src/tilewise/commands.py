"""The commands: parse, call, print. The only file that imports typer; cli.py says what to install where it is missing."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

# wide enough for the table where the output is not a terminal and has no width of its own
PIPE_WIDTH = 170

app = typer.Typer(
    help="Attention, tile by tile: exact, or sparse with a written account of what was left out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value on stdout and nothing else.")]


@app.command()
def compare(
    capture: Annotated[
        Path | None, typer.Option("--capture", help="A file from tilewise.capture; default: the shipped sample.")
    ] = None,
    rows: Annotated[
        int, typer.Option("--rows", min=0, help="Last query rows to compare; 0: all that were captured.")
    ] = 256,
    blocks: Annotated[int, typer.Option("--blocks", min=1, help="Key blocks per query tile besides its own.")] = 16,
    block: Annotated[int, typer.Option("--block", min=1, help="Tokens per key block, and rows per query tile.")] = 64,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:N; auto: cuda where there is one.")] = "auto",
    html: Annotated[Path | None, typer.Option("--html", help="Write a self-contained report to this path.")] = None,
    as_json: Json = False,
) -> None:
    """Compare every method that Q, K, V alone define with exact attention on real tensors."""
    import torch

    from tilewise.capture import load_capture, sample_path
    from tilewise.diagnose.compare import compare, steps

    if html is not None:
        from tilewise.diagnose.figures import require_matplotlib

        require_matplotlib()  # before the work, not after it
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = load_capture(capture or sample_path())
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=steps(loaded, blocks, block))
        report = compare(
            loaded,
            rows=rows or None,
            blocks=blocks,
            block=block,
            device=device,
            advance=lambda text: progress.update(task, advance=1, description=text),
        )
    if html is not None:
        from tilewise.diagnose.html import to_html

        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(to_html(report), encoding="utf-8")
    if as_json:
        print(report.to_json())
        return
    console = _console()
    console.print(report.table())
    if html is not None:
        console.print(f"report: {html}", soft_wrap=True)
    console.print(f"{report.seconds:.1f} s on {report.environment['device']}, {report.environment['threads']} threads")


@app.command()
def grid(as_json: Json = False) -> None:
    """Print which selector and remainder pairs exist, and on which paths."""
    from tilewise import dispatch

    rows = [asdict(row) for row in dispatch.grid()]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table(title="selector x remainder", title_justify="left")
    for name in rows[0]:
        table.add_column(name.replace("_", " "))
    for row in rows:
        table.add_row(*(_mark(value) for value in row.values()))
    _console().print(table)


def _mark(value: Any) -> str:
    return value if isinstance(value, str) else "yes" if value else "-"


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
