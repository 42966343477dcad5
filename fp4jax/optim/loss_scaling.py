"""Loss scaling that adapts itself, and the rule that no non-finite update is ever accepted."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fp4jax.exact import as_float32
from fp4jax.optim.storage import shared_axes
from fp4jax.typing import Array, ArrayLike, AxisName


class LossScalingState(NamedTuple):
    """State of ``dynamic_loss_scaling``.

    Attributes:
        loss_scale: float32, the factor for the next loss.
        good_steps: int32, steps accepted since the scale last changed.
        skipped: int32, steps skipped in all.
        skipped_in_a_row: int32, steps skipped since the last one that was accepted.
        inner_state: state of the wrapped transformation.
    """

    loss_scale: Array
    good_steps: Array
    skipped: Array
    skipped_in_a_row: Array
    inner_state: optax.OptState


def dynamic_loss_scaling(
    inner: optax.GradientTransformation,
    init_scale: ArrayLike = 2.0**15,
    *,
    growth_interval: ArrayLike = 2000,
    growth_factor: ArrayLike = 2.0,
    backoff_factor: ArrayLike = 0.5,
    min_scale: ArrayLike = 1.0,
    max_scale: ArrayLike = 2.0**24,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Divides gradients by the loss scale, and skips the step if they, the updates or the new state are not finite.

    Multiply the loss with ``loss_scale(state)`` before differentiating. A skipped step returns zero updates, leaves the
    inner state bit for bit as it was, and multiplies the scale with ``backoff_factor``; after ``growth_interval``
    accepted steps in a row the scale grows. However many steps are skipped in a row, a non-finite update is never let
    through: read ``skipped_in_a_row`` and stop by yourself.

    Skip around an accumulator, not inside: ``optax.MultiSteps`` keeps a NaN that it has once added for good. So wrap
    ``MultiSteps(...).gradient_transformation()`` in this, or give MultiSteps
    ``should_skip_update_fn=optax.skip_not_finite``.

    Args:
        inner: a whole optimizer.
        init_scale: first loss scale.
        growth_interval: accepted steps after which the scale grows.
        growth_factor: factor of growth; 1 keeps the scale from growing.
        backoff_factor: factor after a skipped step.
        min_scale: the scale never falls below it.
        max_scale: nor grows above it.
        axis_name: mesh axes whose devices skip together inside ``jax.shard_map(check_vma=False)``; with ``check_vma``
            they are known: all on which the gradients vary. Outside of shard_map nothing is needed: arrays are global.

    Returns:
        A transformation whose updates have the dtype that ``inner`` gives them.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from fp4jax.optim import dynamic_loss_scaling, loss_scale
        >>> tx = dynamic_loss_scaling(optax.sgd(1.0), init_scale=8.0)
        >>> state = tx.init(jnp.zeros(2))
        >>> updates, state = tx.update(jnp.array([jnp.inf, 8.0]), state)
        >>> updates.tolist(), loss_scale(state).item()
        ([0.0, 0.0], 4.0)

    References:
        Micikevicius et al., arXiv:1710.03740, §3.2.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params):
        # Three zeros, not one three times: a buffer can be donated once.
        good_steps, skipped, skipped_in_a_row = (jnp.zeros([], jnp.int32) for _ in range(3))
        scale = jnp.array(init_scale, jnp.float32)
        return LossScalingState(scale, good_steps, skipped, skipped_in_a_row, inner.init(params))

    def update(updates, state, params=None, **extra_args):
        gradients = jax.tree.map(lambda g: as_float32(g) / state.loss_scale, updates)
        updates, inner_state = inner.update(gradients, state.inner_state, params, **extra_args)
        # Everything hangs on every leaf being finite; without the barrier XLA would compute all of it twice.
        updates, inner_state = lax.optimization_barrier((updates, inner_state))
        finite = all_finite((gradients, updates, inner_state))
        if names := shared_axes(finite, axis_name):
            finite = lax.pmin(finite.astype(jnp.int32), names) > 0

        good_steps = jnp.where(finite, state.good_steps + 1, 0)
        grown = good_steps >= growth_interval
        scale = jnp.where(
            finite,
            jnp.where(grown, jnp.minimum(state.loss_scale * growth_factor, max_scale), state.loss_scale),
            jnp.maximum(state.loss_scale * backoff_factor, min_scale),
        )
        return jax.tree.map(lambda u: jnp.where(finite, u, jnp.zeros_like(u)), updates), LossScalingState(
            loss_scale=scale.astype(jnp.float32),
            good_steps=jnp.where(grown, 0, good_steps).astype(jnp.int32),
            skipped=jnp.where(finite, state.skipped, optax.safe_increment(state.skipped)),
            skipped_in_a_row=jnp.where(finite, 0, optax.safe_increment(state.skipped_in_a_row)).astype(jnp.int32),
            inner_state=jax.tree.map(lambda new, old: jnp.where(finite, new, old), inner_state, state.inner_state),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def loss_scale(state: optax.OptState) -> Array:
    """The factor for the next loss: that of the ``dynamic_loss_scaling`` somewhere inside ``state``; without one, 1."""
    scale = optax.tree.get(state, "loss_scale")
    return jnp.ones([], jnp.float32) if scale is None else scale


def all_finite(tree: optax.Params) -> Array:
    """Whether no floating leaf holds NaN or infinity."""

    def leaf_is_finite(x):
        if x.dtype == jnp.float8_e8m0fnu:  # by its code: the type itself has no arithmetic
            return jnp.all(lax.bitcast_convert_type(x, jnp.uint8) != 255)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.bool_(True)
        return jnp.all(jnp.isfinite(x.astype(jnp.float32)))

    return jax.tree.reduce(jnp.logical_and, jax.tree.map(leaf_is_finite, tree), jnp.bool_(True))
