"""What a run does unless told otherwise, by model: the place to tune. Width and depth are `fp4jax.models.MODELS`."""

import dataclasses

DEFAULT_MODEL = "tiny"
"""What `--model` is where nobody says."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """Defaults of the settings that depend on the model's size.

    Args:
        steps: optimizer steps.
        batch_size: sequences in a step.
        seq_len: tokens of a sequence.
        learning_rate: peak learning rate, chosen on BF16.
        eval_every: steps between validations.
        eval_batches: validation batches each time, spread over the split; 0 takes the whole split.
    """

    steps: int
    batch_size: int
    seq_len: int
    learning_rate: float
    eval_every: int
    eval_batches: int

    def eval_every_of(self, steps: int) -> int:
        """Steps between the validations of a run of so many steps: a tenth of one that is shorter than the preset."""
        return max(1, min(self.eval_every, steps // 10)) if steps < self.steps else self.eval_every


PRESETS: dict[str, Preset] = {
    # `fp4jax compare`: three recipes in six minutes on two CPU cores.
    "tiny": Preset(steps=450, batch_size=16, seq_len=256, learning_rate=3e-3, eval_every=90, eval_batches=16),
    # About 20 tokens a parameter up to 125M; learning rates as GPTs of these sizes are trained (arXiv:2005.14165, Table
    # 2.1: 6e-4 at 125M, 3e-4 at 350M), and a little more below.
    "30m": Preset(steps=6000, batch_size=128, seq_len=1024, learning_rate=1e-3, eval_every=500, eval_batches=64),
    "60m": Preset(steps=9000, batch_size=128, seq_len=1024, learning_rate=1e-3, eval_every=500, eval_batches=64),
    "125m": Preset(steps=10_000, batch_size=256, seq_len=1024, learning_rate=6e-4, eval_every=500, eval_batches=64),
    "400m": Preset(steps=15_000, batch_size=256, seq_len=2048, learning_rate=3e-4, eval_every=1000, eval_batches=64),
    # arXiv:2501.17116, §4.1: 1.3B ablations take batch 256 for 10B tokens; 7B and 13B take batch 2048 for 100B.
    "1.3b": Preset(steps=19_073, batch_size=256, seq_len=2048, learning_rate=3e-4, eval_every=1000, eval_batches=64),
    "7b": Preset(steps=23_842, batch_size=2048, seq_len=2048, learning_rate=3e-4, eval_every=1000, eval_batches=64),
    "13b": Preset(steps=23_842, batch_size=2048, seq_len=2048, learning_rate=3e-4, eval_every=1000, eval_batches=64),
}
"""Defaults by `--model`; a test holds the keys equal to those of `MODELS`."""
