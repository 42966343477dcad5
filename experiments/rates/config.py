"""Which learning rate suits BF16, and how much the gap of FP4 depends on it."""

from experiments.base import english
from experiments.experiment import ArmSpec, Experiment

OPTIMIZER = "adamw_lanes"

EXPERIMENT = Experiment(
    name="rates",
    question="Which peak learning rate suits BF16, and how much does the gap of FP4 depend on it?",
    expected="An optimum of BF16 near .002; the gap of fp4 shrinks as the rate grows, as at the tiny size, and it does "
    "so by DGE.",
    cost="3 runs of 4 rates side by side at each size on one H200; at 9M 14 s for bf16, and for each of the others "
    "120 s, and 55 s to compile, beside others on the card; at 34M 32 s for bf16, an estimated 70 s for each of the "
    "others",
    settings={size: english(size, learning_rate=1e-3, steps=600) for size in ("9M", "34M")},  # the rates' unit
    sizes=("9M", "34M"),
    learning_rates={"9M": (1e-3, 2e-3, 4e-3, 8e-3), "34M": (5e-4, 1e-3, 2e-3, 4e-3)},
    seeds=(0,),
    arms=(
        ArmSpec("bf16", "bf16", optimizer=OPTIMIZER),
        ArmSpec("fp4", "fp4", optimizer=OPTIMIZER),
        ArmSpec("fp4 without DGE", "fp4:k=none", optimizer=OPTIMIZER),
    ),
    figures=("rates",),
)
