"""Flax Linen: recipes for the layers of any Linen model by rules over their paths, and products to inject by hand."""

from fp4jax.linen.convert import QuantizedModel as QuantizedModel
from fp4jax.linen.convert import describe_model as describe_model
from fp4jax.linen.convert import quantize_model as quantize_model
from fp4jax.linen.product import DotGeneral as DotGeneral
from fp4jax.linen.product import KeepKernelDtype as KeepKernelDtype
from fp4jax.linen.product import dot_general_cls as dot_general_cls
