"""Every method that Q, K, V alone define, against exact attention, on the layers of a capture."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import fields, replace

import torch
from torch import Tensor

import tilewise
from tilewise.capture import Capture, LayerCapture
from tilewise.diagnose.curve import block_mass, curve, oracle_at_budget_of
from tilewise.diagnose.mass import MassAccount, account
from tilewise.diagnose.methods import Method, predicted_cost, standard_methods
from tilewise.diagnose.report import MethodResult, Quantities, Report
from tilewise.diagnose.timing import chosen_path, dense_floors, run_attend, timed
from tilewise.reference import dense as reference
from tilewise.remainders import Taylor
from tilewise.selection import Selection

# rows of whole fp32 logit matrices that the exact output holds at once
EXACT_ROWS = 64


def compare(
    capture: Capture,
    *,
    rows: int | None = 256,
    blocks: int = 16,
    block: int = 64,
    device: torch.device | str = "cpu",
    advance: Callable[[str], None] | None = None,
) -> Report:
    """Run every standard method on every layer of a capture and account for what each leaves out.

    Args:
        capture: one unpacked sequence per batch entry.
        rows: query rows to compare, the last ones of the capture; None: all.
        blocks: key blocks that each selector may choose besides those that overlap the query tile.
        block: tokens per key block and rows per query tile.
        device: where to compute.
        advance: called with a short text after each of `steps(capture, blocks, block)` steps.

    Returns:
        The `Report`.

    Raises:
        ValueError: a number below 1, or an empty capture.
    """
    for name, value in (("rows", rows), ("blocks", blocks), ("block", block)):
        if value is not None and value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    if not capture.layers:
        raise ValueError("capture: expected at least one layer, got none")
    begin = time.perf_counter()
    advance = advance or (lambda text: None)
    layers = {number: _last_rows(layer, rows, device) for number, layer in capture.layers.items()}
    methods = standard_methods(blocks, block)
    results, points = [], []
    for number, layer in layers.items():
        mass = block_mass(layer, block)
        points += curve(number, layer, block, mass)
        advance(f"layer {number}: curve")
        results += _compare_layer(number, layer, methods, block, mass, advance)
    some = next(iter(layers.values()))
    settings = {"rows": some.q.shape[1], "keys": some.k.shape[1], "blocks": blocks, "block": block}
    floors = dense_floors(layers)
    elapsed = time.perf_counter() - begin
    return Report(capture.metadata, settings, _environment(some.q), results, points, floors, elapsed)


def steps(capture: Capture, blocks: int = 16, block: int = 64) -> int:
    """How many steps `compare` reports."""
    return len(capture.layers) * (1 + len(standard_methods(blocks, block)))


def _compare_layer(
    number: int,
    layer: LayerCapture,
    methods: list[Method],
    block: int,
    mass: Tensor,
    advance: Callable[[str], None],
) -> list[MethodResult]:
    exact = exact_output(layer)
    run_attend(methods[0], _last_rows(layer, 1, layer.q.device))  # the first call pays for imports and compilation
    known = _Accounts(layer)
    selections: dict[str, Selection] = {}
    results = []
    for method in methods:
        if method.selector_name not in selections:
            selections[method.selector_name] = _select(method, layer, block)
        selection = selections[method.selector_name]
        best_selection = oracle_at_budget_of(selection, mass, layer.k.shape[2])
        with_taylor, oracle = known.of(selection), known.of(best_selection)
        own, best = (_for_remainder(found, method) for found in (with_taylor, oracle))
        out, seconds = timed(lambda method=method: run_attend(method, layer), layer.q.device)
        error = (out.float() - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
        mean = _quantities(own)
        results.append(
            MethodResult(
                layer=number,
                selector=method.selector_name,
                remainder=method.remainder_name,
                mean=mean,
                heads=[_quantities(own, head) for head in range(layer.q.shape[2])],
                oracle=_quantities(best),
                attend_error=float(error.mean()),
                attend_gap=float((error - own.per_row.output_error).abs().max()),
                seconds=seconds,
                predicted_cost=predicted_cost(method, mean.density, block, layer.q.shape[3], layer.v.shape[3]),
                path=chosen_path(method, layer),
            )
        )
        advance(f"layer {number}: {method.name}")
    return results


def exact_output(layer: LayerCapture) -> Tensor:
    """Exact attention of the captured rows by the reference, fp32 `[B, T_q, H_q, d_v]`, a few rows at a time."""
    rows, keys = layer.q.shape[1], layer.k.shape[1]
    k, v = layer.k.float(), layer.v.float()
    pieces = []
    for begin in range(0, rows, EXACT_ROWS):
        end = min(begin + EXACT_ROWS, rows)
        # bottom-right alignment: the rows of a piece are the last ones of a shorter text, when causal
        length = keys - rows + end if layer.causal else keys
        piece = replace(layer, q=layer.q[:, begin:end].float(), k=k[:, :length], v=v[:, :length])
        out, _ = reference.attention(
            piece.q, piece.k, piece.v, visibility=piece.visibility, scale=layer.scale, sink=None
        )
        pieces.append(out)
    return torch.cat(pieces, dim=1)


def _last_rows(layer: LayerCapture, rows: int | None, device: torch.device | str) -> LayerCapture:
    q = layer.q if rows is None else layer.q[:, -rows:]
    return replace(layer, q=q.to(device), k=layer.k.to(device), v=layer.v.to(device))


def _select(method: Method, layer: LayerCapture, block: int) -> Selection:
    """The lists of a method; dense attention selects every block."""
    if method.selector is not None:
        return method.selector.select(layer.q, layer.k, layer.visibility, layer.scale)
    count, tiles = -(-layer.k.shape[1] // block), -(-layer.q.shape[1] // block)
    ids = torch.arange(count, device=layer.q.device).expand(layer.q.shape[0], tiles, layer.k.shape[2], count)
    return Selection.from_blocks(ids, block_q=block, block_k=block, visibility=layer.visibility)


class _Accounts:
    """Accounts with Taylor, which hold those with Drop as well; selections with the same blocks share one."""

    def __init__(self, layer: LayerCapture) -> None:
        self.layer = layer
        self.known: list[tuple[Tensor, MassAccount]] = []

    def of(self, selection: Selection) -> MassAccount:
        layer = self.layer
        rows, keys = selection.tables()
        bits = selection.members(torch.arange(rows.count, device=layer.q.device), keys.count)
        for other, found in self.known:
            if torch.equal(other, bits):
                return found
        found = account(layer.q, layer.k, layer.v, selection, Taylor(order=0), layer.visibility, layer.scale)
        self.known.append((bits, found))
        return found


def _for_remainder(found: MassAccount, method: Method) -> MassAccount:
    """The account with the method's own remainder, from one with Taylor."""
    return found if isinstance(method.remainder, Taylor) else as_drop(found)


