"""The test harness itself: what it poisons, and what it skips."""

import pytest
import torch
from conftest import poisoned, reason_to_skip

# library code, as the fixture sees it: the name of the calling module decides
LIBRARY = """
import torch
def outputs(like):
    return [
        torch.empty(3), torch.empty_like(like), torch.empty_strided((2, 2), (2, 1)), like.new_empty(3),
        like.new_empty_strided((2, 2), (2, 1)),
    ]
"""


@pytest.fixture
def library() -> dict:
    namespace: dict = {"__name__": "tilewise.kernels.imagined"}
    exec(LIBRARY, namespace)
    return namespace


@pytest.mark.usefixtures("nan_poison")
def test_uninitialised_outputs_of_the_library_are_nan(library):
    for output in library["outputs"](torch.zeros(4)):
        assert output.isnan().all()


@pytest.mark.usefixtures("nan_poison")
def test_other_callers_and_integers_are_left_alone():
    zeros = poisoned(lambda: torch.zeros(3))
    assert zeros().eq(0).all()
    integers = poisoned(lambda: torch.zeros(3, dtype=torch.int32))
    namespace: dict = {"__name__": "tilewise.imagined", "integers": integers}
    exec("result = integers()", namespace)
    assert namespace["result"].eq(0).all()


@pytest.mark.parametrize(
    ("markers", "devices", "interpreted", "runs"),
    [
        ({"gpu"}, 0, False, False),
        ({"gpu"}, 1, False, True),
        ({"gpu"}, 1, True, False),
        ({"multigpu"}, 1, False, False),
        ({"multigpu"}, 2, False, True),
        ({"interpret"}, 0, False, False),
        ({"interpret"}, 0, True, True),
        ({"aot"}, 0, False, True),
        ({"aot"}, 0, True, False),
        (set(), 0, False, True),
        ({"slow"}, 0, False, True),
    ],
)
def test_reasons_to_skip(markers, devices, interpreted, runs):
    assert (reason_to_skip(markers, devices, interpreted, triton_installed=True) is None) == runs
    if markers & {"interpret", "aot"}:
        assert reason_to_skip(markers, devices, interpreted, triton_installed=False) is not None
