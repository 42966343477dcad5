"""The table and figure of the project's README: loss, speed and memory of the recipes side by side."""

from experiments.base import ENGLISH
from experiments.experiment import ArmSpec, Claim, Experiment
from experiments.headline import speed

EXPERIMENT = Experiment(
    name="headline",
    question="What do the recipes cost in loss, and what in speed and memory where 4-bit products are emulated?",
    expected="fp4 within a percent of bf16, fp4_direct several percent behind; every quantized recipe slower than "
    "bf16, since the xla backend multiplies in bfloat16.",
    cost="nothing of its own: all its pieces are those of precision",
    settings=ENGLISH,
    arms=(
        ArmSpec("bf16", "bf16", paper=2.74),
        ArmSpec("fp8", "fp8", paper=2.745),
        ArmSpec("fp4", "fp4", paper=2.765),
        ArmSpec("fp4_vector", "fp4_vector", paper=2.855),
        ArmSpec("fp4_direct", "fp4_direct", paper=4.55),
    ),
    claims=(
        Claim("fp4 stays behind bf16", "bf16", "fp4"),
        Claim("fp4 beats a direct cast", "fp4", "fp4_direct"),
    ),
    paper="Fig. 6a and 6d.",
    appendix=speed.table,
)
