"""The dispatch table: what is chosen, what is refused, and that a request is never replaced."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tilewise import Selection, attend, dispatch, remainders, selectors
from tilewise.dispatch import Request
from tilewise.eager import dense as eager_dense
from tilewise.eager import sparse as eager_sparse
from tilewise.kernels import ops
from tilewise.reference import blocks as reference_blocks
from tilewise.reference import dense as reference_dense

SOURCE = Path(__file__).resolve().parents[2] / "src"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HALF = torch.bfloat16
SELECTION = Selection.from_blocks(torch.zeros(1, 4, 1, 1).int(), block_q=16, block_k=64)


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.parametrize(
    ("selector", "remainder", "dtype", "device", "dims", "expected"),
    [
        ("all", "none", HALF, CUDA, (64, 64), "triton"),
        ("all", "none", torch.float32, CUDA, (192, 128), "triton"),
        ("all", "none", torch.float64, CUDA, (64, 64), "eager"),
        ("all", "none", HALF, CUDA, (257, 64), "eager"),
        ("all", "none", HALF, CUDA, (64, 512), "eager"),
        ("all", "none", HALF, CPU, (64, 64), "eager"),
        ("block", "drop", HALF, CPU, (64, 64), "eager"),
        ("token", "taylor0", torch.float64, CUDA, (64, 64), "eager"),
    ],
)
def test_auto(selector, remainder, dtype, device, dims, expected):
    assert dispatch.choose("auto", selector, remainder, Request(dtype, device, dims)) == expected


def test_auto_on_a_cpu_is_eager_also_under_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert dispatch.choose("auto", "all", "none", Request(HALF, CPU, (64, 64))) == "eager"
    assert dispatch.choose("triton", "all", "none", Request(HALF, CPU, (64, 64))) == "triton"


@pytest.mark.parametrize(
    ("impl", "pair", "launcher"),
    [
        ("triton", ("all", "none"), ops.dense_attention),
        ("eager", ("all", "none"), eager_dense.attention),
        ("reference", ("all", "none"), reference_dense.attention),
        ("eager", ("block", "taylor0"), eager_sparse.attention),
        ("reference", ("token", "drop"), reference_blocks.launch),
    ],
)
def test_lookup(impl, pair, launcher):
    assert dispatch.lookup(impl, *pair, Request(HALF, CUDA, (64, 64))) is launcher


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (("triton", "all", "none", Request(HALF, CPU, (64, 64))), r"'triton' does not take device 'cpu'.*TRITON_INTERPRET=1"),
        (("triton", "all", "none", Request(HALF, CUDA, (512, 64))), r"'triton' does not take head dims d_k = 512, .*at most 256"),
        (("triton", "all", "none", Request(torch.float64, CUDA, (64, 64))), r"'triton' does not take dtype torch.float64 \(have"),
        (("triton", "token", "drop", Request(HALF, CUDA, (64, 64))), r"'triton' has no \(token, drop\); have: .*eager, ref"),
        (("hopper", "token", "drop", Request(HALF, CUDA, (64, 64))), r"impl: 'hopper' has no \(token, drop\); have: eager, ref"),
        (("hopper", "all", "none", Request(HALF, CPU, (64, 64))), r"'hopper' does not take device 'cpu' .*capability 9.0"),
        (("hopper", "all", "none", Request(torch.float32, CUDA, (64, 64))), r"'hopper' does not take dtype torch.float32"),
        (("hopper", "all", "none", Request(HALF, CUDA, (256, 64))), r"does not take head dims d_k = 256, .*up to 192"),
        (("hopper", "all", "none", Request(HALF, CUDA, (64, 64), scale=0.0)), r"does not take scale = 0"),
        (("hopper", "block", "drop", Request(HALF, CUDA, (64, 64), selection=SELECTION)), r"blocks of 16 x 64 .*64 or 128"),
        (("auto", "block", "landmark", Request(HALF, CPU, (64, 64))), r"pair \(block, landmark\) has no .*have: \(all, none\)"),
        (("auto", "all", "none", Request(torch.int8, CPU, (64, 64))), r"nothing takes \(all, none\) for torch.int8 on 'cpu'"),
    ],
)  # fmt: skip
def test_what_does_not_exist_is_refused(arguments, pattern):
    with pytest.raises(NotImplementedError, match=pattern):
        dispatch.choose(*arguments)


def test_unknown_impl():
    with pytest.raises(ValueError, match="impl: expected one of 'auto'.*got 'flash'"):
        dispatch.choose("flash", "all", "none", Request(HALF, CPU, (64, 64)))


def recorded(monkeypatch, impl, pair):
    """Replace one launcher by one that notes its calls."""
    calls = []
    row = dispatch.TABLE[pair][impl]

    def launcher(*args, **kwargs):
        calls.append(impl)
        return row.launcher(*args, **kwargs)

    replaced = dispatch.Row(
        launcher, row.dtypes, row.devices, row.largest_head_dim, row.backward, row.compiles, row.limits
    )
    monkeypatch.setitem(dispatch.TABLE[pair], impl, replaced)
    return calls


@pytest.mark.parametrize("impl", ["auto", "eager", "reference"])
@pytest.mark.parametrize("pair", [("all", "none"), ("block", "drop"), ("block", "taylor0"), ("token", "taylor0")])
def test_attend_runs_what_the_table_says(monkeypatch, impl, pair):
    calls = {name: recorded(monkeypatch, name, pair) for name in ("eager", "reference")}
    tokens = Selection.from_tokens(torch.zeros(1, 5, 1).int())
    selector = {"all": None, "block": selectors.Pooled(blocks=2, block_k=4), "token": selectors.Given(tokens)}[pair[0]]
    remainder = {"none": None, "drop": None, "taylor0": remainders.Taylor(0)}[pair[1]]
    q, k, v = (torch.randn(1, 5, 2, 3) for _ in range(3))
    attend(q, k, v, causal=True, selector=selector, remainder=remainder, impl=impl)
    expected = "eager" if impl == "auto" else impl
    assert {name: len(found) for name, found in calls.items()} == {"eager": 0, "reference": 0} | {expected: 1}


def test_triton_on_a_cpu_is_refused_by_attend():
    q, k, v = (torch.randn(1, 5, 2, 3) for _ in range(3))
    with pytest.raises(NotImplementedError, match="TRITON_INTERPRET=1"):
        attend(q, k, v, impl="triton")


def test_the_grid_is_the_table():
    rows = {(row.selector, row.remainder): row for row in dispatch.grid()}
    assert rows.keys() == dispatch.TABLE.keys()
    dense = rows["all", "none"]
    assert dense == dispatch.GridRow("all", "none", True, True, True, True, True, True, True, True)
    for pair, row in rows.items():
        assert row.triton_forward == ("triton" in dispatch.TABLE[pair])
        assert row.reference == ("reference" in dispatch.TABLE[pair])


def test_every_remainder_and_granularity_has_a_reference_and_an_eager_path():
    for remainder in (remainders.Drop(), remainders.Taylor(0)):
        for kind in ("block", "token"):
            assert {"reference", "eager"} <= dispatch.TABLE[kind, remainder.card.name].keys()


def test_cpu_attention_runs_where_triton_cannot_be_imported():
    program = """
import sys
import torch
before = set(sys.modules)
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"triton", "transformers", "rich", "typer", "safetensors", "matplotlib"}:
            raise ImportError("refused: " + name)
sys.meta_path.insert(0, Refuse())
import tilewise
q, k, v = (torch.randn(1, 5, 2, 3, requires_grad=True) for _ in range(3))
tilewise.attend(q, k, v, causal=True).sum().backward()
tilewise.attend(q, k, v, selector=tilewise.selectors.Pooled(blocks=2)).sum().backward()
own = {name.partition(".")[0] for name in set(sys.modules) - before}
print(tilewise.__version__, *sorted(own & {"triton", "transformers", "rich", "typer", "safetensors", "matplotlib"}))
"""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["0.1.0"]
