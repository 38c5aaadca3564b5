"""examples/tilelang_flash.py without TileLang and without a GPU: what it says, what it refuses, and how it judges."""

import functools
import importlib.util
import runpy
import sys
import types
from pathlib import Path

import pytest
import torch

import tilewise

PATH = Path(__file__).resolve().parents[2] / "examples" / "tilelang_flash.py"


@pytest.fixture(scope="module")
def example() -> types.ModuleType:
    # by its path: other packages may install a folder named examples
    spec = importlib.util.spec_from_file_location("tilelang_flash", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def without_tilelang(monkeypatch):
    monkeypatch.setitem(sys.modules, "tilelang", None)


@pytest.fixture
def with_empty_tilelang(monkeypatch):
    monkeypatch.setitem(sys.modules, "tilelang", types.ModuleType("tilelang"))


def inputs(batch=1, length=20, heads=4, kv_heads=2, dim=64, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, length, number, dim) for number in (heads, kv_heads, kv_heads)]
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def test_a_missing_package_is_named_with_the_line_that_installs_it(without_tilelang, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(PATH), "--causal"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(PATH), run_name="__main__")
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert "pip install tilelang" in printed.err and printed.out == ""


def test_a_missing_gpu_is_named(example, with_empty_tilelang, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert example.main([]) == 2
    printed = capsys.readouterr().err
    assert "CUDA device" in printed and "pip install" not in printed


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--head-dim", "96"], "96"),
        (["--heads", "6", "--kv-heads", "4"], "got 6 and 4"),
        (["--length", "0"], "at least 1"),
        (["--kv-heads", "0"], "got 16 and 0"),
        (["--rows", "96"], "rows=96"),
        (["--keys", "8"], "keys=8"),
        (["--stages", "0"], "stages=0"),
        (["--dtype", "fp32"], "fp32"),
    ],
)
def test_bad_options_are_named_before_anything_runs(example, without_tilelang, capsys, arguments, words):
    with pytest.raises(SystemExit) as stopped:
        example.main(arguments)
    assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_inputs_that_fit_pass(example):
    example.check_inputs(*inputs())
    example.check_inputs(*inputs(kv_heads=4, dim=128, dtype=torch.float16))


@pytest.mark.parametrize(
    "change, error, words",
    [
        (lambda q, k, v: (q[0], k, v), ValueError, r"q: expected \[B, T, H, D\].*got \[20, 4, 64\]"),
        (lambda q, k, v: (q[:, :0], k, v), ValueError, r"q: .*got \[1, 0, 4, 64\]"),
        (lambda q, k, v: (q.float(), k, v), TypeError, "q: expected bfloat16 or float16, got torch.float32"),
        (lambda q, k, v: (q, k.half(), v), ValueError, "k: expected torch.bfloat16.*got torch.float16"),
        (lambda q, k, v: (q, k, v.to("meta")), ValueError, "v: .* on cpu as q, got .* on meta"),
        (lambda q, k, v: (q.transpose(1, 2), k, v), ValueError, "q: expected a contiguous tensor"),
        (lambda q, k, v: (q, k, v[:, :10].clone()), ValueError, "v: expected the shape of k"),
        (lambda q, k, v: (q, k[:, :10].clone(), v[:, :10].clone()), ValueError, "k: expected B, T, D of q"),
        (lambda q, k, v: (q[:, :, :3].clone(), k, v), ValueError, "k: .* a divisor of H_q"),
    ],
)
def test_inputs_that_do_not_fit_are_named(example, change, error, words):
    with pytest.raises(error, match=words):
        example.check_inputs(*change(*inputs()))


def test_other_head_dims_devices_and_sizes_are_named(example):
    with pytest.raises(ValueError, match=r"expected D in \(64, 128\), got 96"):
        example.check_inputs(*inputs(dim=96))
    with pytest.raises(ValueError, match="2\\*\\*31"):
        example.check_inputs(*(torch.empty(1, 2**20, 32, 64, dtype=torch.float16, device="meta"),) * 3)
    with pytest.raises(ValueError, match="expected a CUDA tensor, got cpu"):
        example.flash(*inputs())


def test_tiles_refuse_what_has_no_warpgroups(example):
    assert example.Tiles() == example.Tiles(128, 128, 2)
    for sizes in ((0, 128, 2), (100, 128, 2), (128, 0, 2), (128, 24, 2), (128, 128, 0)):
        with pytest.raises(ValueError, match="tiles: .*got Tiles"):
            example.Tiles(*sizes)


@pytest.mark.parametrize("causal", [False, True])
def test_the_verdict_takes_equal_results_and_no_others(example, causal, capsys):
    attend = functools.partial(tilewise.attend, causal=causal, return_lse=True)

    def spoiled(out_shift: float, lse_shift: float):
        def kernel(q, k, v):
            out, lse = attend(q, k, v)
            return out + out_shift, lse + lse_shift

        return kernel

    def verdict(kernel) -> bool:
        return example.compare(inputs(), causal, {"tilewise": attend, "tilelang": kernel})

    assert verdict(attend)
    assert "tilelang" in capsys.readouterr().out
    # a wrong output, a wrong lse, a NaN, and rows in another order
    assert not verdict(spoiled(0.1, 0.0))
    assert not verdict(spoiled(0.0, 1e-3))
    assert not verdict(spoiled(float("nan"), 0.0))
    assert not verdict(lambda *tensors: attend(*(x.flip(1) for x in tensors)))
