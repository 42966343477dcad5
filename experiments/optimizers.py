"""Optimizers of the experiments, beside those of `fp4jax.train.optimizer.OPTIMIZERS`."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fp4jax.train.config import OptimizerOptions
from fp4jax.train.optimizer import OPTIMIZERS as TRAIN_OPTIMIZERS
from fp4jax.train.step import TrainState


class LaneState(NamedTuple):
    """The learning rate of a lane, as a multiple of the schedule's."""

    factor: jax.Array


def scale_by_lane() -> optax.GradientTransformation:
    """Multiplies updates with a number held in the state, so that lanes under `jax.vmap` can differ in it."""

    def update(updates, state, params=None):
        del params
        return jax.tree.map(lambda u: u * state.factor, updates), state

    return optax.GradientTransformation(lambda params: LaneState(jnp.float32(1)), update)


def set_lanes(state: TrainState, factors: Sequence[float]) -> TrainState:
    """`state` with the factor of every lane: one number for a single lane, [S] for several."""

    def put(node):
        if not isinstance(node, LaneState):
            return node
        values = jnp.asarray(factors, jnp.float32).reshape(node.factor.shape)
        return LaneState(jax.device_put(values, node.factor.sharding))

    opt_state = jax.tree.map(put, state.opt_state, is_leaf=lambda node: isinstance(node, LaneState))
    return dataclasses.replace(state, opt_state=opt_state)


def _adamw_lanes(options: OptimizerOptions, schedule: optax.Schedule) -> optax.GradientTransformation:
    """The AdamW of `fp4jax.train`, decay included, times the factor of the lane."""
    return optax.chain(TRAIN_OPTIMIZERS["adamw"](options, schedule), scale_by_lane())


OPTIMIZERS: dict[str, Callable[[OptimizerOptions, optax.Schedule], optax.GradientTransformation]] = {
    "adamw_lanes": _adamw_lanes,
}
"""Registered in `fp4jax.train.optimizer.OPTIMIZERS` while a piece runs."""
