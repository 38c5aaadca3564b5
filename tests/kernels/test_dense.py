"""The dense kernels in the interpreter: every feature on small, odd shapes, against float64 and PyTorch's eager path."""

from __future__ import annotations

import pytest
import torch
from judge import Case, judge

from tilewise.kernels.ops import dense_attention

pytestmark = pytest.mark.interpret

PACKED = (0, 0, 17, 17, 43, 61)
CASES = [
    Case("plain", 2, 37, 53, 2, 1, 20, 24),
    Case("causal", 1, 53, 53, 6, 2, 16, 16, causal=True),
    Case("more keys", 1, 19, 53, 2, 2, 40, 16, causal=True, sink=True),
    Case("more queries", 1, 53, 19, 2, 1, 16, 40, causal=True, sink=True),
    Case("one token", 1, 1, 1, 3, 1, 16, 16, causal=True, cancels=True),
    Case("window", 1, 67, 67, 1, 1, 16, 16, causal=True, window=23),
    Case("window of one", 1, 35, 41, 2, 1, 16, 16, causal=True, window=1, cancels=True),
    Case("window, more keys", 1, 41, 89, 2, 1, 16, 16, causal=True, window=7, sink=True),
    Case("window, more queries", 1, 71, 37, 2, 1, 16, 16, causal=True, window=7),
    Case("window past everything", 1, 35, 41, 2, 1, 16, 16, causal=True, window=2**40),
    Case("packed causal", 1, 61, 61, 2, 1, 16, 16, causal=True, cu_seqlens_q=PACKED, cu_seqlens_k=PACKED, sink=True),
    Case("packed full", 1, 61, 47, 2, 1, 16, 16, cu_seqlens_q=PACKED, cu_seqlens_k=(0, 5, 5, 19, 19, 47)),
    Case("packed window", 1, 61, 67, 2, 1, 16, 16, causal=True, window=9, cu_seqlens_q=PACKED,
         cu_seqlens_k=(0, 5, 31, 31, 40, 67)),
    Case("negative scale", 1, 33, 33, 2, 2, 16, 16, causal=True, scale=-0.3),
    Case("zero scale", 1, 33, 33, 1, 1, 16, 16, scale=0.0),
    Case("transposed", 2, 31, 31, 4, 2, 16, 16, causal=True, layout="transposed"),
    Case("last dim strided", 1, 31, 31, 2, 1, 16, 16, causal=True, layout="sliced"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_dense_fp32(case: Case) -> None:
    judge(case, torch.float32, "cpu", dense_attention)


@pytest.mark.parametrize("case", CASES[1:4], ids=lambda case: case.name)
def test_dense_fp16(case: Case) -> None:
    judge(case, torch.float16, "cpu", dense_attention)


def _attend(case: Case, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return dense_attention(
        tensors["q"], tensors["k"], tensors["v"], visibility=case.visibility("cpu"), scale=case.d_k**-0.5,
        sink=tensors.get("sink"),
    )  # fmt: skip


def test_padding_past_the_last_sequence_is_dead_and_unread() -> None:
    # on a GPU cu_seqlens are not checked, so a list may end before T: rows there are dead, and NaN there reaches nobody
    case = Case("tail", 1, 61, 61, 2, 1, 16, 16, causal=True, cu_seqlens_q=(0, 20, 45), cu_seqlens_k=(0, 20, 45))
    tensors = case.inputs(torch.float32, "cpu")
    with torch.no_grad():
        for name in ("q", "k", "v"):
            tensors[name][:, 45:] = float("nan")
        tensors["dout"][:, 45:] = float("nan")
    out, lse = _attend(case, tensors)
    assert torch.isfinite(out[:, :45]).all()
    assert not out[:, 45:].any()
    assert (lse[:, 45:] == float("-inf")).all()
    dlse = torch.where(torch.isfinite(lse), tensors["dlse"], 0.0)
    grads = torch.autograd.grad([out, lse], [tensors[n] for n in "qkv"], [tensors["dout"], dlse])
    for name, grad in zip("qkv", grads, strict=True):
        assert torch.isfinite(grad).all(), f"d{name}"
        assert not grad[:, 45:].any(), f"d{name}: padding has a gradient"


def test_keys_that_no_row_can_see_reach_nothing() -> None:
    # with a window and T_q < T_k the first keys are out of everybody's sight
    case = Case("unseen keys", 1, 13, 61, 2, 1, 16, 16, causal=True, window=9)
    tensors = case.inputs(torch.float32, "cpu")
    clean_out, clean_lse = _attend(case, tensors)
    unseen = 61 - 13 - 9 + 1
    with torch.no_grad():
        for name in ("k", "v"):
            tensors[name][:, :unseen] = float("nan")
    out, lse = _attend(case, tensors)
    assert torch.equal(out, clean_out)
    assert torch.equal(lse, clean_lse)
    grads = torch.autograd.grad([out, lse], [tensors[n] for n in "qkv"], [tensors["dout"], tensors["dlse"]])
    assert all(torch.isfinite(grad).all() for grad in grads)


def test_nan_in_a_key_reaches_only_rows_that_see_it() -> None:
    case = Case("nan key", 1, 53, 53, 2, 1, 16, 16, causal=True)
    tensors = case.inputs(torch.float32, "cpu")
    with torch.no_grad():
        tensors["k"][:, 30] = float("nan")
    out, lse = _attend(case, tensors)
    assert torch.isfinite(out[:, :30]).all()
    assert torch.isfinite(lse[:, :30]).all()
    assert torch.isnan(out[:, 30:]).all()


def test_nan_beside_dead_rows_leaves_them_dead() -> None:
    # rows 0..3 see nothing, and share their tile with rows that see the bad token
    case = Case("nan beside dead rows", 1, 23, 19, 2, 1, 16, 16, causal=True, sink=True)
    for name in ("k", "v"):
        tensors = case.inputs(torch.float32, "cpu")
        with torch.no_grad():
            tensors[name][:, 0] = float("nan")
        out, lse = _attend(case, tensors)
        dlse = torch.where(torch.isfinite(lse), tensors["dlse"], 0.0)
        (dq,) = torch.autograd.grad([out, lse], tensors["q"], [tensors["dout"], dlse])
        assert not out[:, :4].any()
        assert (lse[:, :4] == float("-inf")).all()
        assert not dq[:, :4].any()


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # numpy's; the infinity is meant: sigmoid(-181) is 0
def test_sink_far_above_the_logits_keeps_the_lse_gradient() -> None:
    # exp(lse_tot - lse) would overflow here; w = sigmoid(lse - sink) does not
    case = Case("large sink", 1, 19, 19, 2, 1, 16, 16, causal=True, sink=True)
    tensors = case.inputs(torch.float32, "cpu")
    with torch.no_grad():
        tensors["sink"].fill_(200.0)
    out, lse = _attend(case, tensors)
    with_sink = torch.autograd.grad([out, lse], [tensors["q"], tensors["k"]], [tensors["dout"], tensors["dlse"]])
    no_sink = {name: tensor for name, tensor in tensors.items() if name != "sink"}
    only_lse = torch.autograd.grad(_attend(case, no_sink)[1], [tensors["q"], tensors["k"]], tensors["dlse"])
    for ours, expected in zip(with_sink, only_lse, strict=True):
        torch.testing.assert_close(ours, expected)


def test_two_runs_are_bitwise_equal() -> None:
    case = next(case for case in CASES if case.name == "packed causal")
    results = []
    for _ in range(2):
        tensors = case.inputs(torch.float32, "cpu")
        out, lse = _attend(case, tensors)
        leaves = [tensors[n] for n in ("q", "k", "v", "sink")]
        results.append([out, lse, *torch.autograd.grad([out], leaves, [tensors["dout"]])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_operators_pass_opcheck() -> None:
    case = CASES[2]
    tensors = case.inputs(torch.float32, "cpu")
    arguments = (tensors["q"], tensors["k"], tensors["v"], None, None, tensors["sink"], True, 0, 0.25)
    torch.library.opcheck(torch.ops.tilewise.dense_forward.default, arguments)
    out, lse = torch.ops.tilewise.dense_forward(*(x.detach() if isinstance(x, torch.Tensor) else x for x in arguments))
    detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    backward = (tensors["dout"], tensors["dlse"].transpose(1, 2).contiguous(), *detached[:3], out, lse, *detached[3:])
    torch.library.opcheck(torch.ops.tilewise.dense_backward.default, backward)


def test_second_derivatives_raise() -> None:
    tensors = CASES[0].inputs(torch.float32, "cpu")
    out, _ = _attend(CASES[0], tensors)
    (gradient,) = torch.autograd.grad(out.square().sum(), tensors["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match="got a second one"):
        torch.autograd.grad(gradient.sum(), tensors["q"])


def test_compile_without_a_graph_break() -> None:
    import tilewise

    def step(q, k, v, sink):
        return tilewise.attend(q, k, v, causal=True, sink=sink, return_lse=True, impl="triton")

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    tensors = CASES[2].inputs(torch.float32, "cpu")
    leaves = [tensors[n] for n in ("q", "k", "v", "sink")]
    results = []
    for function in (compiled, step):
        out, lse = function(*leaves)
        results.append([out, lse, *torch.autograd.grad([out, lse], leaves, [tensors["dout"], tensors["dlse"]])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_triton_needs_a_gpu_or_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.kernels.triton import dense

    monkeypatch.setattr(dense, "INTERPRETED", False)
    tensors = CASES[0].inputs(torch.float32, "cpu")
    with pytest.raises(NotImplementedError, match="needs tensors on a GPU, got cpu"):
        _attend(CASES[0], tensors)
