"""Judges a kernel: its error against float64 beside the error of PyTorch's own eager path in the same dtype.

The rule, for out, LSE and every gradient: error <= 2 x eager's error + one rounding of the dtype (tests/tolerances.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tolerances import kernel_error_limit
from torch import Tensor

from tilewise.layout import Visibility


@dataclass(frozen=True)
class Case:
    """One dense call; `layout` is how the inputs lie in memory: "dense", "transposed" or "sliced"."""

    name: str
    batch: int
    query_length: int
    key_length: int
    query_heads: int
    kv_heads: int
    d_k: int
    d_v: int
    causal: bool = False
    window: int | None = None
    cu_seqlens_q: tuple[int, ...] | None = None
    cu_seqlens_k: tuple[int, ...] | None = None
    sink: bool = False
    scale: float | None = None
    layout: str = "dense"
    cancels: bool = False  # dq and dk are small differences of large terms: rounding is measured against the terms

    def visibility(self, device: str) -> Visibility:
        def boundaries(values: tuple[int, ...] | None) -> Tensor | None:
            return None if values is None else torch.tensor(values, dtype=torch.int32, device=device)

        return Visibility(
            self.query_length, self.key_length, self.causal, self.window,
            boundaries(self.cu_seqlens_q), boundaries(self.cu_seqlens_k),
        )  # fmt: skip

    def inputs(self, dtype: torch.dtype, device: str, seed: int = 0) -> dict[str, Tensor]:
        """Fresh random q, k, v (leaves), sink (leaf or absent), dout and dlse."""
        generator = torch.Generator(device="cpu").manual_seed(seed)

        def random(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.randn(*shape, generator=generator).to(kind).to(device)

        def laid_out(*shape: int) -> Tensor:
            batch, length, heads, dim = shape
            if self.layout == "transposed":
                return random(batch, heads, length, dim).transpose(1, 2)
            if self.layout == "sliced":
                return random(batch, length, heads, 2 * dim + 3)[..., 1 : 1 + 2 * dim : 2]
            return random(*shape)

        q = laid_out(self.batch, self.query_length, self.query_heads, self.d_k)
        k = laid_out(self.batch, self.key_length, self.kv_heads, self.d_k)
        v = laid_out(self.batch, self.key_length, self.kv_heads, self.d_v)
        tensors = {"q": q, "k": k, "v": v}
        if self.sink:
            tensors["sink"] = random(self.query_heads, kind=torch.float32)
        for tensor in tensors.values():
            tensor.requires_grad_()
        dout = laid_out(self.batch, self.query_length, self.query_heads, self.d_v)
        dlse = random(self.batch, self.query_length, self.query_heads, kind=torch.float32)
        return tensors | {"dout": dout, "dlse": dlse}


def eager_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """PyTorch's eager path in the dtype of q: scores, softmax, product, each rounded to that dtype. Dead rows (0, -inf)."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * scale
    live = mask.any(-1)
    scores = scores.masked_fill(~(mask | ~live[:, None]), float("-inf"))
    lse = torch.where(live, torch.logsumexp(scores, -1), float("-inf"))
    probability = torch.where(live[:, None], torch.softmax(scores, -1), 0.0).to(q.dtype)
    out = torch.einsum("bhts,bshd->bthd", probability, v)
    lse = lse.transpose(1, 2)
    if sink is not None:
        live_lse = torch.where(live[:, None], lse, 0.0)
        out = out * torch.where(live[:, None], torch.sigmoid(live_lse - sink.to(q.dtype)), 0.0)[..., None].to(q.dtype)
    return out, lse


