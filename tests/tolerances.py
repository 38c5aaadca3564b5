"""Every tolerance of the tests, each with its reason. Never loosened to get green."""

from __future__ import annotations

import torch


def kernel_error_limit(eager_error: float, dtype: torch.dtype, amplification: float = 1.0) -> float:
    """Relative error a kernel may have against float64: twice that of PyTorch's eager path, plus one rounding of `dtype`.

    Twice: another order of sums and another place to round may lose as much again. One rounding: the result itself is
    stored in `dtype`, where eager may happen to be exact. Where the result is a small difference of large terms, the
    rounding is one of the terms: `amplification` is their size over the result's.
    """
    return 2 * eager_error + amplification * torch.finfo(dtype).eps
