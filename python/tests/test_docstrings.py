"""Examples in docstrings of the extension run; those of Python's own modules pytest finds itself, since `testpaths` names the package."""

import doctest
import inspect

import pytest

import crossmesh._native as native


def documented(owner, name):
    """Everything with an example, by name."""
    for key, value in vars(owner).items():
        if inspect.isclass(value) and value.__module__.startswith("crossmesh"):
            yield from documented(value, f"{name}.{key}")
        if ">>>" in (getattr(value, "__doc__", None) or ""):
            yield pytest.param(value.__doc__, id=f"{name}.{key}")


def test_there_are_examples():
    assert len(list(documented(native, "crossmesh"))) >= 4


@pytest.mark.parametrize("text", list(documented(native, "crossmesh")))
def test_an_example_runs(text):
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    test = doctest.DocTestParser().get_doctest(text, {}, "docstring", None, 0)
    results = doctest.DocTestRunner(verbose=False, optionflags=flags).run(test)
    assert results.attempted > 0 and results.failed == 0
