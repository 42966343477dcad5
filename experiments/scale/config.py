"""The same comparison with larger models."""

from experiments.base import SEEDS, english
from experiments.experiment import ArmSpec, Claim, Experiment


def _pair(size: str) -> tuple[ArmSpec, ArmSpec]:
    settings, base = english(size), f"bf16, {size}"
    return (
        ArmSpec(label=base, recipe="bf16", settings=settings, baseline=base),
        ArmSpec(label=f"fp4, {size}", recipe="fp4", settings=settings, baseline=base),
    )


EXPERIMENT = Experiment(
    name="scale",
    question="Does the gap of FP4 grow with the model? The paper's does: 2.4 % at 1.3B, 4.8 % at 7B and 13B.",
    expected="At equal tokens, gaps at 34M and 125M within the spread of that at 9M.",
    cost="2 runs of 3 seeds side by side on one H200 at 34M, a minute each, and 2 at 125M, four minutes each",
    settings=english(),
    seeds=SEEDS,
    arms=(*_pair("9M"), *_pair("34M"), *_pair("125M")),
    baseline="bf16, 9M",
    claims=(
        Claim("fp4 stays behind bf16 at 9M", "bf16, 9M", "fp4, 9M"),
        Claim("fp4 stays behind bf16 at 34M", "bf16, 34M", "fp4, 34M"),
        Claim("fp4 stays behind bf16 at 125M", "bf16, 125M", "fp4, 125M"),
    ),
    paper="Losses at 100B tokens, FP4 and BF16: 2.55 and 2.49 (1.3B), 2.17 and 2.07 (7B), 1.97 and 1.88 (13B).",
)
