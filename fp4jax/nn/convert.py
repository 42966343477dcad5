"""`quantize_model`: give the layers of any NNX model their recipes, by rules over their paths."""

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from fp4jax.dot import DotGeneral
from fp4jax.dot.registry import check_name
from fp4jax.nn.layers import Found, find_layers, install, refusal, walk
from fp4jax.nn.product import KeyedDotGeneral, NoiseStream, unprepared
from fp4jax.nn.rules import Rules, resolve_blocks
from fp4jax.nn.runs import BlockwiseDotGeneral
from fp4jax.recipe import Recipe


def quantize_model[M: nnx.Module](
    model: M, rules: Rules, *, rngs: nnx.Rngs | None = None, backend: str | None = None
) -> M:
    """Give every linear layer of `model` the recipe that `rules` say, in place, and return the model.

    The layers are `nnx.Linear`, `LinearGeneral` and `Einsum`, wherever they stand (so the projections of
    `nnx.MultiHeadAttention`, the gates of `nnx.LSTMCell`), those of `fp4jax.nn`, their subclasses, and what has a row
    in `fp4jax.nn.LAYERS`. All else, such as convolutions and embeddings, stays in high precision; `describe_model`
    lists it. Parameters are not touched: their values, paths and metadata remain those of the unquantized model, and so
    do its checkpoints. Kernels reach the quantizer in their own dtype, never rounded to the layer's `dtype` first.

    Call it again to change recipes, at any step of a training run; None takes a recipe away, and weights that the model
    used by `use_prepared` are let go of. If it raises, nothing was changed. To keep the model as it was, quantize
    `nnx.clone(model)`.

    A path names a layer as attributes and indices do: "blocks.0.attention.query", "" for a model that is itself a
    layer. Layers that `nnx.vmap` stacked have one path and one recipe for all of the stack, unless the model says that
    it runs them by `split_runs`.

    Args:
        model: any NNX model.
        rules: ordered (pattern, recipe or None) pairs; see `resolve_rules`, `Blocks` and `keep_blocks`.
        rngs: needed by stochastic recipes: their stream "noise" (or the default one) seeds each layer's noise, by the
            layer's path. None goes on with the noise of a model that was quantized before.
        backend: backend of the recipes, None to choose.

    Raises:
        TypeError: `model` is no NNX module, or a rule no pair of pattern and recipe.
        ValueError: a rule decides nothing, or a layer is undecided; a layer cannot follow a recipe; the blocks of a
            stack, or the two paths of a shared layer, get different recipes; noise is needed and `rngs` is None. The
            message names rule or layer, and what would work.

    Example:
        >>> rngs = nnx.Rngs(0)
        >>> model = nnx.Sequential(nnx.Linear(64, 128, rngs=rngs), nnx.relu, nnx.Linear(128, 10, rngs=rngs))
        >>> model = quantize_model(model, [("layers.2", None), (".*", fp4jax.recipes.fp4())])
        >>> model(jnp.ones((4, 64))).shape
        (4, 10)
    """
    _check(model, rngs, backend)
    layers = find_layers(model)
    able = [found for found in layers if found.kind is not None]
    for found in layers:
        if found.kind is None and found.product is not None:
            raise ValueError(
                f"{found.path!r} multiplies by fp4jax already, but its class {found.name} has no row in "
                "fp4jax.nn.LAYERS, so no rule could change that; add one"
            )
    stacks = _splittable(model)
    decided = resolve_blocks(
        rules,
        {path: found.stack[0] if found.stack else None for found in able for path in found.paths},
        others={path: found.name for found in layers if found.kind is None for path in found.paths},
        stacks=stacks,
    )
    plan = [(found, _agreed(found, [decided[path] for path in found.paths], stacks)) for found in able]
    products = [(found, recipes, _product(found, recipes, rngs, backend)) for found, recipes in plan]
    for found, recipes, product in products:
        if product is not None or found.product is not None:
            install(found, product, recipes[0] if len(set(recipes)) == 1 else None)
    return model


