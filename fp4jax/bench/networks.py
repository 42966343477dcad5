"""A linear layer, forward and backward, and a whole train step."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from fp4jax.bench.baselines import QWIX, compiled, flax_fp8_layer, qwix, qwix_model
from fp4jax.bench.config import BenchConfig
from fp4jax.bench.measure import Peaks, normal, peak_bytes, program_bytes, seconds, seconds_a_step
from fp4jax.bench.report import Bar, Bars, Result, Row
from fp4jax.dot import dot_general
from fp4jax.models import MODELS, Llama, LlamaConfig, count_parameters
from fp4jax.nn import default_rules
from fp4jax.train.config import OptimizerOptions
from fp4jax.train.naming import parse_recipe
from fp4jax.train.optimizer import make_optimizer, make_schedule
from fp4jax.train.step import Architecture, TrainState, make_init, make_train_step
from fp4jax.typing import Array

_DIMENSIONS = (((1,), (0,)), ((), ()))


def layers(config: BenchConfig, peaks: Peaks) -> Iterator[Result | Bars]:
    """Y = X W and both gradients, every cast counted: X in BF16, W in float32."""
    model, m, bars = MODELS[config.sizes[0]], config.tokens, []
    for k, n, aim in ((model.embed_dim, model.mlp_dim, 1.6), (model.embed_dim, model.embed_dim, 1.35)):
        rows = tuple(_layer_rows(config, m, k, n))
        result = Result(
            f"linear layer [{m}, {k}] → {n}, forward and backward", rows, 6.0 * m * k * n, "FLOP", peaks.fp8,
        )  # fmt: skip
        yield result
        bars += [
            Bar(f"{recipe} over XLA BF16, {k} → {n}", result.ratio(f"fp4jax {recipe}"), aim)
            for recipe in config.recipes
        ]
    yield Bars("linear layer: aims", tuple(bars))


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


NOMINAL = 990e12
"""FLOP/s of an H200 in BF16, by its data sheet."""


def steps(config: BenchConfig, peaks: Peaks | None) -> Iterator[Result | Bars]:
    """A train step of LLaMA: forward, backward, clipping and AdamW in float32. The table comes anew with every row."""
    model, batch = step_inputs(config)
    tokens = batch.shape[0] * (batch.shape[1] - 1)
    operations = step_operations(model, batch.shape[1] - 1) * tokens
    rows, notes, result = [], [], None
    if config.baselines and qwix() is None:
        notes.append("Qwix is not installed.")
    if peaks is None:
        notes.append("On this device the four bits are emulated: the same values as on a GPU, at the price of time.")
    for name, create in models(config, model, batch[:, :-1]).items():
        step, state = compiled_step(create, batch)
        time = seconds_a_step(step, state, batch, iterations=config.iterations)
        rows.append(Row(name, time, program_bytes(step), peak_bytes()))
        del state
        if peaks is not None and len(rows) == 1:
            share = operations / time / peaks.bfloat16
            notes.append(f"BF16 runs at {100 * share:.0f} % of the BF16 peak, {peaks.bfloat16 / 1e12:.0f} TFLOP/s.")
        result = Result(step_title(config, "train step"), tuple(rows), float(tokens), "tokens", notes=tuple(notes))
        yield result
    if peaks is None or result is None:
        return
    first, recipes = result.rows[0], [f"fp4jax {recipe}" for recipe in config.recipes]
    assert first.memory is not None
    yield Bars(
        "train step: aims",
        (
            Bar("BF16, share of 990 TFLOP/s", operations / first.seconds / NOMINAL, 0.45),
            *(Bar(f"{name} over BF16", result.ratio(name), 1.3) for name in recipes),
            *(
                Bar(f"{row.name}, peak memory over BF16", (row.memory or 0) / first.memory, 1.0, least=False)
                for row in result.rows
                if row.name in recipes
            ),
        ),
    )


def step_title(config: BenchConfig, what: str) -> str:
    """What of which step."""
    layers = "" if config.scan_layers else ", layers unrolled"
    return f"{what} of {config.model}, {config.batch_size} × {config.seq_len} tokens, remat {config.remat}{layers}"


def step_inputs(config: BenchConfig) -> tuple[LlamaConfig, Array]:
    """The model of a step, and its tokens [b, t + 1]."""
    assert config.model is not None
    assert config.seq_len is not None
    model = dataclasses.replace(
        MODELS[config.model],
        max_seq_len=max(MODELS[config.model].max_seq_len, config.seq_len),
        remat=config.remat,
        scan_layers=config.scan_layers,
    )
    rng = np.random.default_rng(0)
    batch = rng.integers(0, model.vocab_size, (config.batch_size, config.seq_len + 1))
    return model, jnp.asarray(batch, jnp.int32)


def step_operations(model: LlamaConfig, seq_len: int) -> float:
    """Floating-point operations a token of forward and backward: 6 a parameter of the products, and causal attention's
    6 · layers · width · seq_len.
    """
    table = model.vocab_size * model.embed_dim  # looked up, not multiplied; tied, it is also the head
    multiplied = count_parameters(model) - (0 if model.tie_embeddings else table)
    return 6.0 * multiplied + 6.0 * model.num_layers * model.num_heads * model.head_dim * seq_len


def models(config: BenchConfig, model: LlamaConfig, tokens: Array) -> dict[str, Callable[[nnx.Rngs], nnx.Module]]:
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


def step_functions(create: Callable[[nnx.Rngs], nnx.Module]) -> tuple[Callable, Callable[[int], TrainState]]:
    """The train step of a model, and what makes a state from a seed."""
    options = OptimizerOptions(learning_rate=1e-4)
    optimizer = make_optimizer(options, steps=1000)
    architecture = Architecture(create)
    step = make_train_step(architecture, optimizer, make_schedule(options, 1000), clip_norm=options.clip_norm)
    return step, make_init(architecture, optimizer)


def compiled_step(
    create: Callable[[nnx.Rngs], nnx.Module], batch: Array, compiler_options: Mapping[str, Any] | None = None
) -> tuple[jax.stages.Compiled, TrainState]:
    """The train step of a model, which donates its state, and a state."""
    step, init = step_functions(create)
    state = jax.jit(init)(0)
    lowered = jax.jit(step, donate_argnums=0).lower(state, batch)
    return lowered.compile(compiler_options=None if compiler_options is None else dict(compiler_options)), state
