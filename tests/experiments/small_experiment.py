"""Experiments small enough for a CPU: every arm as it is, on a micro model and the novels of the package."""

import dataclasses

from experiments.experiment import Experiment
from fp4jax.train.config import LoopOptions, ModelOptions, Settings
from fp4jax.train.data import DataOptions


def small(experiment: Experiment) -> Experiment:
    """`experiment` with 1 block of 32, 3 steps of 4 × 32 bytes, and 2 seeds; recipes and optimizers as they are."""
    settings = {size: micro(settings) for size, settings in experiment.settings.items()}
    return dataclasses.replace(experiment, settings=settings, seeds=(0, 1))


def micro(settings: Settings) -> Settings:
    """Those settings at the smallest size."""
    return dataclasses.replace(
        settings,
        model=ModelOptions(num_layers=1, embed_dim=32, num_heads=2, mlp_dim=64, tie_embeddings=True),
        data=DataOptions(),
        loop=LoopOptions(steps=3, batch_size=4, seq_len=32, eval_every=2, eval_batches=2, tensorboard=False),
    )
