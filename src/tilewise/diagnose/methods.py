"""The methods that `compare` runs: what Q, K, V alone define, all at one budget of blocks."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.remainders import Drop, Remainder, Taylor
from tilewise.selectors import Oracle, Pooled, Selector, Window


@dataclass(frozen=True)
class Method:
    """One line of the table."""

    selector_name: str
    remainder_name: str
    selector: Selector | None  # None: dense attention
    remainder: Remainder | None

    @property
    def name(self) -> str:
        return self.selector_name if self.selector is None else f"{self.selector_name}, {self.remainder_name}"


def selectors_at(blocks: int, block: int) -> dict[str, Selector]:
    """Selectors that choose `blocks` key blocks of `block` tokens besides the tile's own, by the name to print."""
    sizes = {"block_q": block, "block_k": block}
    chosen: dict[str, Selector] = {"window": Window(blocks * block, **sizes)}
    if blocks > 1:
        chosen["window + first block"] = Window((blocks - 1) * block, initial=1, **sizes)
    chosen["pooled"] = Pooled(blocks=blocks, initial=0, local=0, **sizes)
    chosen["pooled + first block"] = Pooled(blocks=blocks, initial=1, local=0, **sizes)
    chosen["oracle"] = Oracle(blocks=blocks, initial=0, local=0, **sizes)
    return chosen


def standard_methods(blocks: int, block: int) -> list[Method]:
    """Dense attention, then every selector with every remainder."""
    remainders: dict[str, Remainder] = {"drop": Drop(), "taylor 0": Taylor(order=0)}
    methods = [Method("dense", "none", None, None)]
    for selector_name, selector in selectors_at(blocks, block).items():
        for remainder_name, remainder in remainders.items():
            methods.append(Method(selector_name, remainder_name, selector, remainder))
    return methods


def predicted_cost(method: Method, density: float, block: int, d_k: int, d_v: int) -> float:
    """FLOP of a method over FLOP of dense attention on the same rows.

    The exact part costs its density. Pooled tile scores add `1 / (2 block^2)`, the oracle's logits `d_k / (d_k + d_v)`,
    and a zeroth-order remainder `1 / block` for one virtual key a block. What moving data costs is not in it.
    """
    cost = density
    if isinstance(method.selector, Pooled):
        cost += 1 / (2 * block**2)
    elif isinstance(method.selector, Oracle):
        cost += d_k / (d_k + d_v)
    if isinstance(method.remainder, Taylor):
        cost += 1 / block
    return cost
