"""One row for each transformation: ours, and stock ones of Optax that ours are held to."""

import dataclasses
from collections.abc import Callable
from typing import Any

import optax

import fp4jax
from fp4jax import optim


@dataclasses.dataclass(frozen=True)
class Row:
    """A transformation and what the suite must know of it.

    Attributes:
        name: of the test.
        factory: makes the transformation.
        kwargs: its arguments.
        ascends: whether the updates point along the gradient (a part of an optimizer) rather than against it.
        keeps_dtype: whether updates have the dtype of the gradients (Optax) rather than float32 (ours).
    """

    name: str
    factory: Callable[..., optax.GradientTransformation]
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    ascends: bool = False
    keeps_dtype: bool = False

    def __call__(self) -> optax.GradientTransformation:
        return self.factory(**self.kwargs)


OURS = [
    Row("cast e4m3", optim.cast_gradients, ascends=True),
    Row("cast e5m2 stochastic", optim.cast_gradients, {"dtype": "float8_e5m2", "stochastic": True}, ascends=True),
    Row("adam e4m3 fp16", optim.scale_by_low_precision_adam, ascends=True),
    Row(
        "adam fp16 fp16 blocks",
        optim.scale_by_low_precision_adam,
        {"mu_dtype": "float16", "granularity": fp4jax.PerBlock(4)},
        ascends=True,
    ),
    Row(
        "adam bf16 bf16 nesterov",
        optim.scale_by_low_precision_adam,
        {"mu_dtype": "bfloat16", "nu_dtype": "bfloat16", "nesterov": True},
        ascends=True,
    ),
    Row("master float32", optim.master_weights, {"inner": optax.adamw(0.01)}),
    Row("master float16", optim.master_weights, {"inner": optax.sgd(0.01), "dtype": "float16"}),
    Row("loss scaling", optim.dynamic_loss_scaling, {"inner": optax.sgd(0.01), "init_scale": 1.0}),
    Row("adamw", optim.adamw, {"learning_rate": 0.01, "master_dtype": "float16", "clip_norm": 10.0}),
]

STOCK = [
    Row("optax.adamw", optax.adamw, {"learning_rate": 0.01}, keeps_dtype=True),
    Row("optax.sgd", optax.sgd, {"learning_rate": 0.01}, keeps_dtype=True),
    Row("optax.lion", optax.lion, {"learning_rate": 0.01}, keeps_dtype=True),
]
