"""What a block's backward pass recomputes instead of keeping it: rematerialization policies by name."""

from collections.abc import Callable

import jax

QUANTIZED_RESIDUALS = ("fp4jax_lhs", "fp4jax_rhs")
"""Names that `fp4jax.dot_general` gives to the quantized operands it keeps for its backward pass."""

REMAT_POLICIES: dict[str, Callable[..., bool] | None] = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "quantized": jax.checkpoint_policies.save_only_these_names(*QUANTIZED_RESIDUALS),
}
"""Policies for `LlamaConfig.remat`.

none        keep all that differentiation asks for; nothing is recomputed but norms and the SwiGLU's elementwise part
full        keep each block's input only; the backward pass runs the block's forward pass again
dots        keep the results of the linear layers' products; recompute quantizers, attention and elementwise work
quantized   keep the quantized operands of the linear layers, one byte or less a value; recompute the rest, products
            included, but quantize nothing twice. A layer without a recipe names nothing and is recomputed in full

The attention output is not named: its backward pass needs the softmax statistics too, so that keeping the output would
not save the recomputation, and the operand quantized from it is kept already.
"""
