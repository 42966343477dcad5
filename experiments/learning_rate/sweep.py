"""Which learning rate suits the tiny LLaMA in BF16, and what FP4 does at the same rates. See README.md beside this."""

import dataclasses
import datetime
import json
import pathlib
import platform
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx

from fp4jax.models import MODELS, Llama
from fp4jax.models.loss import cross_entropy
from fp4jax.nn import default_rules
from fp4jax.recipes import RECIPES
from fp4jax.train.data import embedded


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Every learning rate times every seed, side by side under vmap in one compiled program a recipe."""

    out: pathlib.Path
    """JSON file to write."""
    steps: int = 450
    """Optimizer steps."""
    batch_size: int = 16
    """Sequences in a step."""
    seq_len: int = 256
    """Tokens of a sequence."""
    learning_rates: tuple[float, ...] = (2e-3, 3e-3, 4e-3, 6e-3)
    """Peak learning rates."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of weights and data."""
    recipes: tuple[str, ...] = ("bf16", "fp4", "fp4_direct")
    """Recipes by name."""


def final_losses(sweep: Sweep, recipe_name: str, train: jax.Array, validation: np.ndarray) -> np.ndarray:
    """Validation loss [learning rate, seed] after training under one recipe."""
    config = dataclasses.replace(MODELS["tiny"], attention="xla")
    rules = default_rules(RECIPES[recipe_name]())

    def split(key):
        return nnx.split(Llama(config, rules=rules, rngs=nnx.Rngs(key)), nnx.Param)

    graphdef = nnx.split(nnx.eval_shape(lambda: Llama(config, rules=rules, rngs=nnx.Rngs(0))), nnx.Param)[0]
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(0.9, 0.95, 1e-8),
        optax.add_decayed_weights(0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 2, p)),
    )
    warmup = max(1, sweep.steps // 20)

    def loss(params, tokens):
        return cross_entropy(nnx.merge(graphdef, params)(tokens[:, :-1]), tokens[:, 1:])

    def run(learning_rate, seed):
        params = split(jax.random.key(seed))[1]

        def step(carry, i):
            params, state = carry
            first = jax.random.randint(
                jax.random.fold_in(jax.random.key(seed), i), (sweep.batch_size, 1), 0, train.size - sweep.seq_len - 1
            )
            tokens = train[first + jnp.arange(sweep.seq_len + 1)].astype(jnp.int32)
            updates, state = optimizer.update(jax.grad(loss)(params, tokens), state, params)
            progress = jnp.clip((i - warmup) / (sweep.steps - warmup), 0, 1)
            cosine = 0.1 + 0.45 * (1 + jnp.cos(jnp.pi * progress))
            rate = learning_rate * jnp.where(i < warmup, (i + 1) / warmup, cosine)
            return (optax.apply_updates(params, jax.tree.map(lambda u: -rate * u, updates)), state), None

        (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), jnp.arange(sweep.steps))
        parts = validation.reshape(-1, min(16, len(validation)), validation.shape[-1])
        return jnp.mean(jnp.stack([loss(params, jnp.asarray(part)) for part in parts]))

    grid = [np.asarray(a) for a in zip(*((lr, s) for lr in sweep.learning_rates for s in sweep.seeds), strict=True)]
    losses = jax.jit(jax.vmap(run))(jnp.asarray(grid[0], jnp.float32), jnp.asarray(grid[1]))
    return np.asarray(losses).reshape(len(sweep.learning_rates), len(sweep.seeds))


def main(sweep: Sweep) -> None:
    """Runs the sweep and writes its JSON."""
    corpus = embedded()
    text = np.asarray(corpus.read(0, corpus.num_tokens))
    held_out = text[-len(text) // 20 :]
    stride = len(held_out) // 64
    windows = np.stack(
        [held_out[i * stride :][: sweep.seq_len + 1] for i in range(63)] + [held_out[-sweep.seq_len - 1 :]]
    )
    train = jnp.asarray(text[: -len(text) // 20])
    record = {"sweep": {**dataclasses.asdict(sweep), "out": sweep.out.name}, "validation_loss": {}, "seconds": {}}
    record["made"] = {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
    }
    for name in sweep.recipes:
        start = time.perf_counter()
        record["validation_loss"][name] = final_losses(sweep, name, train, windows.astype(np.int32)).tolist()
        record["seconds"][name] = time.perf_counter() - start
        means = np.mean(record["validation_loss"][name], axis=1)
        print(name, *(f"{lr:g}: {m:.4f}" for lr, m in zip(sweep.learning_rates, means, strict=True)), flush=True)
        sweep.out.parent.mkdir(parents=True, exist_ok=True)
        sweep.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Sweep, description=__doc__))
