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


# float64 against float64, sums of some hundred terms in another order: 1e-16 times the terms, with room for gradients
# that pass through two sums. A wrong mask or a wrong factor is off by 1e-2 and more.
DOUBLE = {"rtol": 1e-10, "atol": 1e-12}

# gradcheck's numerical derivative in float64 with a step of 1e-6 is good to about 1e-9 of values of size 1
GRADCHECK = {"eps": 1e-6, "atol": 1e-7, "rtol": 1e-5}

# fp32 against float64 with logits of size 10: exp turns an absolute error of 10 eps into a relative one
SINGLE = {"rtol": 1e-5, "atol": 1e-5}


def storage_limit(dtype: torch.dtype) -> float:
    """Relative error (Euclidean norms) of a path that computes in fp32 from inputs of `dtype`: rounding the result to
    nearest, half an eps, and what sums of some tens of terms lose in fp32.
    """
    return torch.finfo(dtype).eps / 2 + 2e-6


# peak resident growth of attend at T = 16,384, H = 8, D = 64, causal, forward and backward (a requirement of the project:
# 2 GiB). Inputs' gradients and accumulators take 0.3 GiB; one T x T matrix of a single head would take 1 GiB more.
LONG_CALL_GROWTH_BYTES = 2 << 30