def gradients(out: Tensor, lse: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Results and gradients by name; the gradient through the LSE of dead rows (-inf) is left out."""
    leaves = {name: tensors[name] for name in ("q", "k", "v", "sink") if name in tensors}
    live = torch.isfinite(lse)
    loss = (out.double() * tensors["dout"].double()).sum()
    loss = loss + (torch.where(live, lse, 0.0).double() * tensors["dlse"].double()).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    results = {"out": out.detach(), "lse": lse.detach()}
    return results | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def judge(case: Case, dtype: torch.dtype, device: str, attention, seed: int = 0) -> None:
    """Run `attention(q, k, v, visibility=, scale=, sink=) -> (out, lse)` on one case and compare; prints both errors."""
    tensors = case.inputs(dtype, device, seed)
    visibility = case.visibility(device)
    scale = case.d_k**-0.5 if case.scale is None else case.scale
    mask = visibility.to_mask(device)
    arguments = (tensors["q"], tensors["k"], tensors["v"])
    out, lse = attention(*arguments, visibility=visibility, scale=scale, sink=tensors.get("sink"))
    ours = gradients(out, lse, tensors)
    exact_tensors = {name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()}
    exact = gradients(
        *eager_attention(*(exact_tensors[n] for n in "qkv"), mask, scale, exact_tensors.get("sink")), exact_tensors
    )
    eager = gradients(*eager_attention(*arguments, mask, scale, tensors.get("sink")), tensors)
    live = torch.isfinite(exact["lse"])
    sizes = term_sizes(case, exact_tensors, exact, mask, scale)
    failures = []
    for name, truth in exact.items():
        mine, theirs = ours[name].double(), eager[name].double()
        if name == "lse":
            assert torch.equal(torch.isfinite(mine), live), "lse: dead rows differ"
            mine, theirs, truth = mine[live], theirs[live], truth[live]
        elif name in ("out", "dq"):
            assert not mine[~live].any(), f"{name}: a dead row is not 0"
        error, peer_error = relative_error(mine, truth), relative_error(theirs, truth)
        amplification = float(sizes[name] / truth.norm().clamp(min=1e-30)) if name in sizes else 1.0
        limit = kernel_error_limit(peer_error, torch.float32 if name in ("lse", "dsink") else dtype, amplification)
        print(
            f"{case.name:>24} {str(dtype)[6:]:>8} {name:>5}: error {error:.2e}, eager {peer_error:.2e}, limit {limit:.2e}"
        )
        if not error <= limit:
            failures.append(f"{name}: error {error:.2e} over the limit {limit:.2e} (eager {peer_error:.2e})")
    assert not failures, f"{case.name} {dtype}: " + "; ".join(failures)


def term_sizes(
    case: Case, tensors: dict[str, Tensor], exact: dict[str, Tensor], mask: Tensor, scale: float
) -> dict[str, Tensor]:
    """2-norms of what is summed up, signs dropped, for results that are sums of terms that cancel. All in float64."""
    sizes = {}
    dout = tensors["dout"].detach()
    if case.cancels:
        group = case.query_heads // case.kv_heads
        key, value = (tensors[n].detach().repeat_interleave(group, 2) for n in "kv")
        query = tensors["q"].detach()
        scores = (torch.einsum("bthd,bshd->bhts", query, key) * scale).masked_fill(~mask, float("-inf"))
        weights = torch.exp(scores - exact["lse"].transpose(1, 2)[..., None]).nan_to_num(0.0)
        terms = weights * torch.einsum("bthd,bshd->bhts", dout.abs(), value.abs()) * abs(scale)
        sizes["dq"] = torch.einsum("bhts,bshd->bthd", terms, key.abs()).norm()
        sizes["dk"] = torch.einsum("bhts,bthd->bshd", terms, query.abs()).norm()
    if case.sink:
        sizes["dsink"] = (dout * exact["out"]).sum(-1).abs().sum((0, 1)).norm()
    return sizes


def relative_error(value: Tensor, truth: Tensor) -> float:
    """|value - truth| / |truth| in the 2-norm; absolute where the truth is 0; inf if anything is not finite."""
    if value.numel() == 0:
        return 0.0
    if not torch.isfinite(value).all():
        return float("inf")
    norm = truth.norm()
    return float((value - truth).norm() / norm) if norm > 0 else float((value - truth).norm())
