"""Who is measured: this project's implementations and their peers, all as one kind of object.

Inputs are made once as `[B, T, H, D]`. Each candidate gets them in the layout that it takes without copying, made before any
timing: `[B, T, H, D]` for this project, contiguous `[B, H, T, D]` for PyTorch's functions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import tilewise
from benchmarks.case import PASSES, Case, Pass
from tilewise import Selection, selectors

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Inputs:
    """q, k, v and the gradient of out, `[B, T, H, D]`, contiguous, no gradients attached; the lists of a case with blocks."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    ids: Tensor | None = None  # int32 [B, tiles, H_kv, n], ascending

    @classmethod
    def random(cls, case: Case, seed: int, device: torch.device | str) -> Inputs:
        """Standard normal data: a GPU's clock, and so its rate, depends on what it multiplies."""
        generator = torch.Generator(device).manual_seed(seed)
        s, dtype = case.shape, DTYPES[case.dtype]

        def normal(heads: int, dim: int) -> Tensor:
            return torch.randn(s.B, s.T, heads, dim, generator=generator, device=device, dtype=dtype)

        tensors = (normal(s.H_q, s.d_k), normal(s.H_kv, s.d_k), normal(s.H_kv, s.d_v), normal(s.H_q, s.d_v))
        return cls(*tensors, random_lists(case, generator))


def random_lists(case: Case, generator: torch.Generator) -> Tensor | None:
    """Distinct random block ids for every tile and KV head, ascending, int32 `[B, tiles, H_kv, n]`; None without blocks."""
    s, b = case.shape, case.blocks
    if b is None:
        return None
    sizes = (s.B, s.T // b.block_q, s.H_kv, s.T // b.block_k)
    order = torch.rand(*sizes, generator=generator, device=generator.device).argsort(-1)
    return order[..., : b.count].sort(-1).values.to(torch.int32).contiguous()


class Candidate:
    """One implementation, ready to run on one case.

    Attributes:
        name: what results call it.
        passes: what of it is measured.
        leaves: its own q, k, v, in its own layout, requiring gradients.
        dout: gradient of its output, in its own layout.
    """

    passes: tuple[Pass, ...] = PASSES

    def __init__(
        self, name: str, inputs: Inputs, attention: Callable[[Tensor, Tensor, Tensor], Tensor], heads_first: bool
    ):
        self.name = name
        self._attention = attention
        self._heads_first = heads_first
        tensors = (inputs.q, inputs.k, inputs.v, inputs.dout)
        if heads_first:
            tensors = tuple(x.transpose(1, 2).contiguous() for x in tensors)
        self.leaves = tuple(x.detach().requires_grad_() for x in tensors[:3])
        self.dout = tensors[3]

    def forward(self) -> Tensor:
        """Out, with what its backward needs saved, as in training."""
        return self._attention(*self.leaves)

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        """dq, dk, dv of a forward whose saved tensors are kept."""
        return torch.autograd.grad(out, self.leaves, self.dout, retain_graph=True)

    def results(self) -> dict[str, Tensor]:
        """Out and gradients as `[B, T, H, D]`."""
        out = self.forward()
        found = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *self.backward(out)), strict=True))
        return {name: x.transpose(1, 2) if self._heads_first else x for name, x in found.items()}

    def lse(self) -> Tensor | None:
        """`[B, T, H]` natural-log LSE, where the implementation returns it."""
        return None


class Ours(Candidate):
    """An implementation of `tilewise.attend`; an explicit `impl` never falls back."""

    def __init__(self, name: str, inputs: Inputs, case: Case):
        impl, _, form = name.partition("-")
        self._arguments = {
            "causal": case.causal,
            "impl": impl,
            "deterministic": form != "reduce",
            **extras(inputs, case),
        }
        if form == "reduce":
            self.passes = ("backward",)  # its forward is the other form's
        super().__init__(name, inputs, lambda q, k, v: tilewise.attend(q, k, v, **self._arguments), heads_first=False)

    def lse(self) -> Tensor | None:
        with torch.no_grad():
            return tilewise.attend(*self.leaves, **self._arguments, return_lse=True)[1]


def extras(inputs: Inputs, case: Case) -> dict[str, Any]:
    """What `attend` is given besides q, k, v: ready lists, boundaries of packed sequences."""
    if case.blocks is not None and inputs.ids is not None:
        lists = Selection.from_blocks(inputs.ids, block_q=case.blocks.block_q, block_k=case.blocks.block_k)
        return {"selector": selectors.Given(lists)}
    if case.lengths is not None:
        ends = list(itertools.accumulate(case.lengths, initial=0))
        return {"cu_seqlens": torch.tensor(ends, dtype=torch.int32, device=inputs.q.device)}
    return {}


def sdpa(backend: str) -> Callable[[str, Inputs, Case], Candidate]:
    """`torch.nn.functional.scaled_dot_product_attention`, held to one backend."""

    def make(name: str, inputs: Inputs, case: Case) -> Candidate:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        grouped = case.shape.H_q != case.shape.H_kv

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return functional.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=grouped)

        return Candidate(name, inputs, attention, heads_first=True)

    return make


def flex(name: str, inputs: Inputs, case: Case) -> Candidate:
    """FlexAttention, compiled for exactly this shape, its block mask made before the timing."""
    from torch._functorch import config as functorch_config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # backward is timed again and again on one graph, which buffers given away in the first backward would not survive
    functorch_config.donated_buffer = False
    # one static compilation a case: a dynamic one would be a slower kernel than it deserves
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = None
    if case.causal:
        length = case.shape.T
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=inputs.q.device)
    grouped = case.shape.H_q != case.shape.H_kv
    return Candidate(
        name, inputs, lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=grouped), heads_first=True
    )


PEERS: dict[str, Callable[[str, Inputs, Case], Candidate]] = {
    "cudnn": sdpa("CUDNN_ATTENTION"),
    "sdpa-flash": sdpa("FLASH_ATTENTION"),
    "flex": flex,
}


def make_candidate(name: str, inputs: Inputs, case: Case) -> Candidate:
    """The candidate of this name: a peer, or else an `impl` of this project."""
    return PEERS[name](name, inputs, case) if name in PEERS else Ours(name, inputs, case)
