"""The gradient of a batch: over microbatches one after another, and over devices in as few bytes as asked.

On an Explicit mesh a gradient needs no code for its mean over devices: products sum over split rows by themselves, in
float32. What is here for that is the mean over "data" in bfloat16 or FP8. The loss is then differentiated inside a
`shard_map` over "data", where each device sees its own rows and sums nothing. Scales of tensors and quantiles of OCC
still agree over all of it, so that everything is quantized to the same values.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from fp4jax.blocks import explicit_sharding
from fp4jax.parallel import AXES, fp8_mean
from fp4jax.quantize import QuantSpec
from fp4jax.recipe import Gemm, Recipe
from fp4jax.scaling import PerTensor, PerVector, TwoLevel
from fp4jax.train.errors import ConfigError

DATA = "data"

type Gradient = Callable[..., tuple[jax.Array, Any]]
"""(params, noise, tokens [b, t + 1], step) -> (loss, gradient)."""


def nothing_prepared(params: Any, noise: Any) -> dict[str, Any]:
    """For `loss_fn`: each microbatch quantizes its weights."""
    del params, noise
    return {}


def accumulated_gradient(
    loss_fn: Callable[..., jax.Array], accumulate: int, prepare: Callable[..., Any] = nothing_prepared
) -> Gradient:
    """Loss and gradient, averaged over microbatches.

    Args:
        loss_fn: (params, noise, tokens, noise_step, prepared) -> loss.
        accumulate: number of microbatches.
        prepare: (params, noise) -> prepared: what all microbatches share. Nothing is differentiated through it.
    """

    def gradient(params: Any, noise: Any, tokens: jax.Array, step: jax.Array) -> tuple[jax.Array, Any]:
        if accumulate == 1:
            return jax.value_and_grad(loss_fn)(params, noise, tokens, step, {})
        prepared = prepare(params, noise)

        def add(total, part):
            number, rows = part
            one = jax.value_and_grad(loss_fn)(params, noise, rows, step * accumulate + number, prepared)
            return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), total, one), None

        # The zeros are made of what they are added to: its sharding is part of its type.
        zeros = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), params)
        start = jnp.float32(0), zeros
        total, _ = lax.scan(add, start, (jnp.arange(accumulate), microbatches(tokens, accumulate)))
        return jax.tree.map(lambda x: x / accumulate, total)

    return gradient


def reduced_gradient(
    loss_fn: Callable[..., jax.Array],
    accumulate: int,
    reduction: str,
    prepare: Callable[..., Any] = nothing_prepared,
) -> Gradient:
    """`accumulated_gradient`, its mean over the mesh axis "data" sent in another dtype.

    Args:
        loss_fn: a mean over the rows it is given.
        accumulate: number of microbatches.
        reduction: "float32" leaves it to the products. "bfloat16" rounds each device's gradient and adds in bfloat16.
            "fp8" is `fp4jax.parallel.fp8_mean`: one byte an element on the wire, summed in float32.
        prepare: as in `accumulated_gradient`.

    Returns:
        A function that must be traced under a mesh with the axis "data", unless reduction is "float32".
    """
    if reduction == "float32":
        return accumulated_gradient(loss_fn, accumulate, prepare)

    def reduced(params: Any, noise: Any, tokens: jax.Array, step: jax.Array) -> tuple[jax.Array, Any]:
        mesh = jax.sharding.get_abstract_mesh()
        devices = mesh.shape[DATA]

        def local(params, noise, tokens, step):
            # The device's share of the whole batch's loss: backward then quantizes what one device would.
            share = accumulated_gradient(lambda *args: loss_fn(*args) / devices, accumulate, prepare)
            loss, g = share(params, noise, tokens, step)
            return lax.psum(loss, DATA), jax.tree.map(lambda x: x[None], g)

        whole = PartitionSpec()
        loss, stacked = jax.shard_map(
            local,
            in_specs=(whole, whole, PartitionSpec(DATA), whole),
            out_specs=(whole, PartitionSpec(DATA)),
            axis_names={DATA},
            check_vma=False,  # attention kernels do not say over which axes their results vary
        )(params, noise, tokens, step)
        specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, stacked)
        sums = jax.tree.map(lambda spec: PartitionSpec(*spec[1:]), specs)
        return loss, jax.shard_map(
            lambda tree: REDUCTIONS[reduction](jax.tree.map(lambda x: x[0], tree)),
            in_specs=(specs,),
            out_specs=sums,
            axis_names=set(AXES),
            check_vma=False,
        )(stacked)

    return reduced


def across_data(recipe: Recipe) -> Recipe:
    """The recipe for use inside `shard_map` over "data": scales and quantiles are those of all devices' rows.

    Raises:
        ConfigError: the recipe shares an outer scale over a tensor (`TwoLevel`), which no axis can be named for, or has
            blocks along the rows, which a device would cut at other places.
    """

    def spec(operand: Any, product: str, side: str) -> Any:
        if not isinstance(operand, QuantSpec):
            return operand
        if isinstance(operand.scale, TwoLevel):
            raise ConfigError(f"recipe {recipe.name!r} has two-level scales, which need --reduction float32")
        if isinstance(operand.granularity, PerTensor):
            # The weight is the same on all devices.
            axes = () if (product, side) in (("fprop", "rhs"), ("dgrad", "rhs")) else DATA
        elif isinstance(operand.granularity, PerVector) and product == "wgrad":
            axes = DATA  # its vectors run along the rows
        elif product == "wgrad":
            raise ConfigError(f"recipe {recipe.name!r} has blocks along the rows, which need --reduction float32")
        else:
            return operand
        return dataclasses.replace(operand, granularity=dataclasses.replace(operand.granularity, axis_name=axes))

    gemms = {
        name: Gemm(spec(gemm.lhs, name, "lhs"), spec(gemm.rhs, name, "rhs"))
        for name, gemm in (("fprop", recipe.fprop), ("dgrad", recipe.dgrad), ("wgrad", recipe.wgrad))
    }
    occ = recipe.outliers and dataclasses.replace(recipe.outliers, axis_name=DATA)
    return dataclasses.replace(recipe, outliers=occ, **gemms)


def _bfloat16_sum(tree: Any) -> Any:
    return jax.tree.map(lambda x: lax.psum(x.astype(jnp.bfloat16), DATA).astype(jnp.float32), tree)


def _fp8_sum(tree: Any) -> Any:
    devices = lax.axis_size(DATA)
    mean = fp8_mean(tree, DATA, scale_axes=tuple(name for name in AXES if name != DATA))
    return jax.tree.map(lambda x: x * devices, mean)


REDUCTIONS = {"bfloat16": _bfloat16_sum, "fp8": _fp8_sum}
"""Sums over "data" of a tree of local gradients, inside a `shard_map` over all axes."""


def microbatches(tokens: jax.Array, accumulate: int) -> jax.Array:
    """[b, t] -> [accumulate, b / accumulate, t], every accumulate-th row in one.

    So a batch that is split over devices keeps all of them busy in each microbatch.
    """
    shape = (tokens.shape[0] // accumulate, accumulate, *tokens.shape[1:])
    sharding = explicit_sharding(tokens)
    if sharding is None:
        return tokens.reshape(shape).swapaxes(0, 1)
    spec = [*sharding.spec, *[None] * (tokens.ndim - len(sharding.spec))]
    out = NamedSharding(sharding.mesh, PartitionSpec(spec[0], None, *spec[1:]))
    return lax.reshape(tokens, shape, out_sharding=out).swapaxes(0, 1)
