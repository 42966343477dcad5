"""From settings to the functions of a run, before any is compiled: what `fp4jax train` runs and `plan` counts."""

import dataclasses
from collections.abc import Callable
from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx

from fp4jax.models import Llama, LlamaConfig
from fp4jax.nn import Rules
from fp4jax.outliers import MAX_COUNT
from fp4jax.recipe import Recipe
from fp4jax.train.config import Plan, Settings
from fp4jax.train.errors import ConfigError
from fp4jax.train.gradient import across_data
from fp4jax.train.naming import parse_recipe
from fp4jax.train.optimizer import make_optimizer, make_schedule
from fp4jax.train.placement import OnMesh, Placement
from fp4jax.train.step import Architecture, TrainState, make_init, make_train_step


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a run of one recipe consists of.

    Args:
        recipe: parsed.
        model: its configuration.
        architecture: the model under the recipe.
        init: seed -> state.
        step: (state, tokens) -> (state, metrics).
    """

    recipe: Recipe
    model: LlamaConfig
    architecture: Architecture
    init: Callable[..., TrainState]
    step: Callable[..., tuple[TrainState, dict]]

    @classmethod
    def compose(cls, settings: Settings, recipe_text: str, vocab_size: int, placement: Placement) -> Self:
        """Put them together; inside `placement.active()`.

        Raises:
            ConfigError: settings that do not fit together, or a mesh that does not divide the model.
        """
        recipe, plan, reduction = parse_recipe(recipe_text), settings.plan, settings.optimizer.reduction
        model = settings.model.build(vocab_size, plan.seq_len)
        if isinstance(placement, OnMesh) and model.num_kv_heads % (tensor := placement.mesh.shape["tensor"]):
            raise ConfigError(f"mesh axis tensor={tensor} must divide num_kv_heads={model.num_kv_heads}")
        if reduction != "float32" and recipe.needs_key:
            raise ConfigError(
                f"reduction={reduction!r} cannot train {recipe_text!r}, whose noise would depend on the number of "
                "devices: take --reduction float32"
            )
        _check_counts(recipe, recipe_text, model, plan)
        architecture = _architecture(model, recipe, settings)
        optimizer = make_optimizer(settings.optimizer, plan.steps)
        step = make_train_step(
            architecture if reduction == "float32" else _architecture(model, across_data(recipe), settings),
            optimizer,
            make_schedule(settings.optimizer, plan.steps),
            accumulate=plan.accumulate,
            clip_norm=settings.optimizer.clip_norm or None,
            reduction=reduction,
        )
        return cls(recipe, model, architecture, make_init(architecture, optimizer, placement.parameters), step)


def recipe_rules(recipe: Recipe, high_precision: str) -> Rules:
    """All linear layers follow `recipe` but those whose path matches `high_precision`."""
    return [(high_precision, None), (".*", recipe)] if high_precision else [(".*", recipe)]


def _check_counts(recipe: Recipe, recipe_text: str, model: LlamaConfig, plan: Plan) -> None:
    """Refuse a microbatch whose widest activation has more values than an exact quantile can count."""
    occ = recipe.outliers
    if occ is None or occ.quantile != "exact" or occ.scope != "tensor":
        return
    width = max(model.embed_dim, model.num_heads * model.head_dim, model.mlp_dim)
    values = plan.batch_size // plan.accumulate * plan.seq_len * width
    if values >= MAX_COUNT:
        parts = (a for a in range(1, plan.batch_size) if plan.batch_size % a == 0)
        least = next((a for a in parts if values * plan.accumulate // a < MAX_COUNT), plan.batch_size)
        raise ConfigError(
            f"accumulate={plan.accumulate}: recipe {recipe_text!r} finds exact quantiles of fewer than {MAX_COUNT} "
            f"values, and an activation of a microbatch has {values}: give --accumulate {least}, or the knob "
            "quantile=sampled"
        )


def _architecture(model: LlamaConfig, recipe: Recipe, settings: Settings) -> Architecture:
    options = settings.quantization
    rules = recipe_rules(recipe, options.high_precision)
    return tried(lambda rngs: Llama(model, rules=rules, backend=options.backend, rngs=rngs), options.backend)


def tried(create: Callable[[nnx.Rngs], nnx.Module], backend: str | None) -> Architecture:
    """The architecture that `create` makes, tried abstractly: what does not fit is found before anything is compiled.

    Args:
        create: makes a language model.
        backend: what the user named, if anything; then a forward pass is tried too, except on a mesh.

    Raises:
        ConfigError: rules or a backend that the model cannot follow.
    """
    architecture = Architecture(create)
    try:
        _ = architecture.graphdef
        if backend is not None and jax.sharding.get_abstract_mesh().empty:
            tokens = jnp.zeros((1, 1), jnp.int32)
            nnx.eval_shape(lambda: create(nnx.Rngs(params=0, noise=0))(tokens))
    except ValueError as error:
        raise ConfigError(" ".join(str(error).split())) from error
    return architecture