def noise_key(rngs: nnx.Rngs, path: str, stack: Sequence[int] = ()) -> jax.Array:
    """The noise key of the layer at `path`, or its keys [stack]: a function of the "noise" seed, path and block only.

    Nothing is drawn from `rngs`, so that the noise of one layer does not move when a rule changes another's recipe.
    """
    if "noise" not in rngs and "default" not in rngs:
        raise ValueError("rngs has neither a stream 'noise' nor a default one; pass nnx.Rngs(noise=0), or another seed")
    seed = rngs.noise.key[...]
    if seed.shape:
        raise ValueError(
            f"rngs holds noise keys of shape {seed.shape}; quantize_model needs one, as in nnx.Rngs(noise=0)"
        )
    key = jax.random.fold_in(seed, zlib.crc32(path.encode()))
    if not stack:
        return key
    size = 1
    for length in stack:
        size *= length
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(size)).reshape(stack)


def _check(model: Any, rngs: Any, backend: str | None) -> None:
    if isinstance(model, linen.Module):
        raise TypeError("model is a Linen module; fp4jax.linen.quantize_model takes those")
    if not isinstance(model, nnx.Module):
        hint = "; create it first" if isinstance(model, type) else ""
        raise TypeError(f"model must be a flax.nnx.Module, got {model if hint else type(model)!r}{hint}")
    if rngs is not None and not isinstance(rngs, nnx.Rngs):
        raise TypeError(f"rngs must be nnx.Rngs, such as nnx.Rngs(noise=0), or None; got {rngs!r}")
    check_name(backend)


def _splittable(model: nnx.Module) -> tuple[str, ...]:
    """Paths of the stacks that the model itself cuts into runs."""
    declared = ((path, getattr(type(module), "splits_runs", ())) for path, module in walk(model))
    return tuple(f"{path}.{name}".removeprefix(".") for path, names in declared for name in names)


def _agreed(
    found: Found, several: Sequence[tuple[Recipe | None, ...]], stacks: Sequence[str]
) -> tuple[Recipe | None, ...]:
    """The recipes of a layer, one a block, after checking that it can follow them."""
    recipes = several[0]
    shown = f"layer {found.path!r}" if found.path else "the model itself"
    for path, other in zip(found.paths, several, strict=True):
        if other != recipes:
            raise ValueError(
                f"{shown} and layer {path!r} are one shared module, and the rules give it {recipe_names(recipes)} and "
                f"{recipe_names(other)}; give both paths the same"
            )
    mixed = len(set(recipes)) > 1
    if mixed and not any(f"{found.path}.".startswith(f"{stack}.") for stack in stacks):
        raise ValueError(
            f"{shown} is a stack of {len(recipes)} blocks (kernel {found.kernel.shape}) that run as one, so they "
            f"share a recipe, but the rules give them {recipe_names(recipes)}. Give all blocks the same, or build them "
            "one by one, in an nnx.List; a model of your own can run its stack by fp4jax.nn.split_runs and say so in "
            "splits_runs"
        )
    if any(recipe is not None for recipe in recipes):
        reason = refusal(found)
        if reason is not None:
            raise ValueError(
                f"{shown} cannot follow recipe {recipe_names(recipes)}: {reason}. Give it None in the rules"
            )
    return recipes


def _product(found: Found, recipes: tuple[Recipe | None, ...], rngs: nnx.Rngs | None, backend: str | None) -> Any:
    """What the layer is to hold; None for what it holds without a recipe."""
    mixed = len(set(recipes)) > 1
    if not mixed and recipes[0] is None:
        return None
    before = unprepared(found.product)
    stream = None
    stochastic = next((recipe for recipe in recipes if recipe is not None and recipe.needs_key), None)
    if stochastic is not None:
        stream = _stream(found, stochastic, rngs, getattr(before, "stream", None))
    if mixed:
        product = BlockwiseDotGeneral(recipes, backend, stream)
    else:
        assert recipes[0] is not None
        dot = DotGeneral(recipes[0], backend)
        product = dot if stream is None else KeyedDotGeneral(dot, stream)
    if isinstance(product, nnx.Module) and hasattr(before, "deterministic"):
        product.deterministic = before.deterministic
    return product


def _stream(found: Found, recipe: Recipe, rngs: nnx.Rngs | None, before: NoiseStream | None) -> NoiseStream:
    if rngs is None:
        if before is None:
            raise ValueError(
                f"rngs=None, but layer {found.path!r} is to round stochastically (recipe {recipe.name!r}); pass "
                "rngs=nnx.Rngs(noise=0), or another seed"
            )
        return before
    return NoiseStream(noise_key(rngs, found.path, found.stack))


def recipe_names(recipes: Sequence[Recipe | None]) -> str:
    """The different recipes among these, in words."""
    names = ["None" if recipe is None else recipe.name for recipe in dict.fromkeys(recipes)]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
