"""Compile the dense kernels ahead of time, without a GPU, and read what the compiler made of them."""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tilewise.kernels.triton import dense_backward, dense_forward
from tilewise.kernels.triton.config import DenseTiles, Tiles
from tilewise.kernels.triton.launch import WIDEST_LOAD

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TRITON_DTYPE = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Report:
    """Registers a thread, stack bytes, spill loads and stores, shared memory, matrix instructions and waits for them."""

    name: str
    registers: int
    stack: int
    spill_loads: int
    spill_stores: int
    shared: int
    warpgroup_products: int
    warp_products: int
    waits: int

    def __str__(self) -> str:
        return (
            f"{self.name}: registers {self.registers}, stack {self.stack} B, spills {self.spill_loads}+{self.spill_stores}, "
            f"shared {self.shared} B, wgmma {self.warpgroup_products}, mma {self.warp_products}, waits {self.waits}"
        )


def compile_dense(
    which: str, arch: int, dtype: torch.dtype, d_k: int, d_v: int, tiles: Tiles, *, causal: bool = True,
    window: bool = False, packed: bool = False, sink: bool = False, group: int = 1,
) -> Report:  # fmt: skip
    """Compile one of "forward", "query_gradient", "key_gradient", "prepare" for sm_<arch> with the launchers' argument types."""
    kernel = {
        "forward": dense_forward.dense_forward_kernel,
        "query_gradient": dense_backward.query_gradient_kernel,
        "key_gradient": dense_backward.key_gradient_kernel,
        "prepare": dense_backward.prepare_kernel,
    }[which]
    block_dk, block_dv = (max(16, triton.next_power_of_2(d)) for d in (d_k, d_v))
    constants = dict(
        H_Q=16, G=group, D_K=d_k, D_V=d_v, BLOCK_DK=block_dk, BLOCK_DV=block_dv, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        UNIT=math.gcd(WIDEST_LOAD, d_k, d_v), CAUSAL=causal, WINDOW=window, PACKED=packed, SINK=sink,
        PRECISION="ieee" if dtype == torch.float32 else "tf32", BLOCK=dense_backward.prepare_rows(block_dv),
    )  # fmt: skip
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {name: _signature(name, TRITON_DTYPE[dtype]) for name in kernel.arg_names if name not in constants}
    signature |= dict.fromkeys(constants, "constexpr")
    names = kernel.arg_names
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in names if name.endswith("_ptr")}
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    flags = "".join(
        f" {name}" for name, on in dict(causal=causal, window=window, packed=packed, sink=sink).items() if on
    )
    shape = f"{tiles.block_m}x{tiles.block_n} warps {tiles.warps} stages {tiles.stages}"
    return _read(compiled, f"{which} sm_{arch} {TRITON_DTYPE[dtype]} d {d_k}/{d_v}{flags} {shape}")


def tiles_of(which: str, tiles: DenseTiles) -> Tiles:
    """The tiles that a kernel is launched with; the prepare kernel has one fixed shape."""
    return getattr(tiles, which) if which != "prepare" else Tiles(0, 0, 4, 3)


def _signature(name: str, dtype: str) -> str:
    if name.endswith("_ptr"):
        if name.startswith(("cu_", "tile_offset")):
            return "*i64"
        if name.startswith(("lse", "delta", "weight", "sink", "dsink", "dlse")):
            return "*fp32"
        return f"*{dtype}"
    if name.startswith("stride") or name == "rows":
        return "i64"
    return "fp32" if name.startswith("scale") else "i32"


def _read(compiled, name: str) -> Report:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run([TOOLS / "cuobjdump", flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if match is None:
        raise RuntimeError(f"resource usage: expected REG and STACK, got {usage!r}")

    def count(pattern: str) -> int:
        return len(re.findall(pattern, sass))

    return Report(
        name, int(match[1]), int(match[2]), count(r"\bLDL"), count(r"\bSTL"), compiled.metadata.shared,
        count(r"[HQ]GMMA"), count(r"\bHMMA"), count(r"WARPGROUP\.DEPBAR"),
    )  # fmt: skip
