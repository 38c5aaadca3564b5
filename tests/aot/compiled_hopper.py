"""Compile the Hopper kernels ahead of time, as their launchers would launch them, without a GPU.

The operators run on small CPU tensors with every kernel's launch recorded in place of made: tiles, descriptors, argument types
and alignments are those of the launchers, so a change of kernels/hopper/{config,launch}.py is what gets compiled here.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
import triton
from aot.compiled import TOOLS, TRITON_DTYPE, Report
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature

from tilewise.kernels.hopper import attention, forward, key_gradient, launch, plan, query_gradient
from tilewise.kernels.triton import dense_backward

TARGET = GPUTarget("cuda", 90, 32)
KERNELS = (
    forward.forward_kernel,
    query_gradient.query_gradient_kernel,
    key_gradient.key_gradient_kernel,
    dense_backward.prepare_kernel,
    plan.packed_plan_kernel,
    plan.list_plan_kernel,
)


@dataclass(frozen=True)
class Variant:
    """What decides which kernel is compiled; lengths only by which of the two sides is longer."""

    d_k: int = 128
    d_v: int = 128
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True
    window: int = 0
    packed: bool = False
    sink: bool = False
    listed: int = 0  # query rows that a list is for; 0: computed walks
    group: int = 1
    query_length: int = 256
    key_length: int = 256


@dataclass(frozen=True)
class HopperReport(Report):
    """A report, whether registers go from the producer to the consumers, spill loads within the loops over a walk's steps."""

    specialised: bool
    step_spill_loads: int  # of the consumer group that has most

    def __str__(self) -> str:
        specialised = "yes" if self.specialised else "no"
        return f"{super().__str__()}, specialised {specialised}, spill loads of a step {self.step_spill_loads}"


@dataclass(frozen=True)
class Launch:
    """One recorded launch."""

    kernel: triton.JITFunction
    arguments: tuple
    keywords: dict[str, object]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__.removesuffix("_kernel")

    def compile(self, label: str) -> HopperReport:
        """Compile for sm_90 as the launch itself would: same argument types, constants, alignments and options."""
        backend = make_backend(TARGET)
        bind = create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
        bound, types, options = bind(*self.arguments, **self.keywords)
        options, signature, constants, attributes = self.kernel._pack_args(
            backend, self.keywords, bound, types, options
        )
        source_type = GluonASTSource if self.kernel.is_gluon() else ASTSource
        source = source_type(self.kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=TARGET, options=options.__dict__)
        return _read(compiled, f"{self.name} sm_90 {label}")


def compile_variant(which: str, label: str, variant: Variant, *, deterministic: bool = True) -> HopperReport:
    """Compile the kernel "forward", "query_gradient" or "key_gradient" of one variant."""
    with recorded_launches() as launches:
        _run(variant, which != "forward", deterministic)
    (found,) = (made for made in launches if made.name == which)
    return found.compile(f"{TRITON_DTYPE[variant.dtype]} {label}")


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Launches of the Hopper path are put in the list in place of being made; all else runs."""
    launches: list[Launch] = []

    def record(kernel: triton.JITFunction, *arguments: object, grid: tuple, warmup: bool, **keywords: object) -> None:
        launches.append(Launch(kernel, arguments, keywords))

    with contextlib.ExitStack() as stack:
        for kernel in KERNELS:
            stack.enter_context(mock.patch.object(kernel, "run", partial(record, kernel)))
        stack.enter_context(mock.patch.object(launch, "processors", lambda index: 132))
        yield launches


def _run(variant: Variant, backward: bool, deterministic: bool) -> None:
    heads, kv_heads = 4 * variant.group, 4
    q = torch.zeros(1, variant.query_length, heads, variant.d_k, dtype=variant.dtype)
    k = torch.zeros(1, variant.key_length, kv_heads, variant.d_k, dtype=variant.dtype)
    v = torch.zeros(1, variant.key_length, kv_heads, variant.d_v, dtype=variant.dtype)
    boundaries = [
        torch.tensor([0, 64, length], dtype=torch.int32) if variant.packed else None
        for length in (variant.query_length, variant.key_length)
    ]
    sink = torch.zeros(heads) if variant.sink else None
    ids = None
    if variant.listed:
        tiles = variant.query_length // variant.listed + variant.packed
        ids = torch.zeros(1, tiles, kv_heads, 1, dtype=torch.int32)
    rest = (*boundaries, sink, ids, variant.listed, variant.causal, variant.window, variant.d_k**-0.5)
    if not backward:
        attention.forward(q, k, v, *rest)
        return
    out = torch.zeros(1, variant.query_length, heads, variant.d_v, dtype=variant.dtype)
    lse = torch.zeros(1, heads, variant.query_length)
    attention.backward(out, lse, q, k, v, out, lse, *rest, deterministic)


def _read(compiled: triton.compiler.CompiledKernel, name: str) -> HopperReport:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [TOOLS / "cuobjdump", "-res-usage", "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if usage is None:
        raise RuntimeError(f"resource usage: expected REG and STACK, got {text[:500]!r}")
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?\w+ )?([A-Z0-9.]+)(.*?);", text, re.MULTILINE)
    instructions = [(int(address, 16), operation, operands) for address, operation, operands in lines]

    def count(pattern: str, first: int = 0, last: int = 1 << 60) -> int:
        return sum(
            first <= address <= last and re.match(pattern, operation) is not None
            for address, operation, _ in instructions
        )

    # Backward jumps, shortest first; those that share code with a shorter one are outer loops or retried waits set apart.
    jumps = []
    for address, operation, operands in instructions:
        target = re.search(r"0x([0-9a-f]+)\s*$", operands) if operation.startswith("BRA") else None
        if target is not None and int(target[1], 16) < address:
            jumps.append((int(target[1], 16), address))
    loops: list[tuple[int, int]] = []
    for first, last in sorted(jumps, key=lambda jump: jump[1] - jump[0]):
        apart = all(last < other_first or other_last < first for other_first, other_last in loops)
        if apart and count("[HQ]GMMA", first, last):
            loops.append((first, last))
    # a step has all products, alike in all groups; a retried wait before the last product has fewer
    most = max((count("[HQ]GMMA", *loop) for loop in loops), default=0)
    loops = [loop for loop in loops if count("[HQ]GMMA", *loop) == most]
    if count("[HQ]GMMA") and not loops:
        raise RuntimeError(f"{name}: expected loops with products in its code, found none")
    return HopperReport(
        name, int(usage[1]), int(usage[2]), count("LDL"), count("STL"), compiled.metadata.shared,
        count("[HQ]GMMA"), count("HMMA"), count(r"WARPGROUP\.DEPBAR"), specialised=count("USETMAXREG") > 0,
        step_spill_loads=max((count("LDL", *loop) for loop in loops), default=0),
    )  # fmt: skip
