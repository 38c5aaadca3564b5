"""What happens to the blocks that were not selected."""

from tilewise.remainders.base import LawCard, Remainder, VirtualKeys
from tilewise.remainders.drop import Drop
from tilewise.remainders.taylor import Taylor

__all__ = ["Drop", "LawCard", "Remainder", "Taylor", "VirtualKeys"]
