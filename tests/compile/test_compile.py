"""torch.compile(fullgraph=True) of attend, and the operators' schemas, fakes and autograd."""

import pytest
import torch
from tolerances import SINGLE

from tilewise import Selection, attend, remainders, selectors
from tilewise.eager.ops import walk_backward, walk_forward

SINK = torch.randn(6, generator=torch.Generator().manual_seed(5))
CU = torch.tensor([0, 11, 11, 23], dtype=torch.int32)
CALLS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 5},
    "sink": {"causal": True, "sink": SINK},
    "scale": {"scale": -0.3},
}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch._dynamo.*", "ignore::UserWarning:torch._inductor.*")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(length, batch=2):
    sizes = [(batch, length, 6, 5), (batch, length + 4, 3, 5), (batch, length + 4, 3, 7)]
    return [torch.randn(*size).requires_grad_() for size in sizes]


def check(compiled, tensors, options):
    """Outputs and gradients of the compiled function against the plain one."""
    results = []
    for function in (compiled, attend):
        out, lse = function(*tensors, return_lse=True, **options)
        generator = torch.Generator().manual_seed(1)
        upstream = [torch.randn(x.shape, generator=generator) for x in (out, lse)]
        results.append((out, lse, *torch.autograd.grad((out, lse), tensors, upstream)))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, **SINGLE)
        assert got.stride() == expected.stride()


class Frames:
    """A backend that counts the graphs it is given."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, example_inputs):
        self.count += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS.keys())
def test_one_graph_for_every_length(options):
    frames = Frames()
    compiled = torch.compile(attend, fullgraph=True, backend=frames)
    check(compiled, inputs(37), options)
    assert frames.count == 1
    # the second length makes the graph dynamic; no other length compiles anything
    check(compiled, inputs(53), options)
    assert frames.count == 2
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (71, 300, 1023):
            check(compiled, inputs(length), options)
    assert frames.count == 2


def test_marked_dynamic_compiles_once():
    frames = Frames()
    compiled = torch.compile(attend, fullgraph=True, backend=frames)
    for length in (37, 53, 601):
        tensors = inputs(length)
        for x in tensors:
            torch._dynamo.mark_dynamic(x, 1)
        check(compiled, tensors, {"causal": True})
    assert frames.count == 1


def test_packed_sequences():
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    q, k, v = (torch.randn(1, 23, heads, 5).requires_grad_() for heads in (6, 3, 3))
    check(compiled, (q, k, v), {"causal": True, "cu_seqlens": CU})


@pytest.mark.parametrize("remainder", [None, remainders.Taylor(0)], ids=["drop", "taylor0"])
@pytest.mark.parametrize("selector", ["pooled", "window", "given"])
def test_sparse_calls_are_one_graph(selector, remainder):
    ids = torch.tensor([[0, 1], [2, -1], [0, 3], [4, 2], [1, 0]])[None, :, None].expand(2, 5, 3, 2)
    made = {
        "pooled": selectors.Pooled(blocks=3, block_q=8, block_k=8),
        "window": selectors.Window(9, block_q=8, block_k=8),
        "given": selectors.Given(Selection.from_blocks(ids, block_q=8, block_k=8)),
    }[selector]
    frames = Frames()
    compiled = torch.compile(attend, fullgraph=True, backend=frames)
    check(compiled, inputs(37), {"causal": True, "selector": made, "remainder": remainder})
    assert frames.count == 1


@pytest.mark.slow
def test_inductor():
    compiled = torch.compile(attend, fullgraph=True)
    check(compiled, inputs(37), {"causal": True, "sink": SINK})


def operator_arguments(lists, bias, dtype=torch.float64):
    """Arguments of walk_forward: q, k, v, first, end, scale, key_bias, ids, row_tile, key_block, blocks, complement."""
    q, k, v = (
        torch.randn(*size, dtype=dtype, requires_grad=True) for size in ((2, 7, 6, 5), (2, 11, 3, 5), (2, 11, 3, 13))
    )
    first = torch.tensor([0, 1, 0, 3, 4, 9, 2])
    end = torch.tensor([11, 4, 0, 7, 11, 10, 9])
    key_bias = torch.randn(2, 3, 11, dtype=dtype, requires_grad=True) if bias else None
    if not lists:
        return q, k, v, first, end, 0.4, key_bias, None, None, None, 0, False
    ids = torch.tensor([[0, 2], [1, -1], [3, 0]], dtype=torch.int32)[None, :, None].expand(2, 3, 1, 2)
    row_tile, key_block = torch.arange(7) // 3, torch.arange(11) // 3
    return q, k, v, first, end, 0.4, key_bias, ids, row_tile, key_block, 4, lists == "complement"


operators = pytest.mark.parametrize(("lists", "bias"), [(None, False), ("listed", False), ("complement", True)])


@operators
def test_opcheck_forward(lists, bias):
    torch.library.opcheck(walk_forward, operator_arguments(lists, bias))


@operators
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_opcheck_backward(lists, bias, dtype):
    q, k, v, *rest = (x.detach() if isinstance(x, torch.Tensor) else x for x in operator_arguments(lists, bias, dtype))
    out, lse = walk_forward(q, k, v, *rest)
    arguments = (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse, *rest)
    torch.library.opcheck(walk_backward, arguments)


def test_opcheck_of_strided_inputs():
    q, k, v, *rest = operator_arguments(None, False)
    q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v))
    torch.library.opcheck(walk_forward, (q, k, v, *rest))
