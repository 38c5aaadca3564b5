"""Benchmarks without a GPU: formulas, the form of the lines, the refusal to write, the correctness check, the table."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from benchmarks import measure, results, run, tables
from benchmarks.check import Judge, eager, exact, judge
from benchmarks.measure import CheckFailed, Measurement
from benchmarks.peers import PEERS, Inputs, Ours
from benchmarks.registry import OPERATIONS, PASSES, Case, Floors, Shape

DENSE = OPERATIONS["dense"]
FLOORS = Floors(matmul_tflops=700.0, copy_tb_s=4.0)
RUN = results.Run(FLOORS, "a device", "2.11.0", "3.6.0", "0123456789ab", 0, "python -m benchmarks.run dense", "run-1")


def case(
    causal: bool = False, T: int = 16384, D: int = 128, H_kv: int = 16, H_q: int = 16, d_v: int | None = None
) -> Case:
    return Case("dense", Shape(1, T, H_q, H_kv, D, d_v or D), causal)


def measurement(impl: str, which: str, p50: float) -> Measurement:
    return Measurement(impl, which, {"p20": p50 * 0.9, "p50": p50, "p80": p50 * 1.1}, 64.0, 1e-3, True)


def fake(operation, this_case, seed):
    """Ours takes 2 ms, cuDNN 1 ms, FlexAttention 3 ms."""
    times = {"hopper": 2.0, "cudnn": 1.0, "flex": 3.0}
    return [measurement(impl, which, ms) for which in PASSES for impl, ms in times.items()]


def failing(operation, this_case, seed):
    raise CheckFailed("triton: dq 3.0 of the limit")


class TestFormulas:
    def test_square_heads(self):
        # 4 B H T^2 D, 2.5 times that backward, half when causal
        full = 4 * 16 * 16384**2 * 128
        assert DENSE.flops(case(), "forward") == full
        assert DENSE.flops(case(), "backward") == 2.5 * full
        assert DENSE.flops(case(causal=True), "forward") == full / 2

    def test_different_head_dims(self):
        assert DENSE.flops(case(T=8, D=192, d_v=128), "forward") == 2 * 16 * 64 * (192 + 128)
        assert DENSE.flops(case(T=8, D=192, d_v=128), "backward") == 2 * 16 * 64 * (3 * 192 + 2 * 128)

    def test_bytes_count_every_tensor_once(self):
        grouped = case(T=10, D=4, H_kv=2, d_v=6)
        q, k, v, out, lse = 10 * 16 * 4, 10 * 2 * 4, 10 * 2 * 6, 10 * 16 * 6, 10 * 16
        assert DENSE.bytes(grouped, "forward") == 2 * (q + k + v + out) + 4 * lse
        assert DENSE.bytes(grouped, "backward") == 2 * (2 * q + 2 * k + 2 * v + 2 * out) + 4 * lse

    def test_floor_is_the_slower_of_products_and_bytes(self):
        long, short = case(), case(T=16, D=128)
        assert DENSE.floor_ms(long, "forward", FLOORS) == pytest.approx(DENSE.flops(long, "forward") / 700e12 * 1e3)
        assert DENSE.floor_ms(short, "forward", FLOORS) == pytest.approx(DENSE.bytes(short, "forward") / 4e12 * 1e3)

    def test_cases(self):
        found = DENSE.cases(False, 1)
        sizes = [(d, b, t, 16) for d in (64, 128) for b, t in ((1, 16384), (4, 4096))] + [(128, 1, 32768, 8)]
        assert {(c.shape.d_k, c.shape.B, c.shape.T, c.shape.H_kv, c.causal) for c in found} == {
            (*size, causal) for size in sizes for causal in (True, False)
        }
        assert {c.shape.T for c in DENSE.cases(True, 4)} == {16384}
        assert {c.shape.B for c in DENSE.cases(True, 4)} == {4}
        assert set(DENSE.peers) == set(PEERS)
        # peers that compile for long, or run for long, stay away from the longest calls
        assert {c.shape.T for c in found if "flex" in DENSE.names(c) or "sdpa-flash" in DENSE.names(c)} == {4096, 16384}
        assert all("cudnn" in DENSE.names(c) for c in found)


class TestLines:
    def test_form(self):
        line = results.line(DENSE, case(causal=True), measurement("triton", "backward", 7.0), RUN)
        assert tuple(line) == results.KEYS
        assert line["shape"] == {"B": 1, "T": 16384, "H_q": 16, "H_kv": 16, "d_k": 128, "d_v": 128}
        assert line["ms"] == {"p20": 6.3, "p50": 7.0, "p80": 7.7}
        assert line["tflops"] == pytest.approx(2.5 * 2 * 16 * 16384**2 * 128 / 7e-3 / 1e12, rel=1e-3)
        assert json.loads(json.dumps(line)) == line

    def test_append_and_read(self, tmp_path):
        path = tmp_path / "deeper" / "dense.jsonl"
        assert results.read(path) == []
        lines = [results.line(DENSE, case(), m, RUN) for m in fake(DENSE, case(), 0)]
        results.append(path, lines[:2])
        results.append(path, lines[2:])
        assert results.read(path) == lines
        with pytest.raises(ValueError):
            results.append(path, [lines[0] | {"error": math.nan}])

    def test_read_refuses_a_line_without_its_keys(self, tmp_path):
        path = tmp_path / "dense.jsonl"
        path.write_text('{"op": "dense"}\n')
        with pytest.raises(ValueError, match="line 1"):
            results.read(path)

    def test_commit(self, tmp_path, monkeypatch):
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
        monkeypatch.setenv("TILEWISE_COMMIT", "abc-from-outside")
        assert results.commit(tmp_path) == "abc-from-outside"
        monkeypatch.delenv("TILEWISE_COMMIT")
        assert results.commit(tmp_path) == "unknown"


class TestRefusal:
    def test_writes_what_passed(self, tmp_path, capsys):
        out = tmp_path / "dense.jsonl"
        assert run.run_cases([case(), case(causal=True)], RUN, out, fake) == 0
        assert len(results.read(out)) == 12
        printed = capsys.readouterr().out
        assert "0.50x" in printed and "1.50x" in printed

    def test_writes_nothing_for_a_shape_that_failed(self, tmp_path, capsys):
        out = tmp_path / "dense.jsonl"
        assert run.run_cases([case()], RUN, out, failing) == 1
        assert not out.exists()
        assert "NOT WRITTEN" in capsys.readouterr().out

    def test_unsound_results_of_ours_are_refused_and_peers_reported(self):
        good, bad = measure.Verdict({"out": 1e-3}, {"out": 0.9}), measure.Verdict({"out": 1.0}, {"out": 1.1})
        nan = measure.Verdict({"out": math.nan}, {"out": math.nan})
        same, varying = {"forward": True, "backward": True}, {"forward": True, "backward": False}
        measure.refuse_unless_sound("triton", good, same, required=True)
        for verdict, repeatable in ((bad, same), (nan, same), (good, varying)):
            with pytest.raises(CheckFailed):
                measure.refuse_unless_sound("triton", verdict, repeatable, required=True)
            measure.refuse_unless_sound("flex", verdict, repeatable, required=False)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="checks the answer where there is no GPU")
    def test_needs_a_gpu(self, capsys):
        assert run.main(["dense", "--quick"]) == 2
        assert "CUDA" in capsys.readouterr().err


SMALL = [case(causal, T=300, D=16, H_q=4, H_kv=2, d_v=24) for causal in (False, True)]


class TestCheck:
    @pytest.mark.parametrize("small", SMALL, ids=["full", "causal"])
    def test_exact_agrees_with_autograd_in_float64(self, small):
        inputs = Inputs.random(dataclasses.replace(small, dtype="fp32"), 0, "cpu")
        doubles = Inputs(*(x.double() for x in (inputs.q, inputs.k, inputs.v, inputs.dout)))
        for head in range(2):
            found, other = exact(inputs, small, head), eager(doubles, small, head)
            for name in ("out", "dq", "dk", "dv"):
                torch.testing.assert_close(found[name], other[name], rtol=1e-9, atol=1e-10)
            torch.testing.assert_close(found["lse"], other["lse"].double(), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("small", SMALL, ids=["full", "causal"])
    def test_the_tiled_cpu_path_passes(self, small):
        inputs = Inputs.random(small, 0, "cpu")
        verdict, same = measure.assess(Ours("eager", inputs, small), Judge(inputs, small))
        assert verdict.passed, str(verdict)
        assert set(verdict.errors) == {"out", "lse", "dq", "dk", "dv"}
        assert all(same.values())

    @pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
    @pytest.mark.parametrize("harm", ["one row", "two percent", "nan"])
    def test_harmed_results_fail(self, name, harm):
        small = SMALL[1]
        inputs = Inputs.random(small, 0, "cpu")
        ours = Ours("eager", inputs, small)
        found = ours.results() | {"lse": ours.lse()}
        harmed = found[name].clone()
        if harm == "two percent":
            harmed *= 1.02
        else:
            harmed[:, 290] = math.nan if harm == "nan" else 0.0
        found[name] = harmed
        lse = found.pop("lse")
        assert not Judge(inputs, small)(found, lse).passed

    def test_judge_prefers_no_direction(self):
        truth = {"out": torch.ones(8, 1, 4, dtype=torch.float64)}
        peer = {"out": truth["out"] + 0.01}
        limit = 0.02 + torch.finfo(torch.bfloat16).eps / 2
        for sign in (1, -1):
            share = judge({"out": truth["out"] + sign * 0.01}, truth, peer, torch.bfloat16).allowed["out"]
            assert share == pytest.approx(0.01 / limit, rel=1e-6)


class TestTables:
    def lines(self, run_id: str, ours: float, peer: float) -> list[dict]:
        this_run = dataclasses.replace(RUN, run=run_id)
        pairs = (("triton", ours), ("cudnn", peer))
        return [results.line(DENSE, case(), measurement(impl, "forward", ms), this_run) for impl, ms in pairs]

    def test_ratios_come_from_the_latest_run_alone(self):
        entries = self.lines("run-1", 4.0, 1.0) + self.lines("run-2", 2.0, 3.0)
        [(ours, ratios)] = tables.comparisons(entries, "triton")
        assert ours["run"] == "run-2" and ratios == {"cudnn": 1.5}

    def test_readme_table(self):
        table = tables.readme_table(self.lines("run-1", 4.0, 1.0), "dense", "triton")
        assert "| forward | 128 | full | 16,384 | 4.000 | 550 | 79% | 0.25 | 64 |" in table
        assert "x cudnn" in table and "x flex" not in table
        assert tables.readme_table([], "dense", "triton") == ""

    def test_quantiles(self):
        assert measure.quantiles([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == pytest.approx({"p20": 2.0, "p50": 3.5, "p80": 5.0})
