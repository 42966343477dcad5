"""The same comparison with larger models."""

from experiments.base import ENGLISH
from experiments.experiment import ArmSpec, Claim, Experiment

EXPERIMENT = Experiment(
    name="scale",
    question="Does the gap of FP4 grow with the model? The paper's does: 2.4 % at 1.3B, 4.8 % at 7B and 13B.",
    expected="At equal tokens, gaps at 34M and 125M within the spread of that at 9M.",
    cost="2 runs of 3 seeds side by side on one H200 at 34M, and 2 at 125M, an estimated one and two minutes each; "
    "those at 9M are those of precision",
    settings=ENGLISH,
    sizes=tuple(ENGLISH),
    arms=(
        ArmSpec("bf16", "bf16"),
        ArmSpec("fp4", "fp4"),
    ),
    claims=(Claim("fp4 stays behind bf16", "bf16", "fp4"),),
    paper="Losses at 100B tokens, FP4 and BF16: 2.55 and 2.49 (1.3B), 2.17 and 2.07 (7B), 1.97 and 1.88 (13B).",
)
