"""Whether results of a timed shape are as exact as they must be: out, LSE, dq, dk, dv against float64.

Some heads are computed again in float64 and by plain PyTorch in the input dtype ("eager"). In every group of 256 rows of every
such head the error, a root mean square, must stay below twice eager's error plus one rounding of the group's own size. Groups
are short because the first rows of a causal call are far larger than the rest and would hide it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.case import Case
from benchmarks.masks import hidden
from benchmarks.peers import Inputs

ROWS_AT_ONCE = 1024
GROUP = 256
LARGEST_CHECK = 2**31  # scores of a KV head and its query heads
NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class Verdict:
    """What the check of one candidate found.

    Attributes:
        errors: largest relative error (root mean square over a group, over that of the exact values) by tensor.
        allowed: largest of error over limit by tensor; above 1 is a failure.
    """

    errors: dict[str, float]
    allowed: dict[str, float]

    @property
    def passed(self) -> bool:
        return all(share <= 1.0 for share in self.allowed.values())  # NaN compares false: a failure

    def error(self, which: str) -> float:
        """The figure that results carry: of out for the forward, the worst of dq, dk, dv for the backward."""
        return self.errors["out"] if which == "forward" else max(self.errors[name] for name in ("dq", "dk", "dv"))

    def __str__(self) -> str:
        parts = (f"{n} {self.errors[n]:.1e} ({self.allowed[n]:.2f} of the limit)" for n in NAMES if n in self.errors)
        return ", ".join(parts)


def checked_heads(case: Case) -> list[int]:
    """First and last KV head; of long calls, whose check would take longer than all the timing, the last alone."""
    s = case.shape
    last = s.H_kv - 1
    return sorted({0, last}) if s.H_q // s.H_kv * s.T**2 <= LARGEST_CHECK else [last]


def exact(inputs: Inputs, case: Case, kv_head: int) -> dict[str, Tensor]:
    """Out, LSE and gradients of one KV head and its query heads, last batch entry, in float64: `[T, G, D]`, lse `[T, G]`.

    Rows are taken in turn, so memory is O(rows at once x T).
    """
    q, k, v, dout = (x.double() for x in head_slices(inputs, case, kv_head))
    length, scale = case.shape.T, case.shape.d_k**-0.5
    found = {"out": torch.empty_like(dout), "lse": q.new_empty(q.shape[:2]), "dq": torch.empty_like(q)}
    found |= {"dk": torch.zeros_like(k), "dv": torch.zeros_like(v)}
    for start in range(0, length, ROWS_AT_ONCE):
        rows = slice(start, min(start + ROWS_AT_ONCE, length))
        mask = hidden(case, inputs.ids, kv_head, rows, q.device)
        for g in range(q.shape[1]):
            scores = q[rows, g] @ k.T * scale
            if mask is not None:
                scores.masked_fill_(mask, -math.inf)
            lse = torch.logsumexp(scores, -1)
            weights = (scores - lse[:, None]).exp_()
            out = weights @ v
            delta = (dout[rows, g] * out).sum(-1, keepdim=True)
            dscores = weights * (dout[rows, g] @ v.T - delta)
            found["out"][rows, g], found["lse"][rows, g] = out, lse
            found["dq"][rows, g] = dscores @ k * scale
            found["dk"] += dscores.T @ q[rows, g] * scale
            found["dv"] += weights.T @ dout[rows, g]
    return found | {name: found[name][:, None] for name in ("dk", "dv")}


def eager(inputs: Inputs, case: Case, kv_head: int) -> dict[str, Tensor]:
    """The same by plain PyTorch operations in the input dtype: product, softmax, product, and autograd."""
    slices = head_slices(inputs, case, kv_head)
    q, k, v = (x.detach().clone().requires_grad_() for x in slices[:3])
    mask = hidden(case, inputs.ids, kv_head, slice(0, case.shape.T), q.device)
    found: dict[str, list[Tensor]] = {"out": [], "lse": []}
    gradients = [torch.zeros_like(x) for x in (q, k, v)]
    for g in range(q.shape[1]):
        scores = q[:, g] @ k.T * case.shape.d_k**-0.5
        if mask is not None:
            scores = scores.masked_fill(mask, -math.inf)
        out = torch.softmax(scores, -1) @ v
        for total, gradient in zip(gradients, torch.autograd.grad(out, (q, k, v), slices[3][:, g]), strict=True):
            total += gradient
        found["out"].append(out.detach())
        found["lse"].append(log_sum_exp(scores.detach()))
        del scores, out
    stacked = {name: torch.stack(parts, 1) for name, parts in found.items()}
    return stacked | {"dq": gradients[0], "dk": gradients[1][:, None], "dv": gradients[2][:, None]}


def log_sum_exp(scores: Tensor) -> Tensor:
    """fp32 LSE of each row of low-precision scores, a few rows at a time."""
    return torch.cat([torch.logsumexp(rows.float(), -1) for rows in scores.split(ROWS_AT_ONCE)])


def head_slices(inputs: Inputs, case: Case, kv_head: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q and dout `[T, G, D]`, k and v `[T, D]` of one KV head, last batch entry."""
    heads = query_heads(case, kv_head)
    return inputs.q[-1, :, heads], inputs.k[-1, :, kv_head], inputs.v[-1, :, kv_head], inputs.dout[-1, :, heads]


