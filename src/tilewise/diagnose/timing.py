"""How long `attend` takes here, and on a GPU how far the dense kernel is from its floor."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.api import attend
from tilewise.capture import LayerCapture
from tilewise.diagnose.methods import Method
from tilewise.dispatch import Request, choose
from tilewise.layout import Visibility

MATMUL_SIZE = 8192
COPY_BYTES = 1 << 30
ENOUGH_SECONDS = 0.4  # of repeats on a CPU


@dataclass(frozen=True)
class Floor:
    """What one kernel cannot beat on this device: its FLOP at the measured matmul rate, its bytes at the copy rate."""

    layer: int
    impl: str
    milliseconds: float
    floor_milliseconds: float
    teraflops: float
    matmul_teraflops: float
    copy_terabytes: float


def run_attend(method: Method, layer: LayerCapture, impl: str = "auto") -> Tensor:
    """Call the public function for one method, selection included."""
    return attend(
        layer.q,
        layer.k,
        layer.v,
        causal=layer.causal,
        window=layer.window,
        scale=layer.scale,
        selector=method.selector,
        remainder=method.remainder,
        impl=impl,
    )


def chosen_path(method: Method, layer: LayerCapture) -> str:
    """The implementation that impl="auto" means for a method."""
    kind, remainder = ("all", "none") if method.selector is None else ("block", "drop")
    if method.remainder is not None:
        remainder = method.remainder.card.name
    selection = None
    if method.selector is not None and layer.q.is_cuda:
        # how large the tiles are and who shares a list decides what a GPU path can take
        visibility = Visibility(layer.q.shape[1], layer.k.shape[1], layer.causal, layer.window)
        selection = method.selector.select(layer.q, layer.k, visibility, layer.scale)
    head_dims = (layer.q.shape[3], layer.v.shape[3])
    request = Request(layer.q.dtype, layer.q.device, head_dims, layer.k.shape[2], layer.scale, selection)
    return choose("auto", kind, remainder, request)


def timed(call: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, float]:
    """Result and seconds of a call: the best of up to three on a CPU, on a GPU the median of ten after three to warm up."""
    on_gpu = device.type == "cuda"
    for _ in range(3 if on_gpu else 0):
        call()
    seconds = []
    for _ in range(10 if on_gpu else 3):
        if on_gpu:
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        result = call()
        if on_gpu:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
        if not on_gpu and sum(seconds) > ENOUGH_SECONDS:
            break
    return result, statistics.median(seconds) if on_gpu else min(seconds)


def visible_pairs(layer: LayerCapture) -> int:
    """(query row, key) pairs that one head computes."""
    first, end = layer.visibility.key_range(layer.q.device)
    return int((end - first).sum())


def dense_floors(layers: dict[int, LayerCapture]) -> list[Floor]:
    """Time the dense Triton kernel on CUDA tensors against the rates of this device; an empty list elsewhere."""
    device = next(iter(layers.values())).q.device
    if device.type != "cuda":
        return []
    dtype = next(iter(layers.values())).q.dtype
    matrix = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device, dtype=dtype)
    _, seconds = timed(lambda: matrix @ matrix, device)
    matmul_rate = 2 * MATMUL_SIZE**3 / seconds
    source = torch.empty(COPY_BYTES, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    _, seconds = timed(lambda: target.copy_(source), device)
    copy_rate = 2 * COPY_BYTES / seconds
    dense = Method("dense", "none", None, None)
    floors = []
    for number, layer in layers.items():
        _, seconds = timed(lambda layer=layer: run_attend(dense, layer, "triton"), device)
        flop = 2 * (layer.q.shape[3] + layer.v.shape[3]) * visible_pairs(layer) * layer.q.shape[0] * layer.q.shape[2]
        written = layer.q.shape[0] * layer.q.shape[1] * layer.q.shape[2] * layer.v.shape[3] * layer.q.element_size()
        moved = sum(x.numel() * x.element_size() for x in (layer.q, layer.k, layer.v)) + written
        floor = max(flop / matmul_rate, moved / copy_rate)
        floors.append(
            Floor(
                number,
                "triton",
                seconds * 1e3,
                floor * 1e3,
                flop / seconds / 1e12,
                matmul_rate / 1e12,
                copy_rate / 1e12,
            )
        )
    return floors
