"""The product a layer is given: which callable a recipe asks for, in which dtypes, and where its noise comes from."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax.typing import DTypeLike

from fp4jax.dot import DotGeneral, Prepared
from fp4jax.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class KeepKernelDtype:
    """A `promote_dtype` for stock Flax layers that never touches the kernel.

    Flax casts inputs, kernel and bias to the layer's `dtype`, so with `dtype=bfloat16` the float32 master weight is
    rounded to bfloat16 before it is quantized: two roundings where the recipe defines one. This one casts the inputs
    to `dtype` (left alone when None), leaves the kernel as it is stored, and casts the bias to the dtype of the result.

        layer = nnx.Linear(8, 16, dtype=jnp.bfloat16, dot_general=fp4jax.DotGeneral(recipe),
                           promote_dtype=fp4jax.nn.KeepKernelDtype(recipe.output_dtype), rngs=nnx.Rngs(0))

    Args:
        output_dtype: dtype the product returns; None means that of the inputs.
    """

    output_dtype: DTypeLike | None = None

    def __call__(self, args: tuple[Any, ...], /, *, dtype: DTypeLike | None = None, inexact: bool = True):
        """Cast (inputs, kernel) or (inputs, kernel, bias) as described above."""
        inputs, kernel, *bias = args
        (inputs,) = promote_dtype((inputs,), dtype=dtype, inexact=inexact)
        output = inputs.dtype if self.output_dtype is None else self.output_dtype
        return inputs, jnp.asarray(kernel), *(None if b is None else jnp.asarray(b, output) for b in bias)


class NoiseStream(nnx.Module):
    """A key and a count of draws: the n-th call returns `fold_in(key, n)`.

    Not an `nnx.RngStream`, which `nnx.split_rngs` would split anew at each call of a model that scans its layers and
    splits its dropout keys there. Its variables are `nnx.RngKey` and `nnx.RngCount` with tag "noise".

    Args:
        key: a typed PRNG key, or keys [L] for L stacked layers.
    """

    def __init__(self, key: jax.Array):
        self.key = nnx.RngKey(key, tag="noise")
        self.count = nnx.RngCount(jnp.zeros(key.shape, jnp.uint32), tag="noise")

    def __call__(self, *, advance: bool = True) -> jax.Array:
        """The next key; with `advance=False` it stays the next."""
        key = self.key[...]
        if key.shape:
            raise ValueError(
                f"this layer has the noise keys of a whole stack, shape {key.shape}, where it needs its own: the stack "
                "is mapped over its parameters but not over its noise. Map nnx.RngState as well, as in "
                "nnx.StateAxes({(nnx.Param, nnx.RngState): 0, ...: None}), or the whole module with in_axes=0"
            )
        if advance:
            self.count[...] += 1
            return jax.random.fold_in(key, self.count[...] - 1)
        return jax.random.fold_in(key, self.count[...])


class KeyedDotGeneral(nnx.Module):
    """A `dot_general` with a random stream of its own, for recipes that round stochastically.

    The noise of call c is drawn with `fold_in(key, c)`, so it depends on the layer's key and on how many calls went
    before, never on the mesh. The stream is ordinary NNX state (`nnx.RngState`): stacked layers stack it, one key each;
    `nnx.jit`, `nnx.scan` and `nnx.remat` carry its count, and a rematerialized call redraws what it drew. A raw
    `jax.jit` that closes over the module cannot, and Flax raises `TraceContextError`; pass the module's state in and
    out, or pin the count to the training step with `set_noise_step`.

    Args:
        dot: the product and its recipe.
        key: a typed PRNG key, or keys [L] for L stacked layers; or the stream of another product, to go on with it.
    """

    def __init__(self, dot: DotGeneral, key: jax.Array | NoiseStream):
        self.dot = dot
        self.stream = key if isinstance(key, NoiseStream) else NoiseStream(key)
        self.deterministic = False  # `module.eval()` sets it: evaluation reads the stream and does not advance it

    def set_view(self, deterministic: bool | None = None) -> None:
        """Used by `nnx.view`.

        Args:
            deterministic: read the stream and do not advance it, as after `module.eval()`.
        """
        if deterministic is not None:
            self.deterministic = deterministic

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """`jax.lax.dot_general` under the recipe, with the next key of the stream."""
        key = self.stream(advance=not self.deterministic)
        return self.dot(lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding, key=key)


class QuantizedWeight(nnx.Variable):
    """What a backend made of a kernel: a function of it, and so neither a parameter nor part of a checkpoint."""


class PreparedDotGeneral(nnx.Module):
    """A `dot_general` whose right operand was quantized beforehand; `prepare_weights` puts it into layers.

    It gives the numbers of `product`, forward and backward, as long as it is called with the kernel that was prepared:
    gradients go to the operand it is called with.

    Args:
        product: the product without preparation.
        weight: from `DotGeneral.prepare_rhs`; for stacked layers, a stack of them.
    """

    def __init__(self, product: DotGeneral | KeyedDotGeneral, weight: Prepared):
        self.product: Any = nnx.data(product) if isinstance(product, nnx.Module) else product
        self.weight = QuantizedWeight(weight.without_array())

    @property
    def dot(self) -> DotGeneral:
        """The product and its recipe, without preparation and without noise."""
        return getattr(self.product, "dot", self.product)

    def __call__(self, lhs: Any, rhs: jax.Array, dimension_numbers: Any, *args: Any, **options: Any) -> jax.Array:
        """`jax.lax.dot_general` under the recipe; `rhs` is the kernel that was prepared."""
        weight = self.weight.get_value().with_array(rhs)
        return self.product(lhs, weight, dimension_numbers, *args, **options)


def unprepared(product: Any) -> Any:
    """The product that quantizes in each call: that of a `PreparedDotGeneral`, and any other as it is."""
    return product.product if isinstance(product, PreparedDotGeneral) else product


def set_noise_step(model: nnx.Module, step: jax.Array | int) -> None:
    """Set the count of every noise stream in `model`, in place, so that noise is a function of (key, layer, step).

    A functional train step calls it on the module it has just merged and drops the counts afterwards; a resumed run
    then draws what the uninterrupted one drew. A model without stochastic recipes is left as it is.

    Args:
        model: the module, created or merged in the current trace.
        step: scalar; with gradient accumulation, the number of the micro-batch.
    """
    for _, module in nnx.iter_modules(model):
        if isinstance(module, NoiseStream):
            count = module.count
            count[...] = jnp.broadcast_to(jnp.asarray(step, count.dtype), count.shape)


def product(recipe: Recipe, backend: str | None, rngs: nnx.Rngs) -> DotGeneral | KeyedDotGeneral:
    """The `dot_general` of `recipe`; only a stochastic recipe draws from `rngs`, its stream "noise"."""
    dot = DotGeneral(recipe, backend)
    return KeyedDotGeneral(dot, rngs.noise()) if recipe.needs_key else dot
