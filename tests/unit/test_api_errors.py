"""Every refusal of attend: the message names the argument, and what it got."""

import re

import pytest
import torch

from tilewise import Selection, attend, remainders, selectors

POOLED = selectors.Pooled(blocks=3)


def tensors(q=(2, 7, 6, 5), k=(2, 11, 3, 5), v=(2, 11, 3, 13), dtype=torch.float32):
    return {name: torch.zeros(*shape, dtype=dtype) for name, shape in (("q", q), ("k", k), ("v", v))}


def packed(queries=7, keys=11):
    return tensors((1, queries, 6, 5), (1, keys, 3, 5), (1, keys, 3, 13))


def cu(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


# arguments (over those of `tensors`), kind of error, and a pattern: argument, expected, got
CASES = {
    "q not a tensor": (dict(q=[1.0]), TypeError, r"^q: expected a tensor, got list"),
    "q rank": (dict(q=torch.zeros(7, 6, 5)), ValueError, r"^q: expected \[B, T, H, D\] \(rank 4\), got rank 3"),
    "k rank": (dict(k=torch.zeros(11, 3)), ValueError, r"^k: expected .*rank 4.* got rank 2, shape \(11, 3\)"),
    "v rank": (dict(v=torch.zeros(1, 2, 3, 4, 5)), ValueError, r"^v: expected .*rank 4.* got rank 5"),
    "int dtype": (
        tensors(dtype=torch.int64),
        TypeError,
        r"^q: expected float16, bfloat16, float32 or float64, got torch.int64",
    ),
    "complex": (tensors(dtype=torch.complex64), TypeError, r"^q: expected float16, .*got torch.complex64"),
    "k dtype": (
        dict(k=torch.zeros(2, 11, 3, 5).half()),
        TypeError,
        r"^k: expected torch.float32 as q, got torch.float16",
    ),
    "v dtype": (
        dict(v=torch.zeros(2, 11, 3, 13).double()),
        TypeError,
        r"^v: expected torch.float32 as q, got torch.float64",
    ),
    "k device": (
        dict(k=torch.zeros(2, 11, 3, 5, device="meta")),
        ValueError,
        r"^k: expected device cpu as q, got meta",
    ),
    "v device": (
        dict(v=torch.zeros(2, 11, 3, 13, device="meta")),
        ValueError,
        r"^v: expected device cpu as q, got meta",
    ),
    "k batch": (dict(k=torch.zeros(3, 11, 3, 5)), ValueError, r"^k: expected batch 2 as q, got 3"),
    "v batch": (dict(v=torch.zeros(1, 11, 3, 13)), ValueError, r"^v: expected batch 2 as q, got 1"),
    "T_k": (dict(v=torch.zeros(2, 12, 3, 13)), ValueError, r"^v: expected T_k = 11 tokens as k, got 12"),
    "H_kv": (dict(v=torch.zeros(2, 11, 2, 13)), ValueError, r"^v: expected H_kv = 3 heads as k, got 2"),
    "d_k": (dict(k=torch.zeros(2, 11, 3, 4)), ValueError, r"^k: expected d_k = 5 as q, got 4"),
    "heads": (
        dict(q=torch.zeros(2, 7, 8, 5)),
        ValueError,
        r"^q: expected H_q to be a multiple of H_kv = 3, got H_q = 8",
    ),
    "fewer heads": (dict(q=torch.zeros(2, 7, 1, 5)), ValueError, r"^q: expected H_q .* H_kv = 3, got H_q = 1"),
    "no head": (tensors((2, 7, 0, 5), (2, 7, 0, 5), (2, 7, 0, 5)), ValueError, r"^q, k, v: expected at least one head"),
    "no channel": (
        dict(v=torch.zeros(2, 11, 3, 0)),
        ValueError,
        r"^q, k, v: expected .* one channel, got .*\(2, 11, 3, 0\)",
    ),
    "causal type": (dict(causal=torch.tensor(True)), TypeError, r"^causal: expected True or False, got Tensor"),
    "causal none": (dict(causal=None), TypeError, r"^causal: expected True or False, got NoneType"),
    "window 0": (dict(causal=True, window=0), ValueError, r"^window: expected at least 1 .* got 0"),
    "window -2": (dict(causal=True, window=-2), ValueError, r"^window: expected at least 1 .* got -2"),
    "window float": (dict(causal=True, window=2.0), TypeError, r"^window: expected an int or None, got float"),
    "window bool": (dict(causal=True, window=True), TypeError, r"^window: expected an int or None, got bool"),
    "window full": (dict(window=4), ValueError, r"^window: expected causal=True beside window=4, got causal=False"),
    "scale nan": (dict(scale=float("nan")), ValueError, r"^scale: expected a finite number, got nan"),
    "scale inf": (dict(scale=float("-inf")), ValueError, r"^scale: expected a finite number, got -inf"),
    "scale type": (dict(scale=torch.tensor(1.0)), TypeError, r"^scale: expected a float or None, got Tensor"),
    "sink type": (dict(sink=1.0), TypeError, r"^sink: expected a float32 tensor \[H_q\] = \[6\], got float"),
    "sink shape": (dict(sink=torch.zeros(3)), ValueError, r"^sink: expected .* shape \[6\], got \(3,\)"),
    "sink dtype": (dict(sink=torch.zeros(6).half()), TypeError, r"^sink: expected float32 .* got torch.float16"),
    "sink fp64": (dict(sink=torch.zeros(6).double()), TypeError, r"^sink: expected float32 .* got torch.float64"),
    "sink device": (dict(sink=torch.zeros(6, device="meta")), ValueError, r"^sink: expected device cpu as q, got meta"),
    "impl": (
        dict(impl="cuda"),
        ValueError,
        r"^impl: expected one of 'auto', 'reference', 'eager', 'triton', 'hopper', got 'cuda'",
    ),
    "remainder alone": (
        dict(remainder=remainders.Drop()),
        ValueError,
        r"^remainder: needs a selector.* got remainder=Drop with selector=None",
    ),
    "selector type": (dict(selector="pooled"), TypeError, r"^selector: expected an instance .* got str"),
    "selector class": (dict(selector=selectors.Pooled), TypeError, r"^selector: .* got the class Pooled itself"),
    "selection": (
        dict(selector=Selection.from_blocks(torch.zeros(2, 1, 1, 1).int(), block_q=8, block_k=8)),
        TypeError,
        r"^selector: .* got Selection; .*selectors.Given\(selection\)",
    ),
    "remainder type": (
        dict(selector=POOLED, remainder=0.5),
        TypeError,
        r"^remainder: expected an instance .* got float",
    ),
    "remainder class": (
        dict(selector=POOLED, remainder=remainders.Taylor),
        TypeError,
        r"^remainder: .* got the class Taylor itself",
    ),
    "cu_seqlens type": (
        packed() | dict(cu_seqlens=[0, 7]),
        TypeError,
        r"^cu_seqlens: expected an int32 tensor, got list",
    ),
    "cu_seqlens int64": (
        packed() | dict(cu_seqlens=cu(0, 7, dtype=torch.int64)),
        TypeError,
        r"^cu_seqlens: expected int32, got torch.int64; cast with",
    ),
    "cu_seqlens rank": (
        packed() | dict(cu_seqlens=cu([0, 7])),
        ValueError,
        r"^cu_seqlens: expected shape \[N\+1\].* got \(1, 2\)",
    ),
    "cu_seqlens empty": (
        packed() | dict(cu_seqlens=cu(0)),
        ValueError,
        r"^cu_seqlens: expected shape \[N\+1\] .* got \(1,\)",
    ),
    "cu_seqlens device": (
        packed() | dict(cu_seqlens=cu(0, 7).to("meta")),
        ValueError,
        r"^cu_seqlens: expected device cpu as q, got meta",
    ),
    "cu_seqlens start": (
        packed(7, 7) | dict(cu_seqlens=cu(1, 7)),
        ValueError,
        r"^cu_seqlens: expected to start at 0, got 1",
    ),
    "cu_seqlens end": (
        packed(7, 7) | dict(cu_seqlens=cu(0, 5)),
        ValueError,
        r"^cu_seqlens: expected to end at T_q = 7, got 5",
    ),
    "cu_seqlens past": (
        packed(7, 7) | dict(cu_seqlens=cu(0, 9)),
        ValueError,
        r"^cu_seqlens: expected to end at T_q = 7, got 9",
    ),
    "cu_seqlens falls": (
        packed(7, 7) | dict(cu_seqlens=cu(0, 5, 4, 7)),
        ValueError,
        r"^cu_seqlens: expected values that do not fall, got 5 then 4 at 2",
    ),
    "cu_seqlens_k end": (
        packed() | dict(cu_seqlens=cu(0, 7), cu_seqlens_k=cu(0, 12)),
        ValueError,
        r"^cu_seqlens_k: expected to end at T_k = 11, got 12",
    ),
    "cu_seqlens for both": (
        packed() | dict(cu_seqlens=cu(0, 7)),
        ValueError,
        r"^cu_seqlens_k: expected to end at T_k = 11, got 7",
    ),
    "cu_seqlens_k alone": (
        packed() | dict(cu_seqlens_k=cu(0, 11)),
        ValueError,
        r"^cu_seqlens_k: expected cu_seqlens beside it, got cu_seqlens=None",
    ),
    "sequences": (
        packed() | dict(cu_seqlens=cu(0, 3, 7), cu_seqlens_k=cu(0, 3, 9, 11)),
        ValueError,
        r"^cu_seqlens_k: expected 2 sequences as cu_seqlens, got 3",
    ),
    "packed batch": (dict(cu_seqlens=cu(0, 7)), ValueError, r"^cu_seqlens: expected B = 1 in q, k and v .* got B = 2"),
}


@pytest.mark.parametrize(("arguments", "error", "pattern"), CASES.values(), ids=CASES.keys())
def test_refusals(arguments, error, pattern):
    with pytest.raises(error) as caught:
        attend(**(tensors() | arguments))
    assert re.search(pattern, str(caught.value), re.DOTALL), str(caught.value)


def test_what_the_cases_start_from_is_legal():
    assert attend(**tensors()).shape == (2, 7, 6, 13)
    assert attend(**tensors(), selector=POOLED, remainder=remainders.Drop()).shape == (2, 7, 6, 13)
    lists = dict(cu_seqlens=cu(0, 3, 3, 7), cu_seqlens_k=cu(0, 0, 5, 11))
    out, lse = attend(**packed(), **lists, sink=torch.zeros(6), return_lse=True)
    assert out.shape == (1, 7, 6, 13) and lse.shape == (1, 7, 6)
    assert attend(**packed(7, 7), cu_seqlens=cu(0, 3, 7)).shape == (1, 7, 6, 13)


def test_one_list_of_boundaries_serves_both_sides():
    inputs = {name: torch.randn_like(x) for name, x in packed(7, 7).items()}
    both = attend(**inputs, cu_seqlens=cu(0, 3, 7), cu_seqlens_k=cu(0, 3, 7))
    assert torch.equal(attend(**inputs, cu_seqlens=cu(0, 3, 7)), both)


def test_sink_may_be_fp64_beside_fp64():
    assert attend(**tensors(dtype=torch.float64), sink=torch.zeros(6).double()).dtype == torch.float64
    assert attend(**tensors(dtype=torch.float64), sink=torch.zeros(6)).dtype == torch.float64


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("impl", ["auto", "eager", "reference"])
def test_deterministic_is_accepted_everywhere(impl, deterministic):
    attend(**tensors(), impl=impl, deterministic=deterministic)
    attend(**tensors(), impl=impl, deterministic=deterministic, selector=POOLED)
