"""The optimizer of a run: a learning-rate schedule and an Optax transformation, chosen by name."""

from collections.abc import Callable

import jax
import optax

from fp4jax import optim as low_precision
from fp4jax.train.config import OptimizerOptions
from fp4jax.train.errors import ConfigError
from fp4jax.train.naming import check_choice

DECAYED = ("kernel", "embedding")
"""Names of the parameters that are matrices: all that weight decay touches."""


def make_schedule(options: OptimizerOptions, steps: int) -> optax.Schedule:
    """Linear warmup over the first `warmup · steps` updates, then a cosine down to `final_learning_rate · peak`.

    The first update already moves (its rate is peak / warmup updates, not 0), and the cosine would reach its end one
    update after the last.

    Args:
        options: a resolved configuration; `learning_rate` is the peak.
        steps: updates of the whole run.

    Returns:
        The learning rate as a function of the number of updates made.

    Example:
        >>> schedule = make_schedule(OptimizerOptions(learning_rate=1.0, warmup=0.1), steps=100)
        >>> [round(float(schedule(step)), 2) for step in (0, 9, 10, 55, 100)]
        [0.1, 0.91, 1.0, 0.55, 0.1]
    """
    if options.learning_rate is None:
        raise ConfigError("learning_rate=None: give one, or take it from a preset with Settings.resolved()")
    peak = options.learning_rate
    warmup = min(round(options.warmup * steps), steps - 1)
    return optax.warmup_cosine_decay_schedule(
        init_value=peak / max(warmup, 1),
        peak_value=peak,
        warmup_steps=warmup,
        decay_steps=steps,
        end_value=options.final_learning_rate * peak,
    )


def make_optimizer(options: OptimizerOptions, steps: int) -> optax.GradientTransformation:
    """The transformation that `options.optimizer` names: float32 gradients in, updates of the master weights out.

    Args:
        options: a resolved configuration.
        steps: updates of the whole run, for the schedule.

    Raises:
        ConfigError: an unknown name; the message lists what exists.
    """
    return OPTIMIZERS[check_choice("optimizer", options.optimizer, OPTIMIZERS)](options, make_schedule(options, steps))


def decay_mask(params: optax.Params) -> optax.Params:
    """True for the parameters that weight decay touches: matrices, embedding table and head included, but no norm.

    This is the practice of Megatron-LM, with which the paper trained: it exempts biases and one-dimensional parameters
    only. Names decide, since stacked blocks make the scale of a norm two-dimensional.
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: getattr(path[-1], "key", None) in DECAYED, params)


def _adamw(options: OptimizerOptions, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Global-norm clipping, then Optax's AdamW in float32 (Loshchilov & Hutter, arXiv:1711.05101)."""
    clip = optax.clip_by_global_norm(options.clip_norm) if options.clip_norm else optax.identity()
    adamw = optax.adamw(
        schedule, b1=options.b1, b2=options.b2, eps=options.eps, weight_decay=options.weight_decay, mask=decay_mask
    )
    return optax.chain(clip, adamw)


def _fp8_adamw(options: OptimizerOptions, schedule: optax.Schedule) -> optax.GradientTransformation:
    """The paper's scheme: gradients in E4M3, m in E4M3, v in FP16, each under a scale (see `fp4jax.optim.adamw`).

    The master weights are the float32 parameters of the train state. Its loss scale stays 1: activations and
    gradients are bfloat16 or scaled FP8, whose range needs none, and the train step skips what is not finite.
    """
    return low_precision.adamw(
        schedule,
        b1=options.b1,
        b2=options.b2,
        eps=options.eps,
        weight_decay=options.weight_decay,
        mask=decay_mask,
        clip_norm=options.clip_norm or None,
    )


OPTIMIZERS: dict[str, Callable[[OptimizerOptions, optax.Schedule], optax.GradientTransformation]] = {
    "adamw": _adamw,
    "fp8_adamw": _fp8_adamw,
}
"""What `--optimizer` can name. Anything that keeps float32 updates and a state of fixed dtypes fits in."""
