"""Choosing a backend: never in silence."""

import jax.numpy as jnp
import pytest

import fp4jax
from fp4jax.dot import BACKENDS, xla

MATMUL = (((1,), (0,)), ((), ()))
X, W = jnp.ones((4, 8)), jnp.ones((8, 2))
FP4 = fp4jax.recipes.fp4()


class Narrow:
    """A backend that takes nothing but fp8."""

    @staticmethod
    def unsupported(call):
        return [] if call.recipe.name == "fp8" else ["only recipe fp8 has kernels", "k=8 is too small"]

    quantize_lhs, quantize_rhs = staticmethod(xla.quantize_lhs), staticmethod(xla.quantize_rhs)
    fprop, dgrad, wgrad = staticmethod(xla.fprop), staticmethod(xla.dgrad), staticmethod(xla.wgrad)


@pytest.fixture
def narrow():
    """A backend that is preferred to all others. Their order matters, so it is put back too."""
    others = dict(BACKENDS)
    BACKENDS.clear()
    BACKENDS.update({"narrow": Narrow, **others})
    yield
    BACKENDS.clear()
    BACKENDS.update(others)


def used(recipe, backend=None):
    result = fp4jax.explain(lambda x, w: fp4jax.dot_general(x, w, MATMUL, recipe=recipe, backend=backend), X, W)
    return result.products[0].backend


def test_none_takes_the_first_that_supports_the_call(narrow):
    assert used(fp4jax.recipes.fp8()) == "narrow"
    assert used(FP4) == "xla"
    assert used(fp4jax.recipes.fp8(), "xla") == "xla"


def test_a_named_backend_that_cannot_lists_why_and_who_can(narrow):
    with pytest.raises(
        ValueError, match=r"backend='narrow' does not support recipe 'fp4' here: only recipe fp8 has"
    ) as e:
        used(FP4, "narrow")
    assert "k=8 is too small; supported by 'xla'" in str(e.value)


def test_no_backend_at_all_lists_every_reason(narrow, monkeypatch):
    monkeypatch.delitem(BACKENDS, "xla")
    with pytest.raises(
        ValueError, match=r"no backend supports recipe 'fp4' here \(narrow: only recipe fp8 has kernels"
    ):
        used(FP4)


def test_an_unknown_backend_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"backend='hoper' is unknown; there are .*'xla'"):
        used(FP4, "hoper")
    with pytest.raises(ValueError, match=r"backend='hoper' is unknown"):
        used(fp4jax.recipes.bf16(), "hoper")
    with pytest.raises(ValueError, match=r"backend='hoper' is unknown"):
        fp4jax.DotGeneral(FP4, backend="hoper")
