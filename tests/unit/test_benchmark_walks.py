"""Benchmarks of listed and packed calls without a GPU: cases, formulas, the check, a whole run on the CPU, ratios."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest
import torch

import tilewise
from benchmarks import measure, results, run, tables
from benchmarks.case import PASSES, Blocks, Case, Shape
from benchmarks.check import Judge, checked_heads, exact
from benchmarks.masks import hidden
from benchmarks.measure import CheckFailed, Measurement
from benchmarks.peers import Inputs, Ours, extras
from benchmarks.registry import OPERATIONS, Floors
from tilewise.layout import Visibility

FLOORS = Floors(matmul_tflops=700.0, copy_tb_s=4.0)
RUN = results.Run(FLOORS, "a device", "2.11.0", "3.6.0", "0123456789ab", 0, "python -m benchmarks.run x", "run-1")
SHAPE = Shape(2, 512, 4, 2, 16, 24)
LISTED = Case("block_sparse", SHAPE, False, blocks=Blocks(128, 64, 3))
PACKED = Case("packed", Shape(1, 300, 4, 2, 16, 24), True, lengths=(1, 120, 37, 142))
CASES = [
    LISTED,
    dataclasses.replace(LISTED, blocks=Blocks(64, 64, 1)),
    PACKED,
    dataclasses.replace(PACKED, causal=False),
]
IDS = ["listed", "listed 64", "packed", "packed full"]


def every_case() -> list[Case]:
    return [case for operation in OPERATIONS.values() for quick in (True, False) for case in operation.cases(quick, 1)]


class TestCases:
    def test_flops_count_selected_pairs_alone(self):
        inputs = Inputs.random(LISTED, 0, "cpu")
        lists = extras(inputs, LISTED)["selector"].selection.bound_to(Visibility(512, 512))
        pairs = int(lists.to_mask().sum()) * 2  # of every list, for two query heads each
        operation = OPERATIONS["block_sparse"]
        assert operation.flops(LISTED, "forward") == 2 * (16 + 24) * pairs
        assert operation.flops(LISTED, "backward") == 2 * (3 * 16 + 2 * 24) * pairs
        assert LISTED.density == float(lists.density) == 3 / 8

    def test_flops_of_packed_sequences_are_those_of_the_sequences(self):
        packed, dense = OPERATIONS["packed"], OPERATIONS["dense"]
        for which in PASSES:
            alone = [dense.flops(Case("dense", Shape(1, n, 4, 2, 16, 24), True), which) for n in PACKED.lengths]
            assert packed.flops(PACKED, which) == sum(alone)

    def test_bytes_count_the_lists(self):
        dense = dataclasses.replace(LISTED, blocks=None, density=1.0)
        for which in PASSES:
            extra = OPERATIONS["block_sparse"].bytes(LISTED, which) - OPERATIONS["dense"].bytes(dense, which)
            assert extra == 4 * 2 * 2 * 4 * 3  # bytes, B, H_kv, tiles, blocks

    def test_block_sparse(self):
        cases = OPERATIONS["block_sparse"].cases(False, 1)
        assert {(c.shape.d_k, c.blocks.block_q, round(c.density, 2)) for c in cases if c.blocks} == {
            (d, rows, density) for d, rows in ((128, 128), (128, 64), (64, 128)) for density in (0.05, 0.1, 0.2, 0.4)
        }
        # the dense call of the same shape is measured in the same run
        assert {c.shape for c in cases if c.blocks} == {c.shape for c in cases if c.op == "dense"}

    def test_packed(self):
        packed, equal, batch = OPERATIONS["packed"].cases(False, 1)
        assert sum(packed.lengths) == 32768 and len(packed.lengths) == 16
        assert 128 <= min(packed.lengths) < 512 and 4000 < max(packed.lengths) <= 5500
        assert equal.op == batch.op == "dense" and (batch.shape.B, batch.shape.T) == (16, 2048)
        work = [OPERATIONS[c.op].flops(c, "forward") for c in (packed, equal)]
        assert work[1] == pytest.approx(work[0], rel=0.02)
        with pytest.raises(ValueError, match="batch"):
            OPERATIONS["packed"].cases(False, 2)

    @pytest.mark.parametrize("case", every_case(), ids=str)
    def test_small_cases_are_of_the_same_kind(self, case):
        small = case.small()
        assert small.shape.T <= 1024 and (small.blocks is None) == (case.blocks is None)
        assert dataclasses.replace(small.shape, T=case.shape.T) == case.shape
        if case.lengths:
            assert len(small.lengths) == len(case.lengths)
        assert case.shape.H_kv - 1 in checked_heads(case)

    def test_what_does_not_fit_is_refused(self):
        for wrong in (Blocks(128, 64, 9), Blocks(128, 64, 0), Blocks(100, 64, 1)):
            with pytest.raises(ValueError, match="blocks"):
                dataclasses.replace(LISTED, blocks=wrong)
        with pytest.raises(ValueError, match="blocks"):
            dataclasses.replace(LISTED, causal=True)
        with pytest.raises(ValueError, match="lengths"):
            dataclasses.replace(PACKED, lengths=(1, 2))


class TestCheck:
    @pytest.mark.parametrize("case", CASES, ids=IDS)
    def test_hidden_is_what_the_library_masks(self, case):
        inputs = Inputs.random(case, 0, "cpu")
        given = extras(inputs, case)
        boundaries = given.get("cu_seqlens")
        length = case.shape.T
        visibility = Visibility(length, length, case.causal, None, boundaries, boundaries)
        for head in range(case.shape.H_kv):
            mask = visibility.to_mask("cpu")
            if "selector" in given:
                mask = given["selector"].selection.bound_to(visibility).to_mask()[-1, head]
            found = hidden(case, inputs.ids, head, slice(100, 300), torch.device("cpu"))
            assert torch.equal(~found, mask[100:300])

    @pytest.mark.parametrize("case", CASES, ids=IDS)
    def test_exact_agrees_with_the_reference_in_float64(self, case):
        inputs = Inputs.random(dataclasses.replace(case, dtype="fp32"), 0, "cpu")
        doubles = dataclasses.replace(inputs, **{n: getattr(inputs, n).double() for n in ("q", "k", "v", "dout")})
        reference = Ours("reference", doubles, case)
        results_of = reference.results()
        for head in range(2):
            found = exact(inputs, case, head)
            for name, heads in (("out", slice(2 * head, 2 * head + 2)), ("dq", slice(2 * head, 2 * head + 2))):
                torch.testing.assert_close(found[name], results_of[name][-1, :, heads], rtol=1e-9, atol=1e-10)
            for name in ("dk", "dv"):
                torch.testing.assert_close(found[name][:, 0], results_of[name][-1, :, head], rtol=1e-9, atol=1e-10)
            torch.testing.assert_close(found["lse"], reference.lse()[-1, :, 2 * head : 2 * head + 2])

    @pytest.mark.parametrize("case", CASES[:3], ids=IDS[:3])
    def test_the_tiled_cpu_path_passes_and_other_lists_fail(self, case):
        inputs = Inputs.random(case, 0, "cpu")
        judge = Judge(inputs, case, [0, 1])
        verdict, same = measure.assess(Ours("eager", inputs, case), judge)
        assert verdict.passed, str(verdict)
        assert all(same.values())
        if case.blocks is not None:
            wrong = dataclasses.replace(
                inputs, ids=inputs.ids.flip(2).contiguous()
            )  # each KV head reads another's list
        else:
            wrong, case = inputs, dataclasses.replace(case, lengths=(120, 1, 37, 142))
        assert not measure.assess(Ours("eager", wrong, case), judge)[0].passed


def on_the_cpu(call, **options):
    """`triton.testing.do_bench` without a GPU."""
    start = time.perf_counter()
    call()
    return [1e3 * (time.perf_counter() - start)]


@pytest.fixture
def cpu(monkeypatch):
    """Time on the CPU; hopper's place is taken by the tiled path, reduce-add's by the same."""
    attend = tilewise.attend
    stand_ins = {"hopper": "eager", "triton": "reference"}

    def standing_in(*tensors, impl, **arguments):
        return attend(*tensors, impl=stand_ins.get(impl, impl), **arguments)

    monkeypatch.setattr(tilewise, "attend", standing_in)
    monkeypatch.setattr("triton.testing.do_bench", on_the_cpu)
    monkeypatch.setattr(measure, "peak_mib", lambda call: 1.0)
    return lambda operation, case, seed: measure.measure_case(operation, case, seed, device="cpu")


class TestRun:
    def test_lines_of_every_operation(self, cpu, tmp_path, capsys):
        out = tmp_path / "block_sparse.jsonl"
        dense = Case("dense", SHAPE, False, implementations=("hopper", "hopper-reduce"))
        assert run.run_cases([dense, LISTED, PACKED], RUN, out, cpu) == 0
        lines = results.read(out)
        found = [(e["op"], e["impl"], e["pass"], e["deterministic"]) for e in lines]
        assert found == [
            ("dense", "hopper", "forward", True),
            ("dense", "hopper", "backward", True),
            ("dense", "hopper-reduce", "backward", False),
            ("block_sparse", "hopper", "forward", True),
            ("block_sparse", "hopper", "backward", True),
            ("packed", "hopper", "forward", True),
            ("packed", "triton", "forward", True),
            ("packed", "hopper", "backward", True),
            ("packed", "hopper-reduce", "backward", False),
            ("packed", "triton", "backward", True),
        ]
        assert all(tuple(e) == results.KEYS for e in lines)
        assert lines[3]["shape"] == dataclasses.asdict(SHAPE) | {"block_q": 128, "block_k": 64}
        assert lines[3]["density"] == 0.375 and "density" in lines[3]["flop_formula"]
        assert lines[5]["shape"]["lengths"] == [1, 120, 37, 142]
        assert json.loads(json.dumps(lines)) == lines
        printed = capsys.readouterr().out
        assert "of dense 2 x 512, H 4/2" in printed and "density 0.375 of 128 x 64 blocks" in printed

    def test_a_form_that_does_not_exist_is_left_out_with_its_reason(self, cpu, monkeypatch, capsys):
        attend = tilewise.attend

        def without_reduce(*tensors, deterministic=True, **arguments):
            if not deterministic:
                raise NotImplementedError("deterministic: expected True, got False")
            return attend(*tensors, **arguments)

        monkeypatch.setattr(tilewise, "attend", without_reduce)
        found = cpu(OPERATIONS["packed"], PACKED, 0)
        assert {m.impl for m in found} == {"hopper", "triton"}
        assert "hopper-reduce: does not run here: deterministic" in capsys.readouterr().out

    def test_nothing_of_ours_is_a_failure(self, cpu, monkeypatch):
        def nothing(*tensors, **arguments):
            raise NotImplementedError("impl: not here")

        monkeypatch.setattr(tilewise, "attend", nothing)
        with pytest.raises(CheckFailed, match="hopper"):
            cpu(OPERATIONS["block_sparse"], LISTED, 0)

    def test_wrong_lists_write_nothing(self, cpu, monkeypatch, tmp_path):
        attend = tilewise.attend
        monkeypatch.setattr(tilewise, "attend", lambda *tensors, selector, **rest: attend(*tensors, **rest))
        assert run.run_cases([LISTED], RUN, tmp_path / "x.jsonl", cpu) == 1
        assert not (tmp_path / "x.jsonl").exists()

    def test_chosen_alone(self, cpu):
        found = measure.measure_case(OPERATIONS["packed"], PACKED, 0, ("triton",), device="cpu")
        assert {m.impl for m in found} == {"triton"}
        assert measure.measure_case(OPERATIONS["block_sparse"], LISTED, 0, ("cudnn",), device="cpu") == []

    def test_turns(self, monkeypatch):
        order = []
        monkeypatch.setattr("triton.testing.do_bench", lambda call, **options: [call()])
        calls = {name: lambda name=name: order.append(name) or float(len(order)) for name in "ab"}
        assert measure.interleaved(calls) == {"a": [1.0, 3.0, 5.0], "b": [2.0, 4.0, 6.0]}
        assert order == list("ababab")

    def test_arguments(self, capsys):
        for arguments in (["dense", "--only", "nobody"], ["packed", "--batch", "2"], ["dense", "--batch", "0"]):
            with pytest.raises(SystemExit):
                run.main(arguments)
            assert "expected" in capsys.readouterr().err


class TestRatios:
    def lines(self) -> list[dict]:
        cases = [(c, ms) for c, ms in zip(OPERATIONS["packed"].cases(False, 1), (4.0, 3.0, 2.0), strict=True)]
        quantiles = {c: {"p20": ms, "p50": ms, "p80": ms} for c, ms in cases}
        found = [Measurement("hopper", "forward", quantiles[c], 1.0, 1e-3, True) for c, _ in cases]
        pairs = zip(cases, found, strict=True)
        lines = [results.line(OPERATIONS[c.op], c, m, RUN) for (c, _), m in pairs]
        other = dataclasses.replace(RUN, run="run-0")
        return [results.line(OPERATIONS["dense"], cases[1][0], found[2], other), *lines]

    def test_dense_lines_of_the_same_run_alone(self):
        lines = self.lines()
        found = tables.dense_ratios(lines)
        assert [(ours["op"], other["shape"]["T"]) for ours, other, _ in found] == [("packed", 9472), ("packed", 2048)]
        assert found[0][2] == pytest.approx(3 / 4, rel=0.02)
        assert tables.nearest_dense(lines, lines[1]) == found[0][2]
        assert tables.nearest_dense(lines[1:2], lines[1]) is None

    def test_readme_table(self):
        table = tables.readme_table(self.lines(), "packed", "hopper")
        assert "| pass | D | mask | T | ms | TFLOP/s | share | of dense | MiB |" in table
        assert "| forward | 128 | causal, 16 sequences | 32,768 | 4.000 | 92 | 13% | 0.75 | 1 |" in table
