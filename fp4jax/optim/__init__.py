"""Optimizers in low precision: Optax transformations, each usable alone, and ``adamw``, which chains them.

What passes between transformations is float32; few bits are what state, weights and wire hold.
"""

from fp4jax.optim.adam import ScaleByLowPrecisionAdamState, scale_by_low_precision_adam
from fp4jax.optim.chain import adamw
from fp4jax.optim.gradients import CastGradientsState, cast_gradients
from fp4jax.optim.loss_scaling import LossScalingState, dynamic_loss_scaling, loss_scale
from fp4jax.optim.master import MasterWeightsState, master_weights
from fp4jax.optim.weights import apply_updates, dequantize_weights, quantize_weights

__all__ = [
    "CastGradientsState",
    "LossScalingState",
    "MasterWeightsState",
    "ScaleByLowPrecisionAdamState",
    "adamw",
    "apply_updates",
    "cast_gradients",
    "dequantize_weights",
    "dynamic_loss_scaling",
    "loss_scale",
    "master_weights",
    "quantize_weights",
    "scale_by_low_precision_adam",
]
