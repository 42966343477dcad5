"""``dot_general`` under a recipe: the function, its backends, and what a program does with it."""

from fp4jax.dot.api import DotGeneral, dot_general, prepare_lhs, prepare_rhs, share_lhs
from fp4jax.dot.explain import Explanation, explain
from fp4jax.dot.prepared import Prepared
from fp4jax.dot.registry import BACKENDS

__all__ = [
    "BACKENDS",
    "DotGeneral",
    "Explanation",
    "Prepared",
    "dot_general",
    "explain",
    "prepare_lhs",
    "prepare_rhs",
    "share_lhs",
]
