"""The dense kernels on a GPU, through `attend`: correctness, path taken, repeatability, no synchronisation, no recompiles."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import CASES, check_capture
from judge import Case, judge

import tilewise
from tilewise.layout import Visibility

pytestmark = pytest.mark.gpu


class CountedLaunches:
    """Counts what goes through the Triton launchers: proof of the path."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from tilewise.kernels.triton import dense

        self.forward = self.backward = 0
        forward, backward = dense.launch_dense_forward, dense.launch_dense_backward

        def count_forward(*arguments):
            self.forward += 1
            return forward(*arguments)

        def count_backward(*arguments):
            self.backward += 1
            return backward(*arguments)

        monkeypatch.setattr(dense, "launch_dense_forward", count_forward)
        monkeypatch.setattr(dense, "launch_dense_backward", count_backward)


def attend_by_case(q, k, v, *, visibility: Visibility, scale: float, sink):
    """`attend` on the Triton path, with the arguments of the judge."""
    return tilewise.attend(
        q, k, v, causal=visibility.causal, window=visibility.window, scale=scale, cu_seqlens=visibility.cu_seqlens_q,
        cu_seqlens_k=visibility.cu_seqlens_k, sink=sink, return_lse=True, impl="triton",
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_dense(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = CountedLaunches(monkeypatch)
    judge(case, dtype, "cuda", attend_by_case)
    assert (launches.forward, launches.backward) == (1, 1)


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)


def test_two_runs_are_bitwise_equal() -> None:
    q, k, v = _random(1, 2049, 8, 128), _random(1, 2049, 2, 128), _random(1, 2049, 2, 128)
    sink = torch.randn(8, device="cuda", requires_grad=True)
    dout = torch.randn(1, 2049, 8, 128, device="cuda", dtype=torch.bfloat16)
    runs = []
    for _ in range(3):
        out, lse = tilewise.attend(q, k, v, causal=True, sink=sink, return_lse=True, impl="triton")
        grads = torch.autograd.grad([out, lse], [q, k, v, sink], [dout, torch.ones_like(lse)])
        runs.append([out, lse, *grads])
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_no_host_synchronisation_and_cuda_graph() -> None:
    q, k, v = _random(1, 300, 4, 64), _random(1, 300, 2, 64), _random(1, 300, 2, 64)
    boundaries = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    dout = torch.randn(1, 300, 4, 64, device="cuda", dtype=torch.bfloat16)

    def step():
        out = tilewise.attend(q, k, v, causal=True, cu_seqlens=boundaries, impl="triton")
        return (out, *torch.autograd.grad(out, [q, k, v], dout))

    check_capture(step)


def test_no_recompile_when_lengths_change() -> None:
    from tilewise.kernels.triton import dense_backward, dense_forward

    kernels = [
        dense_forward.dense_forward_kernel, dense_backward.prepare_kernel, dense_backward.query_gradient_kernel,
        dense_backward.key_gradient_kernel,
    ]  # fmt: skip

    def compiled() -> list[int]:
        return [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels]

    def step(length: int, dim: int) -> None:
        q, k, v = (_random(2, length, 2, dim) for _ in range(3))
        tilewise.attend(q, k, v, causal=True).sum().backward()

    for dim in (64, 20):
        step(128, dim)
        before = compiled()
        assert min(before) > 0
        for length in (1, 17, 129, 1000, 4096):
            step(length, dim)
        assert compiled() == before


def test_more_than_65535_heads() -> None:
    q, k, v = (_random(17000, 5, 4, 16) for _ in range(3))
    out, lse = tilewise.attend(q, k, v, causal=True, return_lse=True)
    grads = torch.autograd.grad(out, [q, k, v], torch.ones_like(out))
    reference, reference_lse = tilewise.attend(q[-3:], k[-3:], v[-3:], causal=True, return_lse=True, impl="eager")
    reference_grads = torch.autograd.grad(reference, [q, k, v], torch.ones_like(reference))
    torch.testing.assert_close(out[-3:], reference, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse[-3:], reference_lse, atol=1e-4, rtol=1e-4)
    for ours, theirs in zip(grads, reference_grads, strict=True):
        torch.testing.assert_close(ours[-3:], theirs[-3:], atol=4e-2, rtol=4e-2)


@pytest.mark.slow
def test_offsets_past_two_to_the_31_elements() -> None:
    length, heads, dim, window = 2**20 + 77, 16, 128, 64
    q, k, v = (torch.randn(1, length, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    assert q.numel() > 2**31
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = tilewise.attend(q, k, v, causal=True, window=window, return_lse=True)
    dout = torch.zeros_like(out)
    dout[:, -50:] = 1
    grads = torch.autograd.grad(out, leaves, dout)
    tail = [x.detach()[:, -200:].requires_grad_() for x in leaves]
    expected, expected_lse = tilewise.attend(*tail, causal=True, window=window, return_lse=True, impl="eager")
    expected_grads = torch.autograd.grad(expected, tail, dout[:, -200:])
    torch.testing.assert_close(out[:, -100:], expected[:, -100:], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse[:, -100:], expected_lse[:, -100:], atol=1e-4, rtol=1e-4)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(ours[:, -100:], theirs[:, -100:], atol=4e-2, rtol=4e-2)


def test_expanded_gradient_and_extreme_inputs() -> None:
    q, k, v = _random(1, 130, 2, 64), _random(1, 130, 2, 64), _random(1, 130, 2, 64)
    out = tilewise.attend(q, k, v)
    summed = torch.autograd.grad(out.sum(), [q, k, v], retain_graph=True)  # stride-0 gradient
    dense = torch.autograd.grad(out, [q, k, v], torch.ones_like(out))
    assert all(torch.equal(a, b) for a, b in zip(summed, dense, strict=True))
    hot = torch.full((1, 80, 1, 64), 240.0, device="cuda", dtype=torch.float16)
    cold = torch.full((1, 80, 1, 64), -1000.0, device="cuda", dtype=torch.float16)
    values = torch.randn(1, 80, 1, 64, device="cuda", dtype=torch.float16)
    mean = tilewise.attend(hot, cold, values)  # every logit is -1.92e6: the mean of the values, not 0
    torch.testing.assert_close(mean, values.mean(1, keepdim=True).expand_as(mean), atol=2e-3, rtol=2e-3)


def test_compile_fullgraph_and_opcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(q, k, v, sink):
        return tilewise.attend(q, k, v, causal=True, sink=sink, return_lse=True, impl="triton")

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    sink = torch.randn(4, device="cuda", requires_grad=True)
    for length in (65, 130, 257):
        q, k, v = _random(2, length, 4, 64), _random(2, length, 2, 64), _random(2, length, 2, 64)
        out, lse = compiled(q, k, v, sink)
        grads = torch.autograd.grad([out.float().square().sum() + lse.sum()], [q, k, v, sink])
        expected, expected_lse = step(q, k, v, sink)
        expected_grads = torch.autograd.grad([expected.float().square().sum() + expected_lse.sum()], [q, k, v, sink])
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
        for ours, theirs in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-2)
    arguments = (q, k, v, None, None, sink, True, 0, 0.125)
    torch.library.opcheck(torch.ops.tilewise.dense_forward.default, arguments)
