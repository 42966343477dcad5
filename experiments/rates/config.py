"""Which learning rate suits BF16, and how much the gap of FP4 depends on it."""

from experiments.base import english
from experiments.experiment import ArmSpec, Experiment

RATES = (1e-3, 2e-3, 4e-3, 8e-3)


def _arm(label: str, recipe: str) -> ArmSpec:
    return ArmSpec(label=label, recipe=recipe, optimizer="adamw_lanes", learning_rates=RATES)


EXPERIMENT = Experiment(
    name="rates",
    question="Which peak learning rate suits BF16, and how much does the gap of FP4 depend on it?",
    expected="An optimum of BF16 near .002; the gap of fp4 shrinks as the rate grows, as at the tiny size, and it does "
    "so by DGE.",
    cost="3 runs of 4 rates side by side at 9M and 1 at 34M on one H200, half a minute each",
    settings=english(learning_rate=1e-3, steps=600),  # what the rates are multiples of
    seeds=(0,),
    arms=(
        _arm("bf16", "bf16"),
        _arm("fp4", "fp4"),
        _arm("fp4 without DGE", "fp4:k=none"),
        ArmSpec(
            label="bf16, 34M",
            recipe="bf16",
            optimizer="adamw_lanes",
            learning_rates=(5e-4, 1e-3, 2e-3, 4e-3),
            settings=english("34M", learning_rate=1e-3, steps=600),
            baseline="bf16, 34M",
        ),
    ),
    figures=("rates",),
)
