"""Weights quantized once, for all the calls that share them: the microbatches of a step."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax import lax

from fp4jax.dot import DotGeneral, Prepared
from fp4jax.nn.layers import Found, calls_as_known, find_layers, replace_product
from fp4jax.nn.product import KeepKernelDtype, KeyedDotGeneral, PreparedDotGeneral, unprepared

type PreparedWeights = Mapping[str, Prepared]
"""Quantized kernels by the paths of their layers; a pytree. From `prepare_weights`, for `use_prepared`."""


def prepare_weights(model: nnx.Module) -> PreparedWeights:
    """Quantize the kernel of every linear layer of `model` as its recipe says, to be used by `use_prepared`.

    A step that accumulates gradients prepares the weights once and uses them in all its microbatches. Losses and
    gradients keep every bit: the estimator's factor is applied to the weight itself, in each microbatch. The values
    cost memory as long as they are used: two bytes a weight on the "hopper" backend, one on "xla" (two to four where
    scales differ along the contraction), and a scale a vector.

    Layers that quantize in each call, as before, are those whose recipe rounds weights stochastically, so that each
    call draws its own noise; stacked layers whose blocks follow different recipes; layers whose row in `LAYERS` does
    not say what their product contracts; and layers that may give their product another array than the kernel: those
    with a `promote_dtype` other than `KeepKernelDtype`, and subclasses with a `__call__` but no row of their own.

    Args:
        model: the model, its parameters those of the step.

    Returns:
        Quantized kernels by path. Nothing is differentiated through them.

    Raises:
        TypeError: `model` is no NNX module.

    Example:
        >>> recipe = fp4jax.recipes.fp4()
        >>> model = nnx.Sequential(*(fp4jax.nn.Linear(8, 8, recipe=recipe, rngs=nnx.Rngs(i)) for i in range(2)))
        >>> prepared = prepare_weights(model)
        >>> sorted(prepared)
        ['layers.0', 'layers.1']
        >>> graphdef, params = nnx.split(model)
        >>> @jax.grad
        ... def gradient(params, x):
        ...     return use_prepared(nnx.merge(graphdef, params), prepared)(x).sum()
        >>> gradient(params, jnp.ones((2, 8))).layers[0].kernel.shape
        (8, 8)
    """
    _check(model)
    prepared = {}
    for found in find_layers(model):
        axes = _contraction(found)
        if axes is not None:
            prepared[found.path] = _prepare(_dot(found.product), found.kernel[...], axes, len(found.stack))
    return prepared


def use_prepared[M: nnx.Module](model: M, prepared: PreparedWeights) -> M:
    """Let the layers of `model` use weights quantized beforehand, in place, and return the model.

    It is meant for a copy that lives as long as the weights stay as they are, such as a model merged inside a function
    to differentiate. A model that outlives them goes on with the old values until it is given new ones, or `{}`, with
    which every layer quantizes in each call again; so it does after `quantize_model`.

    Args:
        model: a model like the one that was prepared. That its kernels hold the numbers that were prepared is the
            caller's word.
        prepared: from `prepare_weights`; it takes the place of what the model has used so far.

    Raises:
        TypeError: `model` is no NNX module, or `prepared` holds something else than prepared weights.
        ValueError: a path of `prepared` names no layer that it fits.
    """
    _check(model)
    if not isinstance(prepared, Mapping):
        raise TypeError(f"prepared={prepared!r} must come from prepare_weights, or be {{}} for none")
    layers = {found.path: found for found in find_layers(model)}
    for path, weight in prepared.items():
        if not isinstance(weight, Prepared):
            raise TypeError(f"prepared[{path!r}]={weight!r} must come from prepare_weights")
        found = layers.get(path)
        if found is None or _contraction(found) is None or _dot(found.product).recipe != weight.recipe:
            raise ValueError(
                f"prepared has a weight for {path!r} under recipe {weight.recipe.name!r}, and the model no such layer; "
                "prepare the weights of a model of the same structure and recipes"
            )
    for path, found in layers.items():
        if path in prepared:
            replace_product(found, PreparedDotGeneral(unprepared(found.product), prepared[path]))
        elif isinstance(found.product, PreparedDotGeneral):
            replace_product(found, found.product.product)
    return model


def _check(model: object) -> None:
    if not isinstance(model, nnx.Module):
        raise TypeError(f"model must be a flax.nnx.Module, got {type(model)!r}")


def _dot(product: Any) -> DotGeneral:
    return product if isinstance(product, DotGeneral) else product.dot


def _contraction(found: Found) -> tuple[int, ...] | None:
    """The axes along which the layer's kernel is quantized, negative; None for one that is not prepared."""
    if found.kind is None or found.kernel is None:
        return None
    if not isinstance(unprepared(found.product), DotGeneral | KeyedDotGeneral):
        return None
    if found.kind.promotes and not isinstance(found.module.promote_dtype, KeepKernelDtype):
        return None  # which may round the kernel first
    if not calls_as_known(type(found.module)):
        return None  # which may compute something of the kernel first
    spec, axes = _dot(found.product).recipe.weight_spec, found.kind.contraction(found.module)
    if spec is None or spec.needs_key or not axes:
        return None
    return tuple(axis - len(found.kind.kernel_shape(found.module)) for axis in axes)


def _prepare(dot: DotGeneral, kernel: jax.Array, axes: tuple[int, ...], stacked: int) -> Prepared:
    """One layer after another, so that what is only needed on the way is that of one."""
    if stacked:
        return lax.map(lambda kernel: _prepare(dot, kernel, axes, stacked - 1), kernel)
    prepared = dot.prepare_rhs(kernel, axes)
    assert isinstance(prepared, Prepared)  # since the recipe quantizes weights
    return prepared.without_array()
