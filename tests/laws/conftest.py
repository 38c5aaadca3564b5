"""Axes of the law tests: a test that names one of these arguments is run over the grid."""

import pytest

from . import grid


def pytest_generate_tests(metafunc):
    axes = {
        "choice": grid.SELECTORS,
        "remainder": {name: make() for name, make in grid.REMAINDERS.items()},
        "call": grid.CALLS,
        "size": grid.BLOCKS,
        "impl": {name: name for name in ("reference", "eager")},
        "with_sink": {"sink": True, "no sink": False},
    }
    for name, values in axes.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, [pytest.param(value, id=key) for key, value in values.items()])
