"""The tiled PyTorch path: any device, memory O(T * block), with its own backward."""

from tilewise.eager.membership import Membership
from tilewise.eager.walk import walk

__all__ = ["Membership", "walk"]
