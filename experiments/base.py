"""What the experiments have in common: model, text, batch, and the learning rate chosen for BF16 (see rates/)."""

from experiments.experiment import ROOT
from fp4jax.train.config import LoopOptions, ModelOptions, OptimizerOptions, QuantizationOptions, Settings
from fp4jax.train.data.load import DataOptions

CORPUS = ROOT.parent / "data" / "english"
"""A folder that `fp4jax data prepare` wrote; docs/experiments.md has the command."""
HEADLINE = ("state-of-the-union", "austen")
"""The sources on which results are headlined: prose, where the whole is 30 % a dictionary."""
LEARNING_RATE = 2e-3
BATCH_SIZE, SEQ_LEN = 32, 512
SEEDS = (0, 1, 2)


def english(
    *, steps: int = 600, model: str = "60m", learning_rate: float = LEARNING_RATE, batch_size: int = BATCH_SIZE
) -> Settings:
    """A LLaMA with tied embeddings on english.txt: 8 blocks of 512 (34M parameters) unless `model` says otherwise.

    `backend="xla"` is the meaning of a recipe, and runs everywhere. Validation is on 24 batches spread over all
    sources, five times a run.
    """
    return Settings(
        model=ModelOptions(model=model, tie_embeddings=True),
        quantization=QuantizationOptions(backend="xla"),
        data=DataOptions(text=(CORPUS,)),
        optimizer=OptimizerOptions(learning_rate=learning_rate),
        loop=LoopOptions(
            steps=steps,
            batch_size=batch_size,
            seq_len=SEQ_LEN,
            eval_every=max(1, steps // 5),
            eval_batches=24,
            tensorboard=False,
        ),
    )
