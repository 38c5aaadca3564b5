"""Where exact computation goes."""

from tilewise.selectors.base import BlockOptions, Selector, SelectorCard
from tilewise.selectors.given import Given
from tilewise.selectors.oracle import Oracle
from tilewise.selectors.pooled import Pooled
from tilewise.selectors.window import Window

__all__ = ["BlockOptions", "Given", "Oracle", "Pooled", "Selector", "SelectorCard", "Window"]
