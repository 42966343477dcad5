"""The train step as a pure function of (state, batch), and the validation step beside it.

Nothing here knows of files, flags or devices: `jax.jit` compiles a step, `jax.vmap` trains several seeds at once.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from fp4jax.models import cross_entropy, token_nll
from fp4jax.nn import PreparedWeights, prepare_weights, set_noise_step, use_prepared
from fp4jax.train.gradient import reduced_gradient

METRICS = ("loss", "grad_norm", "clipped", "skipped", "learning_rate")
"""What a train step measures; see `make_train_step`."""

type Params = Mapping[str, Any]
type Metrics = dict[str, jax.Array]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "skipped", "clipped", "params", "opt_state", "noise"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step changes, and all that a checkpoint holds.

    Args:
        step: int32, batches seen: the position in the data and in the noise.
        skipped: int32, how many of them changed nothing else, for not being finite. `step - skipped` updates were made.
        clipped: int32, in how many updates the gradient was scaled down to the clip norm.
        params: master weights in float32, a nested dict of arrays.
        opt_state: state of the Optax transformation.
        noise: keys of the noise streams of stochastic recipes; they never change. Empty for all others.
    """

    step: jax.Array
    skipped: jax.Array
    clipped: jax.Array
    params: Params
    opt_state: optax.OptState
    noise: Params


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A model without its parameters: how to create them, and how to put them back.

    Args:
        create: makes the model from `rngs` with the streams "params" and "noise".
    """

    create: Callable[[nnx.Rngs], nnx.Module]

    @functools.cached_property
    def graphdef(self) -> Any:
        """What `nnx.merge` needs beside arrays."""
        model = nnx.eval_shape(lambda: self.create(nnx.Rngs(params=0, noise=0)))
        return nnx.graphdef(model)

    @functools.cached_property
    def parameter_axes(self) -> Params:
        """A tree like the parameters of tuples: the logical name of each axis (see `fp4jax.parallel.LOGICAL_AXES`)."""
        params = nnx.state(nnx.eval_shape(lambda: self.create(nnx.Rngs(params=0, noise=0))), nnx.Param)
        return nnx.to_pure_dict(jax.tree.map(_axis_names, params, is_leaf=lambda x: isinstance(x, nnx.Variable)))

    def init(self, seed: jax.Array | int) -> tuple[Params, Params]:
        """Parameters and noise keys of a seed (a scalar, which may be traced)."""
        key = jax.random.key(jnp.asarray(seed, jnp.uint32))
        # The stream "params" draws fold_in(key, 0), fold_in(key, 1), …; it never comes to the last number.
        model = self.create(nnx.Rngs(params=key, noise=jax.random.fold_in(key, 2**32 - 1)))
        _, params, noise = nnx.split(model, nnx.Param, ...)
        return nnx.to_pure_dict(params), nnx.to_pure_dict(noise)

    def merge(
        self,
        params: Params,
        noise: Params,
        noise_step: jax.Array | int,
        prepared: PreparedWeights = MappingProxyType({}),
    ) -> nnx.Module:
        """The model, its noise pinned to `noise_step`, with weights that `prepare` has quantized, if any."""
        model = nnx.merge(self.graphdef, params, noise)
        set_noise_step(model, noise_step)
        return use_prepared(model, prepared)

    def prepare(self, params: Params, noise: Params) -> PreparedWeights:
        """The weights, quantized once for several calls: see `fp4jax.nn.prepare_weights`."""
        return prepare_weights(nnx.merge(self.graphdef, params, noise))


def _axis_names(variable: nnx.Variable) -> tuple[str | None, ...]:
    names = tuple(variable.get_metadata().get("out_sharding") or ())
    return (*names, *[None] * (variable.ndim - len(names)))


def make_init(
    architecture: Architecture,
    optimizer: optax.GradientTransformation,
    placed: Callable[..., Callable[..., tuple[Params, Params]]] | None = None,
) -> Callable[..., TrainState]:
    """The function `seed -> TrainState` at step 0. A seed gives the same state alone, under vmap, and on any mesh.

    Args:
        architecture: the model.
        optimizer: from `make_optimizer`; its state follows the sharding of the parameters.
        placed: `Placement.parameters`, if parameters belong anywhere in particular.
    """
    create = architecture.init
    if placed is not None:
        create = placed(create, architecture.parameter_axes, jax.eval_shape(create, 0))

    def init(seed: jax.Array | int) -> TrainState:
        params, noise = create(seed)
        zero = jnp.zeros((), jnp.int32)
        # A buffer for each counter: all of them are donated.
        return TrainState(zero, zero.copy(), zero.copy(), params, optimizer.init(params), noise)

    return init


def make_train_step(
    architecture: Architecture,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    accumulate: int = 1,
    clip_norm: float | None = None,
    reduction: str = "float32",
) -> Callable[[TrainState, jax.Array], tuple[TrainState, Metrics]]:
    """The function `(state, tokens [b, t + 1]) -> (state, metrics)`: one update of the master weights.

        g = 1/A · Σ_a ∇ loss(params, microbatch a)      in float32
        params, opt_state = update(g) if loss and |g| are finite, else as they were

    The noise of stochastic recipes is a function of (seed, step, microbatch). Weights that are rounded to nearest are
    quantized once a step, for all microbatches (`fp4jax.nn.prepare_weights`). Compile it with the state donated.

    Args:
        architecture: the model.
        optimizer: from `make_optimizer`.
        schedule: its learning rate, for the metrics only.
        accumulate: A, a divisor of b. Microbatches run one after another in `lax.scan`.
        clip_norm: the norm at which the optimizer clips, for metrics and counter only.
        reduction: what gradients are averaged in over the mesh axis "data": see `fp4jax.train.gradient`.

    Returns:
        The step. Its metrics are float32 scalars: `loss`, `grad_norm` before clipping, `clipped` and `skipped` (0 or
        1), `learning_rate`.
    """

    def loss_fn(
        params: Params, noise: Params, tokens: jax.Array, noise_step: jax.Array, prepared: PreparedWeights
    ) -> jax.Array:
        logits = architecture.merge(params, noise, noise_step, prepared)(tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:])

    mean_gradient = reduced_gradient(loss_fn, accumulate, reduction, architecture.prepare)

    def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, Metrics]:
        loss, gradient = mean_gradient(state.params, state.noise, tokens, state.step)
        with jax.named_scope("gradient_norm"):
            norm = optax.tree.norm(gradient)
        # One pass finds every NaN and infinity; a norm past float32 could not be clipped either.
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            params, opt_state = jax.tree.map(
                lambda new, old: jnp.where(finite, new, old), (params, opt_state), (state.params, state.opt_state)
            )
        skipped = 1 - finite.astype(jnp.int32)
        clipped = (finite & (norm > (jnp.inf if clip_norm is None else clip_norm))).astype(jnp.int32)
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "clipped": clipped.astype(jnp.float32),
            "skipped": skipped.astype(jnp.float32),
            "learning_rate": jnp.asarray(schedule(state.step - state.skipped), jnp.float32),
        }
        return TrainState(
            step=state.step + 1,
            skipped=state.skipped + skipped,
            clipped=state.clipped + clipped,
            params=params,
            opt_state=opt_state,
            noise=state.noise,
        ), metrics

    return step


def make_validation_step(architecture: Architecture, num_sources: int) -> Callable[..., Metrics]:
    """The function `(params, noise, batch) -> {"loss": Σ weights · nll, "weight": Σ weights}`, each [num_sources].

    `batch` is one of `fp4jax.train.data.validation_batches`. Noise, if any, is that of step 0, every time.
    """

    def validate(params: Params, noise: Params, batch: Mapping[str, jax.Array]) -> Metrics:
        model = architecture.merge(params, noise, 0)
        model.eval()
        tokens, weights = batch["tokens"], batch["weights"]
        nll = token_nll(model(tokens[:, :-1]), tokens[:, 1:])
        row_loss = jnp.sum(jnp.where(weights == 0, 0.0, nll) * weights, axis=-1)
        # By comparison rather than by scatter, which stays local where rows are split over devices.
        member = batch["source"][:, None] == jnp.arange(num_sources)
        add = lambda rows: jnp.sum(jnp.where(member, rows[:, None], 0.0), axis=0)  # noqa: E731
        return {"loss": add(row_loss), "weight": add(jnp.sum(weights, axis=-1))}

    return validate
