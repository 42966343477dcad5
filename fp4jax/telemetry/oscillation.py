"""Weights that hop to and fro between two values of the grid instead of settling (TetraJet, arXiv:2502.20853)."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fp4jax.nn.einsum import parse_equation
from fp4jax.nn.layers import find_layers
from fp4jax.nn.runs import BlockwiseDotGeneral, equal_runs
from fp4jax.quantize import QuantSpec, quantize
from fp4jax.recipe import Recipe
from fp4jax.rounding import NEAREST_EVEN
from fp4jax.telemetry.instrument import product_recipes, products
from fp4jax.typing import Array, Axis


class Trace(NamedTuple):
    """What is remembered of a weight between snapshots; three bytes an entry.

    Attributes:
        values: bfloat16, the values of the grid it stood at.
        direction: int8, which way it last moved: 1, -1, or 0 if it never has.
    """

    values: Array
    direction: Array


def start_trace(w: Array, spec: QuantSpec, *, axis: Axis) -> Trace:
    """The trace of ``w`` at the first snapshot."""
    values = _values(w, spec, axis)
    return Trace(values, jnp.zeros(values.shape, jnp.int8))


def follow(trace: Trace, w: Array, spec: QuantSpec, *, axis: Axis) -> tuple[Trace, dict[str, Array]]:
    """The trace at the next snapshot, and what happened since the last. With v the values of the grid:

        changed   share of the entries with v ≠ v_before
        flipped   share of those entries that moved against their last move: up after down, or down after up

    A weight that trains toward a value far away changes and does not flip; one that hovers at a midpoint flips. Weights
    are compared in units of the grid, as rounded to nearest: a scale that moves can move them.

    Args:
        trace: from the last snapshot.
        w: float32, bfloat16 or float16 weights.
        spec: what they are quantized to.
        axis: the contraction axis or axes.

    Returns:
        The new trace, and float32 scalars.

    Example:
        >>> import fp4jax, jax.numpy as jnp
        >>> spec = fp4jax.QuantSpec(fp4jax.E2M1)
        >>> trace = start_trace(jnp.array([6.0, 2.4, 1.0]), spec, axis=-1)
        >>> for weight in (2.6, 2.4):
        ...     trace, rates = follow(trace, jnp.array([6.0, weight, 1.0]), spec, axis=-1)
        ...     print({name: round(float(rate), 3) for name, rate in rates.items()})
        {'changed': 0.333, 'flipped': 0.0}
        {'changed': 0.333, 'flipped': 0.333}

    References:
        Nagel et al., Overcoming Oscillations in Quantization-Aware Training, arXiv:2203.11086, §3; Chen et al.,
        TetraJet, arXiv:2502.20853, which finds oscillation the main loss of MXFP4 training.
    """
    values = _values(w, spec, axis)
    move = jnp.sign(values.astype(jnp.float32) - trace.values.astype(jnp.float32)).astype(jnp.int8)
    direction = jnp.where(move == 0, trace.direction, move)
    size = np.float32(max(1, values.size))
    flipped = (move != 0) & (move == -trace.direction)
    rates = {
        "changed": jnp.sum(move != 0, dtype=jnp.int32).astype(jnp.float32) / size,
        "flipped": jnp.sum(flipped, dtype=jnp.int32).astype(jnp.float32) / size,
    }
    return Trace(values, direction), rates


class Oscillation:
    """Follows the quantized weights of a model from snapshot to snapshot.

        oscillation = telemetry.Oscillation(model)
        …                               # some steps
        rates = oscillation(model)      # {"layers.mlp.up[3]": {"changed": .012, "flipped": .0004}, …}

    It keeps three bytes a weight. A head that is tied to the embedding has no weight of its own and is left out.

    Args:
        model: the first snapshot: an NNX model with quantized products.

    Raises:
        ValueError: no quantized weight; on a call, for another model.

    Example:
        >>> import fp4jax
        >>> model = fp4jax.nn.Linear(64, 32, recipe=fp4jax.recipes.fp4(), rngs=nnx.Rngs(0))
        >>> oscillation = Oscillation(model)
        >>> model.kernel[...] = -model.kernel[...]
        >>> oscillation(model)[""]["flipped"], oscillation(model)[""]["changed"]
        (0.0, 0.0)
    """

    def __init__(self, model: nnx.Module):
        self._weights = weights_of(model)
        if not self._weights:
            raise ValueError("the model has no quantized weight to follow; give its layers a recipe with fprop.rhs")
        self._traces = jax.jit(self._start)(_kernels(model, self._weights))
        self._follow = jax.jit(self._follow_all, donate_argnums=0)

    def __call__(self, model: nnx.Module) -> dict[str, dict[str, float]]:
        """What happened since the last snapshot, by layer; ``model`` is the new one. Waits for the device."""
        if weights_of(model) != self._weights:
            raise ValueError("the model is not the one that was followed: its quantized layers or recipes differ")
        self._traces, rates = self._follow(self._traces, _kernels(model, self._weights))
        found: dict[str, dict[str, float]] = {}
        for weight, part in zip(self._weights, jax.device_get(rates), strict=True):
            for offset in np.ndindex(part["changed"].shape):
                index = [offset[0] + weight.start, *offset[1:]] if offset else []
                label = f"{weight.layer}[{','.join(map(str, index))}]" if index else weight.layer
                found[label] = {name: float(values[offset]) for name, values in part.items()}
        return found

    def _start(self, kernels: list[Array]) -> list[Trace]:
        return [
            _over_stack(functools.partial(start_trace, spec=w.spec, axis=w.axis), w)(kernel)
            for w, kernel in zip(self._weights, kernels, strict=True)
        ]

    def _follow_all(self, traces: list[Trace], kernels: list[Array]) -> tuple[list[Trace], list[dict[str, Array]]]:
        pairs = [
            _over_stack(functools.partial(follow, spec=w.spec, axis=w.axis), w)(trace, kernel)
            for w, trace, kernel in zip(self._weights, traces, kernels, strict=True)
        ]
        return [trace for trace, _ in pairs], [rates for _, rates in pairs]


@dataclasses.dataclass(frozen=True)
class Weight:
    """A quantized weight of a model, or a run of blocks of one.

    Attributes:
        layer: path of its layer.
        stacked: how many leading axes stand for a stack.
        start, stop: blocks of a stack, along its first axis.
        spec: what fprop quantizes it to.
        axis: contraction axes, negative.
    """

    layer: str
    stacked: int
    start: int
    stop: int | None
    spec: QuantSpec
    axis: tuple[int, ...]


def weights_of(model: nnx.Module) -> list[Weight]:
    """The quantized weights of a model, in the order of its layers."""
    layers = {id(getattr(found.module, found.kind.product)): found for found in find_layers(model) if found.kind}
    layers |= {id(found.module): found for found in find_layers(model) if found.kind}
    weights = []
    for path, module in products(model):
        found = layers.get(id(module))
        owner = found.module if found else module
        kernel = getattr(owner, "kernel", None)
        if kernel is None:
            continue
        axis, stack = _axis(owner), () if found is None else found.stack
        layer = path.removesuffix("einsum_op").rstrip(".")
        for start, stop, recipe in _runs(module.dot_general, stack):
            if recipe is not None and recipe.weight_spec is not None:
                spec = dataclasses.replace(recipe.weight_spec, rounding=NEAREST_EVEN)
                weights.append(Weight(layer, len(stack), start, stop, spec, axis))
    return weights


def _runs(product: Any, stack: tuple[int, ...]) -> list[tuple[int, int | None, Recipe | None]]:
    if isinstance(product, BlockwiseDotGeneral):
        return list(equal_runs(product.recipes))
    return [(0, stack[0] if stack else None, product_recipes(product)[0])]


def _axis(layer: Any) -> tuple[int, ...]:
    """The contraction axes of the kernel of a layer."""
    match layer:
        case nnx.LinearGeneral():
            first = len(layer.out_features) + len(layer.in_features)
            return tuple(range(-first, -len(layer.out_features)))
        case nnx.Einsum():
            rank = len(layer.kernel_shape)
            operands, _, out = layer.einsum_str.replace(" ", "").partition("->")
            lhs = operands.partition(",")[0].replace("...", "")
            lhs, rhs, out = parse_equation(layer.einsum_str, len(lhs), rank)
            return tuple(i - rank for i, letter in enumerate(rhs) if letter in lhs and letter not in out)
    return (-2,)


def _kernels(model: nnx.Module, weights: list[Weight]) -> list[Array]:
    modules: dict[str, Any] = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    kernels = [modules[w.layer].kernel[...] for w in weights]
    return [k[w.start : w.stop] if w.stacked else k for w, k in zip(weights, kernels, strict=True)]


def _over_stack(fn: Any, weight: Weight) -> Any:
    for _ in range(weight.stacked):
        fn = jax.vmap(fn)
    return fn


def _values(w: Array, spec: QuantSpec, axis: Axis) -> Array:
    """Values of the grid, in a dtype that holds those of every format of at most eight bits."""
    nearest = dataclasses.replace(spec, rounding=NEAREST_EVEN)
    return quantize(w, nearest, axis=axis).values.astype(jnp.bfloat16)
