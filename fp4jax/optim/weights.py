"""Model weights in FP8: quantized once, dequantized for the loss, and changed only by ``apply_updates``."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fp4jax.exact import as_float32
from fp4jax.formats import E4M3
from fp4jax.optim.storage import is_quantized
from fp4jax.quantize import QTensor, QuantSpec, quantize
from fp4jax.scaling import PerTensor, PowerOfTwo
from fp4jax.typing import Array

FP8_WEIGHTS = QuantSpec(E4M3, PerTensor(), PowerOfTwo("ceil"))


def quantize_weights(
    params: optax.Params, spec: QuantSpec = FP8_WEIGHTS, mask: Callable[[optax.Params], object] | object = None
) -> optax.Params:
    """Replaces weights with ``QTensor``s of their values.

    Args:
        params: tree of float arrays; a weight is [..., k, n], contracted over k.
        spec: how to quantize. A power-of-two scale (the default) also goes with FP16 master weights.
        mask: tree of bools like ``params``, or a function that gives one: what to quantize. By default every array of
            two or more dimensions, which leaves norms and biases as they are.

    Returns:
        A tree like ``params``.

    Raises:
        ValueError: for a spec that rounds stochastically: equal masters must give equal weights.

    Example:
        >>> import jax.numpy as jnp
        >>> from fp4jax.optim import quantize_weights
        >>> quantize_weights({"kernel": jnp.ones((2, 3)), "scale": jnp.ones(3)})["kernel"].values.dtype.name
        'float8_e4m3fn'
    """
    if spec.needs_key:
        raise ValueError(f"{spec=} rounds stochastically, but equal masters must give equal weights; use NEAREST_EVEN")
    if mask is None:
        mask = jax.tree.map(lambda p: p.ndim >= 2, params)
    elif callable(mask):
        mask = mask(params)
    return jax.tree.map(lambda p, chosen: quantize(p, spec, axis=max(-2, -p.ndim)) if chosen else p, params, mask)


def dequantize_weights(params: optax.Params, dtype: jax.typing.DTypeLike = jnp.float32) -> optax.Params:
    """The arrays that a tree with quantized weights stands for: what the loss is a function of.

    Differentiate with respect to these. The gradient of a ``QTensor`` itself would come in FP8, where 2e-4 is 0.

    Args:
        params: tree of arrays and ``QTensor``s.
        dtype: dtype of what was quantized; other leaves stay as they are.
    """
    return jax.tree.map(lambda p: p.dequantize(dtype) if is_quantized(p) else p, params, is_leaf=is_quantized)


def weight_value(weight: QTensor | Array) -> Array:
    """The float32 value of a weight, rounded as such wherever it is computed.

    The barrier keeps XLA from contracting values · scale with the sum that follows into one FMA: what ``apply_updates``
    adds to must be bit for bit what ``master_weights`` subtracted.
    """
    return lax.optimization_barrier(weight.dequantize()) if isinstance(weight, QTensor) else as_float32(weight)


def apply_updates(params: optax.Params, updates: optax.Updates) -> optax.Params:
    """``optax.apply_updates`` for trees that may hold quantized weights: those are summed in float32, then quantized.

        W ← Q(deq(W) + u)

    With updates of ``master_weights`` the sum is the master weight, so that W = Q(master), bit for bit. A weight whose
    updates are all zero (a skipped step) keeps its codes.

    Args:
        params: tree of arrays and ``QTensor``s.
        updates: tree of arrays: where ``params`` has a ``QTensor``, one of its shape.

    Returns:
        A tree like ``params``, with the same dtypes and specs.

    Example:
        >>> import jax.numpy as jnp
        >>> from fp4jax.optim import apply_updates, quantize_weights
        >>> params = quantize_weights({"w": jnp.array([[1.0, -2.0]])})
        >>> apply_updates(params, {"w": jnp.array([[0.5, 0.5]])})["w"].dequantize().tolist()
        [[1.5, -1.5]]
    """

    def apply(p, u):
        if p is None:
            return None
        if not isinstance(p, QTensor):
            return optax.apply_updates(p, u)
        moved = quantize(weight_value(p) + u, p.spec, axis=p.axis)
        changed = jnp.any(u != 0)
        return jax.tree.map(lambda new, old: jnp.where(changed, new, old), moved, p)

    return jax.tree.map(apply, params, updates, is_leaf=lambda p: p is None or is_quantized(p))
