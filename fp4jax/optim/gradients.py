"""Gradients rounded to FP8, one scale a tensor, with FP8-LM's automatic gain."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fp4jax.exact import as_float32, magnitude
from fp4jax.optim.stochastic import HashedStochastic, leaf_words, step_words
from fp4jax.optim.storage import (
    EIGHT_BITS,
    check_floating,
    is_quantized,
    resolve_dtype,
    shared_axes,
)
from fp4jax.quantize import QuantSpec, grid_values, scaled_input
from fp4jax.rounding import NEAREST_EVEN
from fp4jax.scaling import AbsMax, PerTensor
from fp4jax.typing import Array, ArrayLike, AxisName, Key

# Above this the largest value would be clipped to below the smallest normal one.
_MOST_GAIN = 2.0**15


class CastGradientsState(NamedTuple):
    """State of ``cast_gradients``.

    Attributes:
        count: int32, steps taken.
        gain: float32 scalar for each leaf. The largest gradient lands on gain · (largest value of the format).
    """

    count: Array
    gain: optax.Params


def cast_gradients(
    dtype: object = "float8_e4m3fn",
    *,
    stochastic: bool = False,
    seed: int | Array | Key = 0,
    threshold: ArrayLike = 1e-5,
    window: ArrayLike = 1000,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformation:
    r"""Rounds each gradient to an FP8 format under one scale, and hands on what the FP8 numbers stand for, in float32:

        scale = max|g| / (gain · M)        g ← scale · clip(round(g / scale), ±M)

    M is the largest value of the format. The gain starts at 1, where nothing saturates. It doubles over ``window``
    steps, which gives small gradients a finer grid, and halves as soon as more than ``threshold`` of the gradients that
    are not zero would land beyond M. A leaf that holds NaN or infinity becomes NaN and leaves its gain as it was.

    Args:
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        stochastic: round stochastically, else to nearest, ties to even.
        seed: seed, or key, of the stochastic rounding.
        threshold: part of the gradients that may saturate; .001 % as in FP8-LM.
        window: steps in which the gain doubles.
        axis_name: mesh axes that share a scale inside ``jax.shard_map(check_vma=False)``; otherwise it is known.

    Returns:
        A transformation whose updates are float32.

    Raises:
        ValueError: for a dtype that is not FP8.
        TypeError: on ``init``, for parameters that are not float32, bfloat16 or float16.

    Example:
        >>> import jax.numpy as jnp
        >>> from fp4jax.optim import cast_gradients
        >>> tx = cast_gradients()
        >>> gradients = {"a": jnp.array([448.0, 3.2]), "b": jnp.array([1e-7])}
        >>> updates, state = tx.update(gradients, tx.init(gradients))
        >>> updates["a"].tolist()
        [448.0, 3.25]

    References:
        Peng et al., *FP8-LM*, arXiv:2310.18313, §2.1 (automatic scaling; there the threshold is .001 % and the window
        1000 steps); Wang et al., arXiv:2501.17116, §4.1.
    """
    format = EIGHT_BITS[resolve_dtype("dtype", dtype, EIGHT_BITS)]
    spec = QuantSpec(format, PerTensor(axis_name), AbsMax(), HashedStochastic() if stochastic else NEAREST_EVEN)
    beyond = float(format.grid[-1] + (format.grid[-1] - format.grid[-2]) / 2)

    def init(params):
        def one(path, p):
            check_floating(path, p)
            return jnp.ones([], jnp.float32)

        gain = jax.tree_util.tree_map_with_path(one, params, is_leaf=is_quantized)
        return CastGradientsState(jnp.zeros([], jnp.int32), gain)

    def cast(g, gain, words):
        x = as_float32(g)
        x = x.reshape(x.shape or (1,))
        amax = spec.granularity.reduce_max(magnitude(x), (-1,))
        scales = spec.scale(amax * (1 / gain), format)
        values = grid_values(x, scales, spec, (-1,), words)

        saturated = jnp.sum(jnp.abs(scaled_input(x, scales, spec, (-1,))) > beyond, dtype=jnp.float32)
        counted = jnp.sum(x != 0, dtype=jnp.float32)
        if names := shared_axes(x, axis_name):
            saturated, counted = lax.psum((saturated, counted), names)
        moved = jnp.where(
            saturated > jnp.float32(threshold) * counted,
            gain / 2,
            jnp.minimum(gain * jnp.exp2(1 / jnp.asarray(window, jnp.float32)), _MOST_GAIN),
        )
        informed = jnp.isfinite(amax.reshape(())) & (counted > 0)
        return (values * spec.scale.decode(scales.scale, None)).reshape(g.shape), jnp.where(informed, moved, gain)

    def update(updates, state, params=None):
        del params
        words = step_words(seed, state.count)
        paths, treedef = jax.tree_util.tree_flatten_with_path(updates)
        gains = treedef.flatten_up_to(state.gain)
        pairs = [cast(g, gain, leaf_words(words, path)) for (path, g), gain in zip(paths, gains, strict=True)]
        updates, gain = (treedef.unflatten([pair[i] for pair in pairs]) for i in (0, 1))
        return updates, CastGradientsState(jnp.asarray(optax.safe_increment(state.count)), gain)

    return optax.GradientTransformation(init, update)