def query_heads(case: Case, kv_head: int) -> slice:
    group = case.shape.H_q // case.shape.H_kv
    return slice(kv_head * group, (kv_head + 1) * group)


def judge(found: dict[str, Tensor], truth: dict[str, Tensor], peer: dict[str, Tensor], dtype: torch.dtype) -> Verdict:
    """Compare results with the truth and with eager's; tensors `[T, heads, ...]`."""
    errors, allowed = {}, {}
    for name, value in found.items():
        rounding = torch.finfo(torch.float32 if name == "lse" else dtype).eps / 2
        size = group_size(truth[name])
        error = group_size(value.double() - truth[name])
        limit = 2 * group_size(peer[name].double() - truth[name]) + rounding * size
        errors[name] = float((error / size).max())
        allowed[name] = float((error / limit).max())
    return Verdict(errors, allowed)


def group_size(x: Tensor) -> Tensor:
    """Root mean square over groups of rows: `[groups, heads]`."""
    flat = x.reshape(x.shape[0], x.shape[1], -1)
    groups = flat.split(GROUP)
    return torch.stack([part.square().mean((0, 2)).sqrt() for part in groups])


class Judge:
    """The truth and eager's results of the checked heads of one case, to judge every candidate with.

    Args:
        heads: KV heads to check; None: `checked_heads`.
    """

    def __init__(self, inputs: Inputs, case: Case, heads: list[int] | None = None):
        self._case = case
        self._dtype = inputs.q.dtype
        self._heads = checked_heads(case) if heads is None else heads
        self._truth = [exact(inputs, case, head) for head in self._heads]
        self._peer = [eager(inputs, case, head) for head in self._heads]

    def __call__(self, results: dict[str, Tensor], lse: Tensor | None) -> Verdict:
        """Judge `[B, T, H, D]` results, and `[B, T, H]` LSE where there is one; the worst over the checked heads."""
        verdicts = []
        for head, truth, peer in zip(self._heads, self._truth, self._peer, strict=True):
            queries = query_heads(self._case, head)
            found = {name: results[name][-1, :, queries] for name in ("out", "dq")}
            found |= {name: results[name][-1, :, head : head + 1] for name in ("dk", "dv")}
            if lse is not None:
                found["lse"] = lse[-1, :, queries]
            verdicts.append(judge(found, truth, peer, self._dtype))
        return Verdict(
            *({n: worst(getattr(v, kind)[n] for v in verdicts) for n in found} for kind in ("errors", "allowed"))
        )


def worst(values) -> float:
    """The largest; NaN if any is NaN."""
    values = list(values)
    return math.nan if any(math.isnan(value) for value in values) else max(values)
