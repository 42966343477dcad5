"""The paper's low-precision optimizer (§4.1) against AdamW in float32."""

from experiments.experiment import ArmSpec, Claim, Experiment

EXPERIMENT = Experiment(
    name="optimizer",
    question="Does the low-precision optimizer (FP8 gradients and first moment, FP16 second moment) cost loss?",
    expected="No difference beyond the spread of seeds.",
    cost="1 run of 3 seeds side by side on one H200, 70 s, and 60 s to compile, beside others on the "
    "card; the others are those of precision",
    arms=(
        ArmSpec("bf16", "bf16"),
        ArmSpec("fp4", "fp4"),
        ArmSpec("fp4, low-precision AdamW", "fp4", optimizer="fp8_adamw"),
    ),
    claims=(Claim("float32 AdamW beats the low-precision one", "fp4", "fp4, low-precision AdamW"),),
    paper="The paper trained every FP4 arm with it and has no comparison.",
)
