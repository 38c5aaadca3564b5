"""Attention, tile by tile: exact, or sparse with a written account of what was left out."""

from tilewise import remainders, selectors
from tilewise.api import attend
from tilewise.selection import Selection
from tilewise.state import AttentionState, merge, merge_all

__version__ = "0.1.0"

__all__ = ["AttentionState", "Selection", "attend", "merge", "merge_all", "remainders", "selectors"]
