"""Next-token cross-entropy in float32."""

import jax
import jax.numpy as jnp


def token_nll(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """−log softmax(logits)[target] of every token, in float32.

    The target's logit is picked by comparison rather than by gather: its gradient is then elementwise, fuses with the
    softmax, and stays local where the vocabulary is sharded.

    Args:
        logits: [..., v].
        targets: integers [...]; one outside [0, v) gives NaN.

    Returns:
        float32 [...].

    Example:
        >>> float(token_nll(jnp.zeros((1, 4)), jnp.array([2]))[0])  # log 4
        1.3862943649291992
    """
    return _nll_and_log_z(logits, targets)[0]


def cross_entropy(
    logits: jax.Array, targets: jax.Array, weights: jax.Array | None = None, *, z_loss: float = 0.0
) -> jax.Array:
    """Mean of `token_nll`, weighted, plus z_loss · mean(log²Z) (PaLM, arXiv:2204.02311, uses 1e-4).

    Args:
        logits: [..., v].
        targets: integers [...]. Where the weight is 0 the target may be anything.
        weights: float or bool [...]; None counts every token once. If all are 0 the loss is 0.
        z_loss: coefficient that keeps the softmax's log-normalizer near 0; off by default.

    Returns:
        float32 scalar.
    """
    loss, log_z = _nll_and_log_z(logits, targets)
    if z_loss:
        loss = loss + z_loss * jnp.square(log_z)
    if weights is None:
        return jnp.mean(loss)
    weights = weights.astype(jnp.float32)
    total = jnp.sum(jnp.where(weights == 0, 0.0, loss) * weights)
    count = jnp.sum(weights)
    return total / jnp.where(count == 0, 1.0, count)


@jax.named_scope("loss")
def _nll_and_log_z(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """−log softmax(logits)[target] and log Σ exp(logits)."""
    logits = logits.astype(jnp.float32)
    shift = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    # Shifted before the target is picked: the difference of two large numbers would lose what separates them.
    shifted = logits - shift
    log_sum = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))

    targets = targets.astype(jnp.int32)
    vocabulary = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    picked = jnp.sum(jnp.where(vocabulary == targets[..., None], shifted, 0.0), axis=-1)
    in_range = (targets >= 0) & (targets < logits.shape[-1])
    return jnp.where(in_range, log_sum - picked, jnp.nan), log_sum + shift[..., 0]
