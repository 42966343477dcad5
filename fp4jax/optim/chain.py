"""The whole optimizer of the paper: FP8 gradients, low-precision Adam, decoupled weight decay, master weights."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fp4jax.optim.adam import scale_by_low_precision_adam
from fp4jax.optim.gradients import cast_gradients
from fp4jax.optim.loss_scaling import dynamic_loss_scaling
from fp4jax.optim.master import master_weights
from fp4jax.optim.storage import shared_axes
from fp4jax.scaling import Granularity, PerTensor
from fp4jax.typing import Array, ArrayLike, AxisName, Key


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    mu_dtype: object = "float8_e4m3fn",
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Callable[[optax.Params], object] | object = None,
    *,
    nesterov: bool = False,
    nu_dtype: object = "float16",
    grad_dtype: object = "float8_e4m3fn",
    master_dtype: object = "float32",
    granularity: Granularity = PerTensor(),
    clip_norm: ArrayLike | None = None,
    loss_scale: ArrayLike | None = None,
    axis_name: AxisName | None = None,
    seed: int | Array | Key = 0,
) -> optax.GradientTransformationExtraArgs:
    """AdamW in low precision: ``optax.adamw``, with its argument names and defaults, and FP8 around it. In order:

    =====================================  ==========================================================
    ``dynamic_loss_scaling``               unscales; skips every step that is not finite
    ``master_weights``                     a finer copy of weights that are not float32 themselves
    clipping by the global norm            if ``clip_norm`` is given; over all parts of a split gradient
    ``cast_gradients``                     gradients to FP8
    ``scale_by_low_precision_adam``        m in FP8, v in FP16
    ``optax.add_decayed_weights``          decay of the master weights, decoupled
    ``optax.scale_by_learning_rate``
    =====================================  ==========================================================

    Args:
        learning_rate: number or schedule.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root.
        eps_root: added under the root.
        mu_dtype: how the first moment is held, see ``scale_by_low_precision_adam``.
        weight_decay: number or schedule; multiplied with the learning rate.
        mask: tree of bools, or a function of the (master) parameters that gives one: what decays.
        nesterov: whether to use Nesterov momentum.
        nu_dtype: how the second moment is held.
        grad_dtype: FP8 dtype of the gradients, or None to leave them in float32.
        master_dtype: how master weights are held, ``float32`` or ``float16`` (the paper's); float32 parameters need
            and get none.
        granularity: who shares a scale in the moments.
        clip_norm: largest global norm of the gradients.
        loss_scale: first loss scale; the loss must then be multiplied with ``fp4jax.optim.loss_scale(state)``. None
            keeps it at 1; steps that are not finite are skipped all the same.
        axis_name: mesh axes over which gradients and state are split, inside ``jax.shard_map(check_vma=False)`` only.
        seed: seed, or key, of the rounding noise.

    Returns:
        A transformation whose updates are float32: apply them with ``fp4jax.optim.apply_updates``.

    Raises:
        ValueError: for a dtype that is not supported.

    Example:
        >>> import jax, jax.numpy as jnp, fp4jax.optim
        >>> tx = fp4jax.optim.adamw(0.1)
        >>> params = {"w": jnp.array([1.0, -2.0])}
        >>> state = tx.init(params)
        >>> updates, state = tx.update(jax.grad(lambda p: jnp.sum(p["w"] ** 2))(params), state, params)
        >>> fp4jax.optim.apply_updates(params, updates)["w"].round(2).tolist()
        [0.8999999761581421, -1.899999976158142]

    References:
        Wang et al., arXiv:2501.17116, §4.1; Peng et al., *FP8-LM*, arXiv:2310.18313; Loshchilov and Hutter,
        arXiv:1711.05101.
    """
    if axis_name is not None and isinstance(granularity, PerTensor):
        granularity = PerTensor(axis_name)
    inner = optax.chain(
        optax.identity() if clip_norm is None else _clip_by_global_norm(clip_norm, axis_name),
        optax.identity() if grad_dtype is None else cast_gradients(grad_dtype, axis_name=axis_name),
        scale_by_low_precision_adam(
            b1, b2, eps, eps_root, mu_dtype, nu_dtype, nesterov=nesterov, granularity=granularity, seed=seed
        ),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    return dynamic_loss_scaling(
        master_weights(inner, master_dtype, granularity=granularity, seed=seed),
        1.0 if loss_scale is None else loss_scale,
        growth_factor=1.0 if loss_scale is None else 2.0,
        axis_name=axis_name,
    )


def _clip_by_global_norm(max_norm: ArrayLike, axis_name: AxisName | None) -> optax.GradientTransformation:
    """``optax.clip_by_global_norm``, but of gradients that are split over devices inside a ``shard_map``, too.

    A norm that overflows makes the gradients NaN, so that the step is skipped; Optax makes them 0.
    """

    def squares(g):
        total = jnp.sum(g * g)
        names = shared_axes(total, axis_name)
        return lax.psum(total, names) if names else total

    def clip(updates, params):
        del params
        norm = jnp.sqrt(jax.tree.reduce(jnp.add, jax.tree.map(squares, updates), jnp.float32(0)))
        factor = jnp.where(jnp.isfinite(norm), jnp.minimum(1, max_norm / norm), jnp.float32(jnp.nan))
        return jax.tree.map(lambda g: g * jnp.where(norm == 0, 1, factor), updates)

    return optax.stateless(clip)
