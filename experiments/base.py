"""What the experiments have in common: models, text, batch, and the learning rates chosen for BF16 (see rates/)."""

from experiments.experiment import ROOT
from fp4jax.train.config import LoopOptions, ModelOptions, OptimizerOptions, QuantizationOptions, Settings
from fp4jax.train.data.load import DataOptions

CORPUS = ROOT.parent / "data" / "english"
"""A folder that `fp4jax data prepare` wrote; docs/experiments.md has the command."""
HEADLINE = ("state-of-the-union", "austen")
"""The sources on which results are headlined: prose, where the whole is 30 % a dictionary."""
MODELS = {
    "9M": ModelOptions(model="60m", num_layers=6, embed_dim=256, num_heads=4, tie_embeddings=True),
    "34M": ModelOptions(model="60m", tie_embeddings=True),
    "125M": ModelOptions(model="125m", tie_embeddings=True),
}
"""LLaMAs with tied embeddings, by their parameters under a vocabulary of 16,384."""
LEARNING_RATES = {"9M": 3e-3, "34M": 1e-3, "125M": 6e-4}
"""Peak rates: by the sweep of rates/ for BF16; that of 125M is the one GPT-3 of this size took (arXiv:2005.14165)."""
STEPS = 400
BATCH_SIZE, SEQ_LEN = 32, 512
SEEDS = (0, 1, 2)


def english(model: str = "9M", *, learning_rate: float | None = None, steps: int = STEPS) -> Settings:
    """A model on english.txt: steps of 32 × 512 tokens, validated five times on 24 batches over all sources.

    `backend="xla"` is the meaning of a recipe, and runs everywhere.

    Args:
        model: a key of `MODELS`.
        learning_rate: peak; by default that of `LEARNING_RATES`.
        steps: of the run.
    """
    return Settings(
        model=MODELS[model],
        quantization=QuantizationOptions(backend="xla"),
        data=DataOptions(text=(CORPUS,)),
        optimizer=OptimizerOptions(learning_rate=learning_rate or LEARNING_RATES[model]),
        loop=LoopOptions(
            steps=steps,
            batch_size=BATCH_SIZE,
            seq_len=SEQ_LEN,
            eval_every=steps // 5,
            eval_batches=24,
            tensorboard=False,
        ),
    )
