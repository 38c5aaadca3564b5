"""What every GPU path is judged on: dense calls, and that a step can be captured in a CUDA graph."""

from collections.abc import Callable, Sequence

import torch
from judge import Case
from torch import Tensor

PACKED = (0, 0, 170, 171, 430, 613)
HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256), (96, 96), (80, 80), (40, 40), (20, 20), (64, 128))
CASES = [
    *(Case(f"causal {d_k}/{d_v}", 2, 517, 517, 4, 2, d_k, d_v, causal=True) for d_k, d_v in HEAD_DIMS),
    Case("full", 2, 333, 471, 6, 2, 128, 128),
    Case("mqa", 1, 333, 471, 8, 1, 64, 64),
    Case("more keys", 1, 190, 531, 4, 4, 64, 64, causal=True, sink=True),
    Case("more queries", 1, 531, 190, 4, 2, 128, 64, causal=True, sink=True),
    Case("one token", 1, 1, 1, 3, 1, 64, 64, causal=True, cancels=True),
    Case("window", 1, 671, 671, 2, 1, 64, 64, causal=True, window=237),
    Case("window of one", 1, 351, 411, 2, 1, 128, 128, causal=True, window=1, cancels=True),
    Case("window, more keys", 1, 411, 892, 2, 1, 64, 64, causal=True, window=70, sink=True),
    Case("window, more queries", 1, 711, 377, 2, 1, 64, 64, causal=True, window=70),
    Case("packed causal", 1, 613, 613, 4, 1, 128, 128, causal=True, cu_seqlens_q=PACKED, cu_seqlens_k=PACKED, sink=True),
    Case("packed full", 1, 613, 475, 2, 1, 64, 64, cu_seqlens_q=PACKED, cu_seqlens_k=(0, 50, 50, 190, 190, 475)),
    Case("packed window", 1, 613, 671, 2, 1, 64, 64, causal=True, window=90, cu_seqlens_q=PACKED,
         cu_seqlens_k=(0, 50, 310, 310, 400, 671)),
    Case("negative scale", 1, 333, 333, 2, 2, 64, 64, causal=True, scale=-0.3),
    Case("transposed", 2, 310, 310, 4, 2, 64, 64, causal=True, layout="transposed"),
    Case("last dim strided", 1, 310, 310, 2, 1, 64, 64, causal=True, layout="sliced"),
]  # fmt: skip


def check_capture(step: Callable[[], Sequence[Tensor]]) -> None:
    """Assert that a step never waits for the device, and that its replay in a CUDA graph gives the same bits."""
    # autograd remembers the stream of a leaf's first use: it has to be the one that is captured
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        captured = step()
    for tensor in captured:
        tensor.detach().fill_(float("nan"))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
