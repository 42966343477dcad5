"""Every example in a docstring runs and prints what it says."""

import doctest
import importlib
import pkgutil

import jax
import pytest

import fp4jax

# Their examples need a file to read; tests/train/test_data_corpus.py runs them beside one.
_ELSEWHERE = "fp4jax.train.data."


def _modules():
    yield "fp4jax"
    for module in pkgutil.walk_packages(fp4jax.__path__, "fp4jax."):
        if not module.name.startswith(_ELSEWHERE):
            yield module.name


@pytest.mark.parametrize("name", sorted(_modules()))
def test_examples_print_what_they_say(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    names = {"fp4jax": fp4jax, "jax": jax, "jnp": jax.numpy, **vars(module)}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    with jax.numpy_dtype_promotion("standard"):
        for test in doctest.DocTestFinder(exclude_empty=True).find(module, name, globs=names):
            runner.run(test)
    assert runner.failures == 0, f"{runner.failures} of {runner.tries} examples failed; see the captured output"


def test_every_public_name_is_documented():
    undocumented = [n for n in fp4jax.__all__ if n not in ("recipes", "REUSE") and not getattr(fp4jax, n).__doc__]
    assert not undocumented
