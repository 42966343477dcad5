"""Which learning rate suits BF16 at this size, and how much the gap of FP4 depends on it."""

from experiments.base import english
from experiments.experiment import ArmSpec, Experiment

RATES = (5e-4, 1e-3, 2e-3, 4e-3)


def _arm(label: str, recipe: str) -> ArmSpec:
    return ArmSpec(label=label, recipe=recipe, optimizer="adamw_lanes", learning_rates=RATES)


EXPERIMENT = Experiment(
    name="rates",
    question="Which peak learning rate suits BF16 at this size, and how much does the gap of FP4 depend on it?",
    expected="An optimum of BF16 near .002; the gap of fp4 shrinks as the rate grows, as at the tiny size.",
    cost="3 runs of 4 rates side by side on one H200, a minute each",
    settings=english(learning_rate=1e-3),  # what the rates are multiples of
    seeds=(0,),
    arms=(_arm("bf16", "bf16"), _arm("fp4", "fp4"), _arm("fp4_vector", "fp4_vector")),
    figures=("rates",),
)
