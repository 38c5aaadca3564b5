"""The Hopper walk on a GPU of compute capability 9.0, through `attend`: correctness, path taken, repeatability, NaN, lists."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import CASES, check_capture
from judge import Case, gradients, judge, relative_error
from tolerances import kernel_error_limit

import tilewise
from tilewise import Selection, selectors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
HALF = (torch.bfloat16, torch.float16)
COVERED = [case for case in CASES if case.d_k % 8 == case.d_v % 8 == 0 and case.d_k <= 192 and case.d_v <= 128]
BOUNDARIES = (0, 100, 100, 500, 900)


class CountedLaunches:
    """Counts the launches of each kernel: proof of the path."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from tilewise.kernels.hopper import launch

        self.counts = {}
        for name in ("launch_forward", "launch_query_gradient", "launch_key_gradient"):
            self.counts[name] = 0

            monkeypatch.setattr(launch, name, self._counted(name, getattr(launch, name)))

    def _counted(self, name: str, original):
        def counted(*arguments):
            self.counts[name] += 1
            return original(*arguments)

        return counted

    def values(self) -> tuple[int, ...]:
        return tuple(self.counts.values())


def attention(deterministic: bool):
    """`attend` on the Hopper path with the arguments of the judge."""

    def call(q, k, v, *, visibility, scale, sink):
        return tilewise.attend(
            q, k, v, causal=visibility.causal, window=visibility.window, scale=scale, cu_seqlens=visibility.cu_seqlens_q,
            cu_seqlens_k=visibility.cu_seqlens_k, sink=sink, return_lse=True, impl="hopper", deterministic=deterministic,
        )  # fmt: skip

    return call


