"""``dot_general`` under a recipe: the function, its backends, and what a program does with it."""

from fp4jax.dot.api import DotGeneral, dot_general
from fp4jax.dot.explain import Explanation, explain
from fp4jax.dot.registry import BACKENDS

__all__ = ["BACKENDS", "DotGeneral", "Explanation", "dot_general", "explain"]
