"""The chain on a tiny LLaMA that reads novels: the loss is that of float32 AdamW to half a percent, three seeds."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fp4jax
from fp4jax import optim
from fp4jax.models import Llama, LlamaConfig
from fp4jax.nn import default_rules
from fp4jax.train.data.load import embedded
from fp4jax.train.data.sampling import Batches
from fp4jax.train.optimizer import decay_mask
from fp4jax.train.step import Architecture, make_init, make_train_step

STEPS, SEEDS, LAST = 120, 3, 30
CONFIG = LlamaConfig(
    vocab_size=256, num_layers=2, embed_dim=48, num_heads=2, num_kv_heads=2, head_dim=24, mlp_dim=128, max_seq_len=48
)


@pytest.mark.slow
def test_loss_within_half_a_percent_of_float32():
    corpus = embedded().split().train
    batches = [Batches(corpus, seq_len=48, batch_size=8, seed=seed) for seed in range(SEEDS)]
    tokens = np.array([[b.batch(i)["tokens"] for i in range(STEPS)] for b in batches])
    schedule = optax.warmup_cosine_decay_schedule(3e-4, 3e-3, STEPS // 20, STEPS, 3e-4)
    settings = {"b2": 0.95, "weight_decay": 0.1, "mask": decay_mask}
    rules = default_rules(fp4jax.recipes.bf16())
    architecture = Architecture(lambda rngs: Llama(CONFIG, rules=rules, rngs=rngs))

    def losses(tx):
        step = make_train_step(architecture, tx, schedule)

        def train(seed_and_tokens):
            seed, tokens = seed_and_tokens
            state, metrics = jax.lax.scan(step, make_init(architecture, tx)(seed), tokens)
            return state.skipped, metrics["loss"]

        skipped, loss = jax.jit(lambda x: jax.lax.map(train, x))((jnp.arange(SEEDS), jnp.asarray(tokens)))
        assert not np.any(skipped)
        return np.asarray(loss)

    theirs = losses(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, **settings)))
    ours = losses(optim.adamw(schedule, clip_norm=1.0, **settings))
    assert np.all(theirs[:, -LAST:].mean(axis=1) < 0.6 * theirs[:, 0])
    np.testing.assert_allclose(ours[:, -LAST:].mean(axis=1), theirs[:, -LAST:].mean(axis=1), rtol=5e-3)
    assert not np.array_equal(ours, theirs)
