"""What the experiments have in common: models, text, batch, and the learning rates chosen for BF16 (see rates/)."""

from pathlib import Path

from fp4jax.train.config import LoopOptions, ModelOptions, OptimizerOptions, QuantizationOptions, Settings
from fp4jax.train.data.load import DataOptions

ROOT = Path(__file__).parent
"""The folder of the experiments."""
DEFAULT_SIZE = "9M"
"""The key of `SIZES` that an experiment is run at unless it or the command line says otherwise."""
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
TINY_STEPS, TINY_BATCH_SIZE, TINY_SEQ_LEN = 200, 8, 128
"""Of the size that a CPU core can pay for: a ninth of the bytes of `fp4jax compare`, in small steps to make the most of
them."""
SEEDS = (0, 1, 2)
_XLA = QuantizationOptions(backend="xla")
"""The meaning of a recipe, which runs everywhere."""


def english(size: str = DEFAULT_SIZE, *, learning_rate: float | None = None, steps: int = STEPS) -> Settings:
    """A model on english.txt: steps of 32 × 512 tokens, validated five times on 24 batches over all sources.

    Args:
        size: a key of `MODELS`.
        learning_rate: peak; by default that of `LEARNING_RATES`.
        steps: of the run.
    """
    return Settings(
        model=MODELS[size],
        quantization=_XLA,
        data=DataOptions(text=(CORPUS,)),
        optimizer=OptimizerOptions(learning_rate=learning_rate or LEARNING_RATES[size]),
        loop=LoopOptions(
            steps=steps,
            batch_size=BATCH_SIZE,
            seq_len=SEQ_LEN,
            eval_every=steps // 5,
            eval_batches=24,
            tensorboard=False,
        ),
    )


def tiny() -> Settings:
    """What `fp4jax compare` trains, on the novels in the package, in fewer and smaller steps: needs no text, no GPU."""
    loop = LoopOptions(
        steps=TINY_STEPS,
        batch_size=TINY_BATCH_SIZE,
        seq_len=TINY_SEQ_LEN,
        eval_every=TINY_STEPS // 4,
        eval_batches=24,
        tensorboard=False,
    )
    return Settings(quantization=_XLA, loop=loop).resolved()


ENGLISH: dict[str, Settings] = {size: english(size) for size in MODELS}
"""The settings of the sizes on english.txt."""
SIZES: dict[str, Settings] = {**ENGLISH, "tiny": tiny()}
"""Those of all sizes, in the order of the reports."""
