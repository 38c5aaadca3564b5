"""Every dense kernel compiles for sm_90 and sm_80 in its default tiles, without spills; registers and spills are printed."""

from __future__ import annotations

import pytest
import torch
from aot.compiled import compile_dense, tiles_of

from tilewise.kernels.triton.config import SHARED_MEMORY_LIMIT, choose_tiles

pytestmark = pytest.mark.aot

KERNELS = ("forward", "query_gradient", "key_gradient", "prepare")
HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))
FLAGS = {
    "full": {},
    "causal": {"causal": True},
    "everything": {"causal": True, "window": True, "packed": True, "sink": True, "group": 4},
}


def _check(which: str, arch: int, dtype: torch.dtype, d_k: int, d_v: int, flags: str) -> None:
    tiles = tiles_of(which, choose_tiles(dtype, d_k, d_v, FLAGS[flags].get("causal", False), hopper=arch == 90))
    report = compile_dense(which, arch, dtype, d_k, d_v, tiles, **({"causal": False} | FLAGS[flags]))
    print(report)
    assert report.spill_loads == report.spill_stores == 0, str(report)
    assert report.shared <= SHARED_MEMORY_LIMIT[arch], str(report)
    if report.warpgroup_products:
        # a serialised kernel waits for each product: as many waits as products
        assert report.waits < report.warpgroup_products, str(report)


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("d_k, d_v", HEAD_DIMS, ids=lambda d: str(d))
@pytest.mark.parametrize("which", KERNELS)
@pytest.mark.parametrize("arch", [90, 80])
def test_dense_bf16_compiles_without_spills(arch: int, which: str, d_k: int, d_v: int, flags: str) -> None:
    _check(which, arch, torch.bfloat16, d_k, d_v, flags)


@pytest.mark.parametrize("d_k, d_v", HEAD_DIMS[:3], ids=lambda d: str(d))
@pytest.mark.parametrize("which", KERNELS)
@pytest.mark.parametrize("arch", [90, 80])
def test_dense_fp32_compiles_without_spills(arch: int, which: str, d_k: int, d_v: int) -> None:
    _check(which, arch, torch.float32, d_k, d_v, "everything")


@pytest.mark.parametrize("d_k, d_v", [(96, 80), (80, 96), (40, 40), (20, 40)], ids=lambda d: str(d))
@pytest.mark.parametrize("which", KERNELS)
def test_padded_head_dims_compile_without_spills(which: str, d_k: int, d_v: int) -> None:
    _check(which, 90, torch.bfloat16, d_k, d_v, "causal")


@pytest.mark.parametrize("which", KERNELS)
def test_dense_fp16_compiles_without_spills(which: str) -> None:
    _check(which, 90, torch.float16, 128, 128, "causal")


def test_hopper_kernels_use_warpgroup_products() -> None:
    tiles = choose_tiles(torch.bfloat16, 128, 128, True, hopper=True)
    for which in KERNELS[:3]:
        report = compile_dense(which, 90, torch.bfloat16, 128, 128, tiles_of(which, tiles), causal=True)
        assert report.warpgroup_products > 0, str(report)
