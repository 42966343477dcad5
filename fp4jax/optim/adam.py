"""Adam with both moments in few bits: ``optax.scale_by_adam`` in float32, between two roundings."""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fp4jax.exact import as_float32
from fp4jax.optim.stochastic import Surviving, Vanishing, step_words
from fp4jax.optim.storage import (
    PLAIN,
    SCALED,
    Storage,
    check_floating,
    resolve_dtype,
)
from fp4jax.scaling import Granularity, PerTensor
from fp4jax.typing import Array, ArrayLike, Key

_MU_DTYPES = (*SCALED, *PLAIN)
# FP8 has too few mantissa bits for a second moment: at b2 = .999 its noise would be larger than v.
_NU_DTYPES = (np.dtype(np.float16), *PLAIN)


class ScaleByLowPrecisionAdamState(NamedTuple):
    """State of ``scale_by_low_precision_adam``; each tree is like the parameters.

    Attributes:
        count: int32, steps taken.
        mu: first moments, in their dtype, of the shapes of the parameters.
        nu: second moments, likewise.
        mu_scale: float32 scales of ``mu``, one a block; None if its dtype takes none.
        nu_scale: float32 scales of ``nu``, likewise.
    """

    count: Array
    mu: optax.Params
    nu: optax.Params
    mu_scale: Any
    nu_scale: Any


def scale_by_low_precision_adam(
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    mu_dtype: object = "float8_e4m3fn",
    nu_dtype: object = "float16",
    *,
    nesterov: bool = False,
    granularity: Granularity = PerTensor(),
    seed: int | Array | Key = 0,
) -> optax.GradientTransformation:
    r"""Rescales updates by Adam, with the moments held in few bits from step to step:

        m ← b1·deq(M) + (1 - b1)·g        M ← Q(m)
        v ← b2·deq(V) + (1 - b2)·g²       V ← Q(v)
        u = m̂ / (√(v̂ + eps_root) + eps)   m̂ = m / (1 - b1ᵗ),  v̂ = v / (1 - b2ᵗ)

    All arithmetic is float32 and optax's own; only what is stored is rounded, stochastically (see
    ``fp4jax.optim.storage``). 8-bit and FP16 moments carry a float32 scale amax / max a block. The largest value of a
    block is held without error, so equal and constant gradients give updates of 1, whatever their size; constant but
    unequal ones give 1 on average, and seldom more than 1 + b1/8. An m below half the smallest value becomes 0, which
    shrinks the update; a v that is not 0 never becomes 0.

    Args:
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root.
        eps_root: added under the root.
        mu_dtype: how m is held: ``float8_e4m3fn``, ``float8_e5m2`` or ``float16`` with a scale, ``bfloat16`` or
            ``float32``. A dtype, its name, or a ``FloatFormat``.
        nu_dtype: how v is held: ``float16`` with a scale, ``bfloat16`` or ``float32``.
        nesterov: whether to use Nesterov momentum.
        granularity: who shares a scale: ``PerTensor()``, or ``PerBlock(size)`` along the last axis.
        seed: seed, or key, of the rounding noise.

    Returns:
        A transformation whose updates are float32. Its state has the same dtypes after every step. For n parameters
        with the default dtypes it takes 3n bytes, and 8 a leaf for the scales.

    Raises:
        ValueError: for a dtype that cannot hold the moment.
        TypeError: on ``init``, for parameters that are not float32, bfloat16 or float16.

    Example:
        >>> import jax.numpy as jnp
        >>> from fp4jax.optim import scale_by_low_precision_adam
        >>> tx = scale_by_low_precision_adam()
        >>> state = tx.init({"w": jnp.ones(4)})
        >>> updates, state = tx.update({"w": jnp.full(4, 1e-4)}, state)
        >>> state.mu["w"].dtype.name, state.nu["w"].dtype.name
        ('float8_e4m3fn', 'float16')

    References:
        Peng et al., *FP8-LM*, arXiv:2310.18313, §2.2 (m in E4M3, v in FP16); Wang et al., arXiv:2501.17116, §4.1;
        Kingma and Ba, arXiv:1412.6980.
    """
    first = Storage.make(resolve_dtype("mu_dtype", mu_dtype, _MU_DTYPES), granularity, Vanishing())
    second = Storage.make(resolve_dtype("nu_dtype", nu_dtype, _NU_DTYPES), granularity, Surviving())
    adam = optax.scale_by_adam(b1, b2, eps, eps_root, nesterov=nesterov)

    def init(params):
        jax.tree_util.tree_map_with_path(check_floating, params)
        (mu, mu_scale), (nu, nu_scale) = first.zeros(params), second.zeros(params)
        return ScaleByLowPrecisionAdamState(jnp.zeros([], jnp.int32), mu, nu, mu_scale, nu_scale)

    def update(updates, state, params=None):
        del params
        gradients = jax.tree.map(as_float32, updates)
        mu, nu = first.load_tree(state.mu, state.mu_scale), second.load_tree(state.nu, state.nu_scale)
        updates, moments = adam.update(gradients, optax.ScaleByAdamState(state.count, mu, nu))
        moments = cast(optax.ScaleByAdamState, moments)
        count = jnp.asarray(moments.count)
        words = step_words(seed, count)
        mu, mu_scale = first.store_tree(moments.mu, words, "mu")
        nu, nu_scale = second.store_tree(moments.nu, words, "nu")
        return updates, ScaleByLowPrecisionAdamState(count, mu, nu, mu_scale, nu_scale)

    return optax.GradientTransformation(init, update)