@pytest.mark.parametrize("dtype", HALF, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("case", COVERED, ids=lambda case: case.name)
def test_dense(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = CountedLaunches(monkeypatch)
    judge(case, dtype, "cuda", attention(True))
    # the backward of d_k > 128 is the Triton path's
    assert launches.values() == ((1, 1, 1) if case.d_k <= 128 else (1, 0, 0))


@pytest.mark.parametrize("case", COVERED[::2], ids=lambda case: case.name)
def test_reduce_add(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = CountedLaunches(monkeypatch)
    judge(case, torch.bfloat16, "cuda", attention(False))
    assert launches.values() == ((1, 0, 1) if case.d_k <= 128 else (1, 0, 0))


def lists(block_q: int, heads: int, tiles: int, blocks: int, count: int) -> torch.Tensor:
    """Random lists with absent entries, one of them empty."""
    ids = torch.argsort(torch.rand(1, tiles, heads, blocks, device="cuda"), -1)[..., :count].to(torch.int32)
    ids[0, 1, :, 2] = -1
    ids[0, 2, 0] = -1
    return ids


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 200)])
@pytest.mark.parametrize(("d_k", "d_v"), [(64, 64), (128, 128), (64, 128)])
@pytest.mark.parametrize("block_q", [64, 128])
def test_lists(block_q: int, d_k: int, d_v: int, causal: bool, window: int | None, packed: bool, monkeypatch) -> None:
    launches = CountedLaunches(monkeypatch)
    length, heads, kv_heads = 900, 4, 2
    tensors = {
        name: torch.randn(1, length, h, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for name, h, dim in (("q", heads, d_k), ("k", kv_heads, d_k), ("v", kv_heads, d_v))
    }
    tensors["sink"] = torch.randn(heads, device="cuda", requires_grad=True)
    tensors |= {
        "dout": torch.randn(1, length, heads, d_v, device="cuda", dtype=torch.bfloat16),
        "dlse": torch.randn(1, length, heads, device="cuda"),
    }
    tiles = -(-length // block_q) + (3 if packed else 0)
    ids = lists(block_q, 1 if window else kv_heads, tiles, -(-length // 64), 5)
    selector = selectors.Given(Selection.from_blocks(ids, block_q=block_q, block_k=64))
    boundaries = torch.tensor(BOUNDARIES, dtype=torch.int32, device="cuda") if packed else None

    def run(values: dict, impl: str) -> dict:
        out, lse = tilewise.attend(
            values["q"], values["k"], values["v"], causal=causal, window=window, selector=selector, sink=values["sink"],
            cu_seqlens=boundaries, return_lse=True, impl=impl,
        )  # fmt: skip
        return gradients(out, lse, values)

    ours = run(tensors, "hopper")
    assert launches.values() == (1, 1, 1)
    exact = run({name: x.detach().double().requires_grad_(x.requires_grad) for name, x in tensors.items()}, "reference")
    live = torch.isfinite(exact["lse"])
    assert torch.equal(torch.isfinite(ours["lse"]), live)
    for name, truth in exact.items():
        mine = ours[name].double()
        if name == "lse":
            mine, truth = mine[live], truth[live]
        # PyTorch has no eager path of its own for lists: its error is taken as one rounding of the dtype
        dtype = torch.float32 if name in ("lse", "dsink") else torch.bfloat16
        peer = torch.finfo(torch.bfloat16).eps / 4 if name != "lse" else 0.0
        amplification = 1.0
        if name == "dsink":
            # a sum of terms that cancel (judge.py), each with one rounding of its own: that of out, read as it was stored
            terms = torch.sigmoid(tensors["sink"].double() - exact["lse"])[..., None] * tensors["dout"] * exact["out"]
            peer = torch.finfo(torch.bfloat16).eps / 2 * float(terms.norm() / truth.norm())
            amplification = float(terms.sum(-1).abs().sum((0, 1)).norm() / truth.norm())
        error, limit = relative_error(mine, truth), kernel_error_limit(peer, dtype, amplification)
        print(f"lists of {block_q} rows, D={d_k}/{d_v} {name:>5}: error {error:.2e}, limit {limit:.2e}")
        assert error <= limit, name


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("deterministic", [True, False])
def test_integers_are_exact(head_dim: int, deterministic: bool) -> None:
    """Every row puts all its weight on its own key, and values and gradients are integers: products have no rounding."""
    torch.manual_seed(0)
    length = 300
    code = (torch.randint(0, 2, (1, length, 2, head_dim), device="cuda") * 2 - 1).to(torch.bfloat16)
    q, k = code.clone().requires_grad_(), code.clone().requires_grad_()
    v, dout = (torch.randint(-8, 9, code.shape, device="cuda").to(torch.bfloat16) for _ in range(2))
    v.requires_grad_()
    # random codes of this many signs differ in ten places or more, 20 in q . k; 8 times that is exp(-160), which is 0
    out, lse = tilewise.attend(q, k, v, scale=8.0, return_lse=True, impl="hopper", deterministic=deterministic)
    dq, dk, dv = torch.autograd.grad(out, [q, k, v], dout)
    assert torch.equal(out, v)
    torch.testing.assert_close(lse, torch.full_like(lse, 8.0 * head_dim), atol=0, rtol=1e-6)
    assert torch.equal(dv, dout)
    assert not dq.any() and not dk.any()


@pytest.mark.parametrize("deterministic", [True, False])
def test_nan_of_unseen_tokens_reaches_nothing(deterministic: bool) -> None:
    """Padding past the last sequence, and dead rows of T_q > T_k, hold NaN; all results stay finite."""
    boundaries = torch.tensor([0, 130, 333], dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn(1, 500, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for tensor in (q, k, v):
        tensor[:, 333:] = float("nan")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = tilewise.attend(*leaves, causal=True, cu_seqlens=boundaries, impl="hopper", deterministic=deterministic)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert all(torch.isfinite(x).all() for x in (out, *grads))
    assert not any(x[:, 333:].any() for x in (out, *grads))
    q, k, v = (torch.randn(1, length, 2, 128, device="cuda", dtype=torch.bfloat16) for length in (300, 100, 100))
    q[:, :200] = float("nan")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = tilewise.attend(*leaves, causal=True, impl="hopper", deterministic=deterministic)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert all(torch.isfinite(x).all() for x in (out, *grads))


@pytest.mark.parametrize("deterministic", [True, False])
def test_nan_of_one_head_stays_in_it(deterministic: bool) -> None:
    """The last tile of a head reaches past its rows, to where the next head's stand."""
    q, k, v, dout = (torch.randn(1, 131, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for tensor in (q, k, v, dout):
        tensor[:, :, 1] = float("nan")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    sink = torch.zeros(2, device="cuda")
    out = tilewise.attend(*leaves, causal=True, sink=sink, impl="hopper", deterministic=deterministic)
    grads = torch.autograd.grad(out, leaves, dout)
    assert all(torch.isfinite(x[:, :, 0]).all() for x in (out, *grads))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_thousand_launches_give_the_same_bits(head_dim: int) -> None:
    q, k, v, dout = (
        torch.randn(1, 641, heads, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (8, 2, 2, 8)
    )

    def run(causal: bool) -> list[torch.Tensor]:
        out, lse = tilewise.attend(q, k, v, causal=causal, return_lse=True, impl="hopper")
        return [out, lse, *torch.autograd.grad(out, [q, k, v], dout)]

    for causal in (False, True):
        first = run(causal)
        differs = torch.zeros((), dtype=torch.bool, device="cuda")
        for _ in range(500):
            for ours, theirs in zip(run(causal), first, strict=True):
                differs |= (ours != theirs).any()
        assert not differs


def test_no_host_synchronisation_and_cuda_graph() -> None:
    q, k, v = (torch.randn(1, 300, h, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2))
    boundaries = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    selector = selectors.Given(Selection.from_blocks(lists(128, 2, 5, 5, 3), block_q=128, block_k=64))
    dout = torch.randn(1, 300, 4, 64, device="cuda", dtype=torch.bfloat16)

    def step() -> list[torch.Tensor]:
        results = []
        for chosen in (None, selector):
            out = tilewise.attend(q, k, v, causal=True, cu_seqlens=boundaries, selector=chosen, impl="hopper")
            results += [out, *torch.autograd.grad(out, [q, k, v], dout)]
        return results

    check_capture(step)


def test_auto_takes_this_path_and_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = CountedLaunches(monkeypatch)
    q, k, v = (torch.randn(2, 257, h, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2))
    expected = tilewise.attend(q, k, v, causal=True)
    assert launches.values() == (1, 0, 0)
    compiled = torch.compile(lambda *x: tilewise.attend(*x, causal=True), fullgraph=True)
    out = compiled(q, k, v)
    assert torch.equal(out, expected)
    torch.autograd.grad(out.sum(), [q, k, v])
    assert launches.values() == (2, 1, 1)
    arguments = (q, k, v, None, None, None, None, 0, True, 0, 0.125, True)
    torch.library.opcheck(torch.ops.tilewise.hopper_forward.default, arguments)


def graph_time(step) -> float:
    """Milliseconds of one replay: the kernels alone, without the host."""
    import triton

    return triton.testing.do_bench_cudagraph(step, rep=20, return_mode="median")


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_never_slower_than_the_triton_path(head_dim: int) -> None:
    for length in (256, 1024, 4096):
        for causal in (False, True):
            q, k, v = (torch.randn(1, length, 16, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
            times = {
                impl: graph_time(lambda impl=impl: tilewise.attend(q, k, v, causal=causal, impl=impl))  # noqa: B023
                for impl in ("hopper", "triton")
            }
            print(f"D={head_dim} T={length} causal={causal}: {times}")
            assert times["hopper"] <= 1.05 * times["triton"] + 2e-3
