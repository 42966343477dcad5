"""Cross-entropy against Optax and at its edges."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fp4jax.models import cross_entropy, token_nll

LOGITS = 4 * jax.random.normal(jax.random.key(0), (3, 5, 11))
TARGETS = jax.random.randint(jax.random.key(1), (3, 5), 0, 11)


def test_equals_optax_with_its_gradient():
    expected, expected_grad = jax.value_and_grad(
        lambda x: optax.softmax_cross_entropy_with_integer_labels(x, TARGETS).mean()
    )(LOGITS)
    loss, grad = jax.value_and_grad(cross_entropy)(LOGITS, TARGETS)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(grad, expected_grad, atol=1e-7)


def test_huge_logits_stay_finite():
    logits = jnp.array([[3e38, -3e38, 0.0], [-3e38, -3e38, -3e38]])
    targets = jnp.array([0, 2])
    np.testing.assert_allclose(token_nll(logits, targets), [0.0, np.log(3)], rtol=1e-6)
    assert bool(jnp.all(jnp.isfinite(jax.grad(cross_entropy)(logits, targets))))


def test_half_precision_logits_are_widened_first():
    low = LOGITS.astype(jnp.bfloat16)
    loss = cross_entropy(low, TARGETS)
    assert loss.dtype == jnp.float32
    np.testing.assert_array_equal(loss, cross_entropy(low.astype(jnp.float32), TARGETS))
    assert jax.grad(cross_entropy)(low, TARGETS).dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.float32, jnp.bfloat16])
def test_weights_drop_tokens_and_their_targets(dtype):
    keep = jnp.array([[1, 1, 0, 1, 0]] * 3)
    targets = jnp.where(keep == 1, TARGETS, -100)
    loss, grad = jax.value_and_grad(cross_entropy)(LOGITS, targets, keep.astype(dtype))
    expected = np.asarray(token_nll(LOGITS, TARGETS))[np.asarray(keep) == 1].mean()
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert bool(jnp.all(grad[:, 2] == 0))
    assert bool(jnp.all(jnp.isfinite(grad)))


def test_nothing_to_count_is_zero_with_zero_gradient():
    loss, grad = jax.value_and_grad(cross_entropy)(LOGITS, TARGETS, jnp.zeros((3, 5)))
    assert float(loss) == 0
    assert bool(jnp.all(grad == 0))


@pytest.mark.parametrize("target", [-1, 11])
def test_a_target_outside_the_vocabulary_is_never_a_finite_loss(target):
    assert bool(jnp.isnan(token_nll(LOGITS[0, 0], jnp.array(target))))


def test_targets_may_be_as_narrow_as_the_data():
    logits = jnp.zeros((1, 300)).at[0, 44].set(50.0)  # 300 does not fit uint8, and 300 - 256 = 44
    np.testing.assert_allclose(token_nll(logits, jnp.array([44], jnp.uint8)), [0.0], atol=1e-6)


def test_z_loss_adds_the_squared_log_normalizer():
    log_z = jax.nn.logsumexp(LOGITS, axis=-1)
    np.testing.assert_allclose(
        cross_entropy(LOGITS, TARGETS, z_loss=0.1) - cross_entropy(LOGITS, TARGETS), 0.1 * jnp.mean(log_z**2), rtol=1e-5
    )
