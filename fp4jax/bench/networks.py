"""A linear layer, forward and backward, and a whole train step."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from fp4jax.bench.baselines import QWIX, compiled, flax_fp8_layer, qwix, qwix_model
from fp4jax.bench.config import BenchConfig
from fp4jax.bench.measure import Peaks, normal, seconds, seconds_a_step
from fp4jax.bench.report import Result, Row
from fp4jax.dot import dot_general
from fp4jax.models import MODELS, Llama, LlamaConfig, count_parameters
from fp4jax.nn import default_rules
from fp4jax.train.config import OptimizerOptions
from fp4jax.train.naming import parse_recipe
from fp4jax.train.optimizer import make_optimizer, make_schedule
from fp4jax.train.step import Architecture, make_init, make_train_step
from fp4jax.typing import Array

_DIMENSIONS = (((1,), (0,)), ((), ()))


def layers(config: BenchConfig, peaks: Peaks) -> Iterator[Result]:
    """Y = X W and both gradients, every cast counted: X in BF16, W in float32."""
    model, m = MODELS[config.sizes[0]], config.tokens
    for k, n in ((model.embed_dim, model.mlp_dim), (model.embed_dim, model.embed_dim)):
        rows = tuple(_layer_rows(config, m, k, n))
        yield Result(
            f"linear layer [{m}, {k}] → {n}, forward and backward", rows, 6.0 * m * k * n, "FLOP", peaks.fp8,
        )  # fmt: skip


def _layer_rows(config: BenchConfig, m: int, k: int, n: int) -> Iterator[Row]:
    x, w, g = normal((m, k)), normal((k, n), jnp.float32, seed=1), normal((m, n), seed=2)
    timed = functools.partial(seconds, iterations=config.iterations)

    def both(product: Callable[[Array, Any], Array]) -> Callable:
        def run(x, w, g):
            y, vjp = jax.vjp(product, x, w)
            return y, vjp(g)

        return compiled(run, quick=config.quick_baselines)

    def bfloat16(x, w):
        return lax.dot_general(x, w.astype(x.dtype), _DIMENSIONS)

    yield Row("XLA BF16", timed(both(bfloat16), x, w, g))
    for name in config.recipes:
        recipe = parse_recipe(name)
        key = jax.random.key(0) if recipe.needs_key else None
        product = functools.partial(dot_general, dimension_numbers=_DIMENSIONS, recipe=recipe, key=key)
        yield Row(f"fp4jax {name}", timed(both(product), x, w, g))
    if config.baselines:
        apply, init = flax_fp8_layer(n)
        yield Row("Flax Fp8DotGeneral", timed(both(lambda x, v: apply(v, x)), x, init(x), g))
        if module := qwix():
            linear = nnx.Linear(k, n, use_bias=False, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
            graphdef, state = nnx.split(qwix_model(module, linear, QWIX["Qwix FP8"], "$.", x))
            yield Row("Qwix FP8", timed(both(lambda x, s: nnx.merge(graphdef, s)(x)), x, state, g))


def steps(config: BenchConfig, peaks: Peaks | None) -> Iterator[Result]:
    """A train step of LLaMA: forward, backward, clipping and AdamW in float32."""
    assert config.model is not None
    assert config.seq_len is not None
    model = dataclasses.replace(
        MODELS[config.model],
        max_seq_len=max(MODELS[config.model].max_seq_len, config.seq_len),
        remat=config.remat,
    )
    rng = np.random.default_rng(0)
    batch = jnp.asarray(rng.integers(0, model.vocab_size, (config.batch_size, config.seq_len + 1)), jnp.int32)
    rows, notes = [], []
    for name, create in _models(config, model, batch[:, :-1]).items():
        rows.append(Row(name, _step_seconds(create, batch, config.iterations)))
    tokens = config.batch_size * config.seq_len
    operations = step_operations(model, config.seq_len) * tokens
    if config.baselines and qwix() is None:
        notes.append("Qwix is not installed.")
    if peaks is not None:
        share = operations / rows[0].seconds / peaks.bfloat16
        notes.append(f"BF16 runs at {100 * share:.0f} % of the BF16 peak, {peaks.bfloat16 / 1e12:.0f} TFLOP/s.")
    else:
        notes.append("On this device the four bits are emulated: the same values as on a GPU, at the price of time.")
    title = f"train step of {config.model}, {config.batch_size} × {config.seq_len} tokens, remat {config.remat}"
    yield Result(title, tuple(rows), float(tokens), "tokens", notes=tuple(notes))


def step_operations(model: LlamaConfig, seq_len: int) -> float:
    """Floating-point operations a token of forward and backward: 6 a parameter of the products, and causal attention's
    6 · layers · width · seq_len.
    """
    table = model.vocab_size * model.embed_dim  # looked up, not multiplied; tied, it is also the head
    multiplied = count_parameters(model) - (0 if model.tie_embeddings else table)
    return 6.0 * multiplied + 6.0 * model.num_layers * model.num_heads * model.head_dim * seq_len


def _models(config: BenchConfig, model: LlamaConfig, tokens: Array) -> dict[str, Callable[[nnx.Rngs], nnx.Module]]:
    """How to create each model, the BF16 baseline first."""

    def under(recipe: str) -> Callable[[nnx.Rngs], nnx.Module]:
        return lambda rngs: Llama(model, rules=default_rules(parse_recipe(recipe)), rngs=rngs)

    found = {"BF16": lambda rngs: Llama(model, rngs=rngs)}
    found |= {f"fp4jax {recipe}": under(recipe) for recipe in config.recipes}
    module = qwix() if config.baselines else None
    if module is not None:
        for name, rule in QWIX.items():
            found[name] = functools.partial(_with_qwix, module, model, rule, tokens)
    return found


def _with_qwix(module: Any, model: LlamaConfig, rule: Any, tokens: Array, rngs: nnx.Rngs) -> nnx.Module:
    # Qwix looks at what a call of the model does, so it needs some tokens, of which one row is enough.
    return qwix_model(module, Llama(model, rngs=rngs), rule, "embed|head", tokens[:1])


def _step_seconds(create: Callable[[nnx.Rngs], nnx.Module], batch: Array, iterations: int) -> float:
    options = OptimizerOptions(learning_rate=1e-4)
    optimizer = make_optimizer(options, steps=1000)
    architecture = Architecture(create)
    step = make_train_step(architecture, optimizer, make_schedule(options, 1000), clip_norm=options.clip_norm)
    state = jax.jit(make_init(architecture, optimizer))(0)
    return seconds_a_step(jax.jit(step, donate_argnums=0), state, batch, iterations=iterations)
