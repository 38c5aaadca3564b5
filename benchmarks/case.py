"""One thing to measure: the sizes of a call, its mask, and the lists or the sequences that it comes with."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Pass = Literal["forward", "backward"]
PASSES: tuple[Pass, ...] = ("forward", "backward")
SMALL_LENGTH = 1024  # tokens of `Case.small`


@dataclass(frozen=True)
class Shape:
    """Sizes of one call; T_q = T_k = T."""

    B: int
    T: int
    H_q: int
    H_kv: int
    d_k: int
    d_v: int


@dataclass(frozen=True)
class Blocks:
    """Lists of selected key blocks: `count` random distinct ids a list, one list per KV head and tile of query rows."""

    block_q: int
    block_k: int
    count: int


@dataclass(frozen=True)
class Case:
    """What is measured, before the implementation and the pass are chosen.

    Attributes:
        density: selected over visible pairs; where there are blocks it follows from them.
        blocks: the lists of a block-sparse call (not causal; T in whole tiles and blocks).
        lengths: of the sequences packed along T (then B = 1).
        implementations: who is measured; empty: everyone that the operation names.

    Raises:
        ValueError: blocks or lengths that do not fit the shape.
    """

    op: str
    shape: Shape
    causal: bool
    dtype: str = "bf16"
    density: float = 1.0
    blocks: Blocks | None = None
    lengths: tuple[int, ...] | None = None
    implementations: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        s, b = self.shape, self.blocks
        if self.lengths is not None and (s.B != 1 or sum(self.lengths) != s.T):
            raise ValueError(f"lengths: expected B = 1 and a sum of T = {s.T}, got B = {s.B} and {sum(self.lengths)}")
        if b is None:
            return
        if self.causal or self.lengths is not None:
            raise ValueError(
                "blocks: expected a call without causal and without lengths, whose pairs are easy to count"
            )
        if s.T % b.block_q or s.T % b.block_k or not 1 <= b.count <= s.T // b.block_k:
            raise ValueError(f"blocks: expected whole tiles and blocks of T = {s.T} and 1 to all of them, got {b}")
        object.__setattr__(self, "density", self.pairs / s.T**2)

    @property
    def pairs(self) -> float:
        """(query, key) pairs of one head that are computed; causal is half of the square of a sequence's length."""
        if self.blocks is not None:
            return self.shape.T * self.blocks.count * self.blocks.block_k
        square = sum(length**2 for length in self.lengths or (self.shape.T,))
        return square / 2 if self.causal else square

    @property
    def sizes(self) -> dict[str, Any]:
        """What results store under "shape": everything that two calls must share to be compared."""
        sizes = asdict(self.shape)
        if self.blocks is not None:
            sizes |= {"block_q": self.blocks.block_q, "block_k": self.blocks.block_k}
        return sizes if self.lengths is None else sizes | {"lengths": list(self.lengths)}

    def small(self) -> Case:
        """The same kind of call with so few tokens that every head of it can be checked."""
        if self.lengths is not None:
            lengths = tuple(max(1, length * SMALL_LENGTH // self.shape.T) for length in self.lengths)
            return replace(self, shape=replace(self.shape, T=sum(lengths)), lengths=lengths)
        length = min(SMALL_LENGTH, self.shape.T)
        blocks = self.blocks
        if blocks is not None:
            blocks = replace(blocks, count=max(1, round(self.density * length / blocks.block_k)))
        return replace(self, shape=replace(self.shape, T=length), blocks=blocks)

    def __str__(self) -> str:
        s, b = self.shape, self.blocks
        heads = f"H {s.H_q}" if s.H_q == s.H_kv else f"H {s.H_q}/{s.H_kv}"
        dims = f"D {s.d_k}" if s.d_k == s.d_v else f"D {s.d_k}/{s.d_v}"
        text = f"{self.op} {self.dtype} B {s.B} T {s.T} {heads} {dims} {'causal' if self.causal else 'full'}"
        if b is not None:
            text += f" density {self.density:.3f} of {b.block_q} x {b.block_k} blocks"
        if self.lengths is not None:
            text += f" {len(self.lengths)} sequences of {min(self.lengths)} to {max(self.lengths)}"
        return text
