"""Flax NNX layers whose products follow a recipe, and the rules that say which layer gets which recipe.

`quantize_model` gives the layers of any NNX model their recipes; `Linear` and `Einsum` take one where they are built.
Every layer takes its product as an injected callable, so the numerics know nothing of models: what is here only chooses
that callable, keeps the kernel in its parameter dtype, and owns the noise stream of a stochastic recipe.
"""

from fp4jax.nn.convert import noise_key as noise_key
from fp4jax.nn.convert import quantize_model as quantize_model
from fp4jax.nn.einsum import DotEinsum as DotEinsum
from fp4jax.nn.einsum import Einsum as Einsum
from fp4jax.nn.einsum import einsum as einsum
from fp4jax.nn.layers import LAYERS as LAYERS
from fp4jax.nn.layers import LayerKind as LayerKind
from fp4jax.nn.linear import Linear as Linear
from fp4jax.nn.prepared import PreparedWeights as PreparedWeights
from fp4jax.nn.prepared import prepare_weights as prepare_weights
from fp4jax.nn.prepared import use_prepared as use_prepared
from fp4jax.nn.product import KeepKernelDtype as KeepKernelDtype
from fp4jax.nn.product import KeyedDotGeneral as KeyedDotGeneral
from fp4jax.nn.product import NoiseStream as NoiseStream
from fp4jax.nn.product import PreparedDotGeneral as PreparedDotGeneral
from fp4jax.nn.product import QuantizedWeight as QuantizedWeight
from fp4jax.nn.product import set_noise_step as set_noise_step
from fp4jax.nn.report import LayerReport as LayerReport
from fp4jax.nn.report import ModelReport as ModelReport
from fp4jax.nn.report import describe_model as describe_model
from fp4jax.nn.rules import Blocks as Blocks
from fp4jax.nn.rules import Rules as Rules
from fp4jax.nn.rules import default_rules as default_rules
from fp4jax.nn.rules import keep_blocks as keep_blocks
from fp4jax.nn.rules import resolve_blocks as resolve_blocks
from fp4jax.nn.rules import resolve_rules as resolve_rules
from fp4jax.nn.runs import BlockwiseDotGeneral as BlockwiseDotGeneral
from fp4jax.nn.runs import equal_runs as equal_runs
from fp4jax.nn.runs import join_runs as join_runs
from fp4jax.nn.runs import split_runs as split_runs
from fp4jax.nn.schedule import RulesSchedule as RulesSchedule