def as_drop(found: MassAccount) -> MassAccount:
    """The account of the same selection with nothing for the rest: no claim, and all of the error is the mass term."""
    nothing = {"mass_claimed", "value_error"}
    changed: dict[str, dict[str, Tensor]] = {}
    for name, source in (("mean", found), ("row", found.per_row)):
        changed[name] = {
            "output_error": source.drop_error,
            "mass_error": source.drop_error,
            "identity_residual": source.drop_residual,
            "calibration": torch.where(source.calibration.isnan(), source.calibration, 0.0),
        } | {key: torch.where(getattr(source, key).isnan(), getattr(source, key), 0.0) for key in nothing}
    return replace(found, **changed["mean"], per_row=replace(found.per_row, **changed["row"]))


def _quantities(found: MassAccount, head: int | None = None) -> Quantities:
    """Mean over the batch and all heads, or over the batch for one head."""
    values = {field.name: getattr(found, field.name) for field in fields(Quantities)}
    return Quantities(**{key: float((x if head is None else x[:, head]).nanmean()) for key, x in values.items()})


def _environment(q: Tensor) -> dict[str, str]:
    device = torch.cuda.get_device_name(q.device) if q.device.type == "cuda" else platform.processor() or "cpu"
    return {
        "tilewise": tilewise.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device,
        "threads": str(torch.get_num_threads()),
        "dtype": str(q.dtype).removeprefix("torch."),
    }
