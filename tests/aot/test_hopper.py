"""The Hopper kernels compile for sm_90 in their tiles: specialised, with products in flight, and with few or no spills."""

from __future__ import annotations

import pytest
import torch
from aot.compiled_hopper import Launch, Variant, compile_variant, recorded_launches

from tilewise.kernels.hopper import plan
from tilewise.kernels.triton.config import SHARED_MEMORY_LIMIT

pytestmark = pytest.mark.aot

EVERYTHING = dict(window=100, packed=True, sink=True, group=4)
VARIANTS = {
    "64 full": Variant(64, 64, causal=False),
    "64 causal": Variant(64, 64),
    "64 everything": Variant(64, 64, **EVERYTHING),
    "64 listed 128": Variant(64, 64, listed=128),
    "128 full": Variant(causal=False),
    "128 causal": Variant(),
    "128 ragged": Variant(query_length=300, key_length=300),
    "128 causal fp16": Variant(dtype=torch.float16),
    "128 window of a chunk": Variant(window=100, query_length=128),
    "128 packed": Variant(packed=True),
    "128 everything": Variant(**EVERYTHING),
    "128 listed 128": Variant(listed=128),
    "128 listed 64": Variant(listed=64, group=4),
    "128 listed 128 everything": Variant(listed=128, **EVERYTHING),
    "192/128 causal": Variant(192, 128),
    "64/128 listed 128": Variant(64, 128, listed=128),
}
# "everything" has the sink, packed sequences and the window in one; where that spills, they are also looked at one by one
FORWARD = [case for case in VARIANTS if case not in ("128 packed", "128 ragged", "128 listed 128")]
QUERY_GRADIENT = [
    "64 causal", "64 listed 128", "128 full", "128 causal", "128 everything", "128 listed 64", "128 listed 128 everything",
]  # fmt: skip
KEY_GRADIENT = [
    "64 causal", "64 listed 128", "128 full", "128 causal", "128 ragged", "128 packed", "128 listed 128", "128 listed 64",
    "128 listed 128 everything", "64/128 listed 128",
]  # fmt: skip
REDUCE = ["64 everything", "128 full", "128 causal", "128 everything"]

# Spill loads of the whole kernel, all consumers together, that a variant may have; the others have none. Measured with the
# pinned compiler, rounded up. A number that falls may be lowered; one that rises wants a look at the kernel first. Those of
# the forward and the query gradient are made once an item: within the loop over steps these two have none.
SPILL_LOADS = {
    # three consumer groups leave 160 registers a thread; a score tile takes 64 of them, out 32
    ("forward", "64 full"): 14,
    ("forward", "64 everything"): 6,
    # dQ takes 64 registers, the two score tiles 32 each
    ("query_gradient", "128 full"): 4,
    ("query_gradient", "128 listed 128 everything"): 10,
    # dK and dV hold 128 registers, the two score tiles 64; what places, statistics and masks need is on top
    ("key_gradient", "128 full"): 16,
    ("key_gradient", "128 causal"): 8,
    ("key_gradient", "128 listed 128"): 12,
    # where tiles of rows reach past a sequence's end, that is tested for each of their numbers: another head's may be NaN
    ("key_gradient", "128 ragged"): 36,
    ("key_gradient", "128 packed"): 64,
    ("key_gradient", "128 listed 64"): 40,
    ("key_gradient", "128 listed 128 everything"): 68,
    # half of dQ's columns (32 registers) as well
    ("reduce", "128 full"): 30,
    ("reduce", "128 causal"): 40,
    ("reduce", "128 everything"): 76,
}


def _check(kind: str, case: str) -> None:
    which = "key_gradient" if kind == "reduce" else kind
    report = compile_variant(which, f"{kind} {case}", VARIANTS[case], deterministic=kind != "reduce")
    print(report)
    assert report.shared <= SHARED_MEMORY_LIMIT[90], str(report)
    assert report.specialised, str(report)
    # a serialised kernel waits for each product: as many waits as products
    assert 2 * report.waits < report.warpgroup_products, str(report)
    if which != "key_gradient":
        assert report.step_spill_loads == 0, str(report)
    assert report.spill_loads <= SPILL_LOADS.get((kind, case), 0), str(report)


@pytest.mark.parametrize("case", FORWARD)
def test_forward_compiles(case: str) -> None:
    _check("forward", case)


@pytest.mark.parametrize("case", QUERY_GRADIENT)
def test_query_gradient_compiles(case: str) -> None:
    _check("query_gradient", case)


@pytest.mark.parametrize("case", KEY_GRADIENT)
def test_key_gradient_compiles(case: str) -> None:
    _check("key_gradient", case)


@pytest.mark.parametrize("case", REDUCE)
def test_key_gradient_with_queries_compiles(case: str) -> None:
    _check("reduce", case)


def test_every_spill_limit_belongs_to_a_variant() -> None:
    compiled = {"forward": FORWARD, "query_gradient": QUERY_GRADIENT, "key_gradient": KEY_GRADIENT, "reduce": REDUCE}
    for kind, case in SPILL_LOADS:
        assert case in compiled[kind], (kind, case)


@pytest.mark.parametrize(
    "tiles, spill_loads",
    # one program sorts all tiles in registers: at 8192 tiles, 1024 threads of 64 registers hold eight 64-bit entries each
    [(200, 0), (plan.LARGEST_SORTED - 2, 100), (plan.LARGEST_SORTED + 1, 0)],
    ids=["sorted", "largest sorted", "unsorted"],
)
def test_packed_plan_compiles(tiles: int, spill_loads: int) -> None:
    boundaries = torch.zeros(2, dtype=torch.int32)
    with recorded_launches() as launches:
        plan.packed_plan(boundaries, boundaries, 128 * tiles, 128 * tiles, 128, True, True, window=100, list_rows=128)
    _check_plan(launches, f"{tiles} tiles", spill_loads)


@pytest.mark.parametrize("blocks, packed", [(16, False), (2000, True)])
def test_list_plan_compiles(blocks: int, packed: bool) -> None:
    ids = torch.zeros(1, 2, 1, blocks, dtype=torch.int32)
    table = torch.zeros(4, plan.PLAN_WIDTH.value, dtype=torch.int32) if packed else None
    with recorded_launches() as launches:
        plan.list_plan(ids, 256, 256, 128, True, window=100, plan=table)
    _check_plan(launches, f"{blocks} blocks {'packed' if packed else ''}", 0)


def _check_plan(launches: list[Launch], label: str, spill_loads: int) -> None:
    (made,) = launches
    report = made.compile(label)
    print(report)
    assert report.shared <= SHARED_MEMORY_LIMIT[90], str(report)
    assert report.spill_loads <= spill_loads, str(report)
