"""Odd shapes, drawn: eager and reference agree, everything selected is dense."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilewise import attend, selectors

from .grid import Call


@st.composite
def calls(draw):
    query_length, key_length = draw(st.integers(1, 23)), draw(st.integers(1, 23))
    causal = draw(st.booleans())
    window = draw(st.none() | st.integers(1, 25)) if causal else None
    cu_seqlens = cu_seqlens_k = None
    if draw(st.booleans()):
        cuts = draw(st.integers(0, 3))
        cu_seqlens, cu_seqlens_k = (
            (0, *sorted(draw(st.lists(st.integers(0, length), min_size=cuts, max_size=cuts))), length)
            for length in (query_length, key_length)
        )
    return Call(query_length, key_length, causal, window, cu_seqlens, cu_seqlens_k, batch=1)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    call=calls(),
    block_q=st.sampled_from([1, 3, 4, 16]),
    block_k=st.sampled_from([1, 2, 5, 16]),
    group=st.sampled_from([1, 3]),
    density=st.sampled_from([0.3, 1.0]),
    initial=st.integers(0, 2),
)
def test_eager_is_the_reference(remainder, call, block_q, block_k, group, density, initial):
    q, k, v, sink = call.tensors(heads=2 * group, kv_heads=2)
    selector = selectors.Pooled(density=density, block_q=block_q, block_k=block_k, initial=initial)
    options = {"selector": selector, "remainder": remainder, "sink": sink, "return_lse": True, **call.arguments()}
    expected = attend(q, k, v, impl="reference", **options)
    got = attend(q, k, v, impl="eager", **options)
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)
    if density == 1.0:
        dense = attend(q, k, v, impl="reference", sink=sink, return_lse=True, **call.arguments())
        for x, y in zip(got, dense, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)
