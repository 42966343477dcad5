"""Master weights: what the optimizer changes, beside model weights in BF16, FP16 or FP8."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from fp4jax.exact import as_float32
from fp4jax.optim.stochastic import HashedStochastic, leaf_words, step_words
from fp4jax.optim.storage import FP16, check_floating, hold, is_quantized, resolve_dtype, value
from fp4jax.optim.weights import weight_value
from fp4jax.quantize import QTensor, QuantSpec
from fp4jax.scaling import Granularity, PerTensor, PowerOfTwo
from fp4jax.typing import Array, Key

_MASTER_DTYPES = (np.dtype(np.float32), np.dtype(np.float16))


class MasterWeightsState(NamedTuple):
    """State of ``master_weights``.

    Attributes:
        count: int32, steps taken.
        master: a tree like the parameters: float32 arrays, or FP16 ``QTensor``s; None for a float32 parameter, which is
            its own master.
        inner_state: state of the wrapped transformation, which saw the masters as its parameters.
    """

    count: Array
    master: optax.Params
    inner_state: optax.OptState


def master_weights(
    inner: optax.GradientTransformation,
    dtype: object = "float32",
    *,
    granularity: Granularity = PerTensor(),
    seed: int | Array | Key = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Keeps a finer copy of weights in BF16, FP16 or FP8, and lets ``inner`` train the copy.

    With D the float32 value of the stored weight W, M the master and u the update that ``inner`` makes of it:

        u' = round(M + u) - D        M ← D + u'        (what is returned is u')

    ``apply_updates`` computes the same D + u' and rounds it to the weights, so W = Q(M) holds bit for bit after each
    step, whatever the step. D + u' is round(M + u) itself unless the weight shrank by orders of magnitude, and then
    off by at most half a unit in the last place of D. Apply with ``fp4jax.optim.apply_updates``, or for BF16 and FP16
    weights with ``optax.apply_updates``. An update is not zero merely because M did not move: it then holds what the
    weight's own rounding had left.

    Args:
        inner: a whole optimizer, such as ``optax.adamw(1e-3)``; it is given float32 gradients and float32 parameters,
            so that weight decay acts on the masters.
        dtype: ``float32``; or ``float16``, with a power-of-two scale a block and stochastic rounding, since a learning
            rate below 2⁻¹² of the weight would be lost to nearest.
        granularity: who shares a scale of FP16 masters.
        seed: seed, or key, of the rounding noise.

    Returns:
        A transformation whose updates are float32. It needs ``params``: arrays, or ``QTensor``s as ``quantize_weights``
        makes them. Gradients are arrays: those with respect to ``dequantize_weights(params)``.

    Raises:
        ValueError: for another dtype; on ``init``, for FP16 masters of weights whose scales are no powers of two (the
            difference u' would not be exact); on ``update``, without ``params``.
        TypeError: for parameters that are not float32, bfloat16, float16 or quantized; on ``update``, for a gradient
            that is itself a ``QTensor``.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from fp4jax.optim import apply_updates, master_weights
        >>> tx = master_weights(optax.sgd(1e-3))
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> state = tx.init(params)
        >>> for _ in range(8):  # one step alone is lost in BF16
        ...     updates, state = tx.update({"w": jnp.ones(2)}, state, params)
        ...     params = apply_updates(params, updates)
        >>> params["w"].tolist()
        [0.9921875, 0.9921875]

    References:
        Micikevicius et al., arXiv:1710.03740, §3.1; Peng et al., *FP8-LM*, arXiv:2310.18313, §2.2 (FP16 masters).
    """
    dtype = resolve_dtype("dtype", dtype, _MASTER_DTYPES)
    # "ceil" leaves a factor of two above the largest master, so that D + u' cannot saturate either.
    how = QuantSpec(FP16, granularity, PowerOfTwo("ceil"), HashedStochastic()) if dtype == np.float16 else dtype
    inner = optax.with_extra_args_support(inner)

    def is_own_master(p):
        return not is_quantized(p) and p.dtype == jnp.float32

    def initial(path, p):
        if is_quantized(p):
            _check_quantized(path, p, exact=how != np.float32)
        else:
            check_floating(path, p)
        if is_own_master(p):
            return None
        return hold(weight_value(p), how, leaf_words(step_words(seed, jnp.zeros([], jnp.int32)), path))

    def init(params):
        master = jax.tree_util.tree_map_with_path(initial, params, is_leaf=is_quantized)
        values = jax.tree.map(_master_value, params, master, is_leaf=is_quantized)
        return MasterWeightsState(jnp.zeros([], jnp.int32), master, inner.init(values))

    def step(p, master, u, words):
        """The update of one leaf, and its new master."""
        if is_own_master(p):
            return u, None
        current = weight_value(p)
        held = hold(_master_value(p, master) + u, how, words)
        update = lax.optimization_barrier(value(held, p.shape) - current)
        moved = _hold_exactly(current + update, held)
        if is_quantized(p):
            # apply_updates leaves a weight alone whose updates are all zero; so must its master be.
            changed = jnp.any(update != 0)
            moved = jax.tree.map(lambda new, old: jnp.where(changed, new, old), moved, master)
        return update, moved

    def update(updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError("master_weights needs the parameters: call update(updates, state, params)")
        paths, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_quantized)
        gradients = treedef.flatten_up_to(updates)
        for (path, _), gradient in zip(paths, gradients, strict=True):
            if is_quantized(gradient):
                raise TypeError(
                    f"the gradient of {jax.tree_util.keystr(path)} is a QTensor, in {gradient.values.dtype}; take the "
                    "gradient with respect to fp4jax.optim.dequantize_weights(params), whose leaves are arrays"
                )
        masters = treedef.flatten_up_to(state.master)
        values = treedef.unflatten([_master_value(p, m) for (_, p), m in zip(paths, masters, strict=True)])
        updates = treedef.unflatten([as_float32(g) for g in gradients])
        updates, inner_state = inner.update(updates, state.inner_state, values, **extra_args)

        count = jnp.asarray(optax.safe_increment(state.count))
        words = step_words(seed, count)
        pairs = [
            step(p, m, u, leaf_words(words, path))
            for (path, p), m, u in zip(paths, masters, treedef.flatten_up_to(updates), strict=True)
        ]
        updates, master = (treedef.unflatten([pair[i] for pair in pairs]) for i in (0, 1))
        return updates, MasterWeightsState(count, master, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _master_value(p: Array | QTensor, master: Array | QTensor | None) -> Array:
    """The float32 master of a parameter that may be its own."""
    return weight_value(p) if master is None else value(master, p.shape)


def _hold_exactly(x: Array, like: Array | QTensor) -> Array | QTensor:
    """``x`` as ``like`` is held. In FP16 x is on the grid already: a multiple of its step of at most 11 bits."""
    if not isinstance(like, QTensor):
        return x
    scale = like.spec.granularity.expand(like.scales(), like.shape, like.axis)
    values = (x.reshape(like.shape) * (1 / scale)).astype(like.values.dtype)
    return QTensor(values, like.scale, like.outer_scale, like.spec, like.axis)


def _check_quantized(path: tuple, p: QTensor, exact: bool) -> None:
    name = jax.tree_util.keystr(path)
    if p.spec.needs_key:
        raise ValueError(f"weight {name} rounds stochastically ({p.spec!r}); equal masters must give equal weights")
    if exact and not isinstance(p.spec.scale, PowerOfTwo):
        raise ValueError(
            f"weight {name} has scale={p.spec.scale!r}; FP16 masters need PowerOfTwo() there, as quantize_weights has "
            "it, so that master minus weight is exact; or use dtype='float32'"
        )
