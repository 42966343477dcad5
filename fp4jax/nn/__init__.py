"""Flax NNX layers whose products follow a recipe, and the rules that say which layer gets which recipe.

Every layer takes its product as an injected callable, so the numerics know nothing of models: `Linear` and `Einsum`
only choose that callable, keep the kernel in its parameter dtype, and own the noise stream of a stochastic recipe.
"""

from fp4jax.nn.einsum import DotEinsum as DotEinsum
from fp4jax.nn.einsum import Einsum as Einsum
from fp4jax.nn.einsum import einsum as einsum
from fp4jax.nn.linear import Linear as Linear
from fp4jax.nn.product import KeepKernelDtype as KeepKernelDtype
from fp4jax.nn.product import KeyedDotGeneral as KeyedDotGeneral
from fp4jax.nn.product import set_noise_step as set_noise_step
from fp4jax.nn.rules import Rules as Rules
from fp4jax.nn.rules import default_rules as default_rules
from fp4jax.nn.rules import resolve_rules as resolve_rules
