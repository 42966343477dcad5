"""The baseline."""

from fp4jax.recipe import Recipe


def bf16() -> Recipe:
    """No quantizer at all: the product is ``jax.lax.dot_general`` in the dtype of the activation, bit for bit.

    The name is that of the usual compute dtype; a float32 activation gives a float32 product.
    """
    return Recipe("bf16")
