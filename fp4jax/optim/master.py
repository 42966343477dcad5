"""Master weights: what the optimizer changes, beside model weights in BF16, FP16 or FP8."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from fp4jax.exact import as_float32
from fp4jax.optim.stochastic import HashedStochastic, leaf_words, step_words
from fp4jax.optim.storage import Storage, check_floating, is_quantized, resolve_dtype
from fp4jax.optim.weights import weight_value
from fp4jax.quantize import QTensor
from fp4jax.scaling import Granularity, PerTensor, PowerOfTwo
from fp4jax.typing import Array, Key

_MASTER_DTYPES = (np.dtype(np.float32), np.dtype(np.float16))


class MasterWeightsState(NamedTuple):
    """State of ``master_weights``; each tree is like the parameters, with None for one that is float32.

    Attributes:
        count: int32, steps taken.
        master: float32 or float16, of the shapes of the parameters. A float32 parameter is its own master.
        master_scale: E8M0 scales of ``master``, one a block; None if it is float32.
        inner_state: state of the wrapped transformation, which saw the masters as its parameters.
    """

    count: Array
    master: optax.Params
    master_scale: Any
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
    form = Storage.make(dtype, granularity, HashedStochastic(), PowerOfTwo("ceil"))

    def leaves(params):
        """Paths and parameters, a quantized one being one leaf; and the tree of the arrays they stand for."""
        paths, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_quantized)
        return [path for path, _ in paths], [p for _, p in paths], treedef

    def values(params, masters, scales):
        """float32 masters, of which a parameter may be its own."""
        loaded = zip(params, masters, scales, strict=True)
        return [p if is_own_master(p) else form.load(m, s) for p, m, s in loaded]

    def init(params):
        paths, current, treedef = leaves(params)
        words = step_words(seed, jnp.zeros([], jnp.int32))
        pairs = []
        for path, p in zip(paths, current, strict=True):
            _check(path, p, exact=form.spec is not None)
            pairs.append((None, None) if is_own_master(p) else form.store(weight_value(p), leaf_words(words, path)))
        masters, scales = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        inner_state = inner.init(treedef.unflatten(values(current, masters, scales)))
        return MasterWeightsState(
            jnp.zeros([], jnp.int32),
            treedef.unflatten(masters),
            None if form.spec is None else treedef.unflatten(scales),
            inner_state,
        )

    def step(p, master, scale, u, words):
        """The update of one leaf, and its new master and scale."""
        if is_own_master(p):
            return u, None, None
        current = weight_value(p)
        rounded, new_scale = form.store(form.load(master, scale) + u, words)
        update = lax.optimization_barrier(form.load(rounded, new_scale) - current)
        new_master = _hold_exactly(current + update, new_scale, form)
        if is_quantized(p):
            # apply_updates leaves a weight alone whose updates are all zero; so must its master be.
            changed = jnp.any(update != 0)
            new_master, new_scale = jax.tree.map(
                lambda new, old: jnp.where(changed, new, old), (new_master, new_scale), (master, scale)
            )
        return update, new_master, new_scale

    def update(updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError("master_weights needs the parameters: call update(updates, state, params)")
        paths, current, treedef = leaves(params)
        gradients = treedef.flatten_up_to(updates)
        for path, gradient in zip(paths, gradients, strict=True):
            if is_quantized(gradient):
                raise TypeError(
                    f"the gradient of {jax.tree_util.keystr(path)} is a QTensor, in {gradient.values.dtype}; take the "
                    "gradient with respect to fp4jax.optim.dequantize_weights(params), whose leaves are arrays"
                )
        masters = treedef.flatten_up_to(state.master)
        scales = [None] * len(paths) if state.master_scale is None else treedef.flatten_up_to(state.master_scale)
        updates, inner_state = inner.update(
            treedef.unflatten([as_float32(g) for g in gradients]),
            state.inner_state,
            treedef.unflatten(values(current, masters, scales)),
            **extra_args,
        )

        count = jnp.asarray(optax.safe_increment(state.count))
        words = step_words(seed, count)
        steps = [
            step(p, m, s, u, leaf_words(words, path))
            for path, p, m, s, u in zip(paths, current, masters, scales, treedef.flatten_up_to(updates), strict=True)
        ]
        updates, master, master_scale = (treedef.unflatten([s[i] for s in steps]) for i in range(3))
        return updates, MasterWeightsState(
            count, master, None if state.master_scale is None else master_scale, inner_state
        )

    return optax.GradientTransformationExtraArgs(init, update)


def is_own_master(p: Array | QTensor) -> bool:
    """Whether a parameter is as fine as a master could be."""
    return not isinstance(p, QTensor) and p.dtype == jnp.float32


def _hold_exactly(x: Array, scale: Array | None, form: Storage) -> Array:
    """``x`` as a value under ``scale``. FP16 holds it: x is a multiple of its step there, of at most 11 bits."""
    if form.spec is None or scale is None:
        return x
    shape = x.shape or (1,)
    inverse = 1 / form.spec.granularity.expand(form.spec.scale.decode(scale, None), shape, (-1,))
    return (x.reshape(shape) * inverse).reshape(x.shape).astype(form.dtype)


def _check(path: tuple, p: Array | QTensor, exact: bool) -> None:
    if not isinstance(p, QTensor):
        check_floating(path, p)
        return
    name = jax.tree_util.keystr(path)
    if p.spec.needs_key:
        raise ValueError(f"weight {name} rounds stochastically ({p.spec!r}); equal masters must give equal weights")
    if exact and not isinstance(p.spec.scale, PowerOfTwo):
        raise ValueError(
            f"weight {name} has scale={p.spec.scale!r}; FP16 masters need PowerOfTwo() there, as quantize_weights has "
            "it, so that master minus weight is exact; or use dtype='float32'"
        )
