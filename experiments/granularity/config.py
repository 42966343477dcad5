"""Figure 6d of the paper: who shares a scale."""

from experiments.experiment import ArmSpec, Claim, Experiment

EXPERIMENT = Experiment(
    name="granularity",
    question="Which granularity do weights and activations need: a scale a tensor, a vector, or a block of 32 or 16?",
    expected="The activation's matters most, as in the paper; blocks beat vectors a little.",
    cost="4 runs of 3 seeds side by side on one H200, 40 to 90 s each, and 15 to 80 s to compile, beside "
    "others on the card; the others are those of precision",
    arms=(
        ArmSpec("bf16", "bf16", paper=2.74),
        ArmSpec("W tensor, A tensor", "fp4_direct", paper=4.55),
        ArmSpec("W vector, A tensor", "fp4_vector:activation=PerTensor", paper=4.65),
        ArmSpec("W tensor, A vector", "fp4_vector:weight=PerTensor", paper=2.92),
        ArmSpec("W vector, A vector", "fp4_vector", paper=2.855),
        ArmSpec("blocks of 32", "fp4_vector:activation=PerBlock(32),weight=PerBlock(32)"),
        ArmSpec("blocks of 16", "fp4_vector:activation=PerBlock(16),weight=PerBlock(16)"),
    ),
    claims=(
        Claim("vectors beat tensors for the activation", "W tensor, A vector", "W tensor, A tensor"),
        Claim("vectors beat tensors for the weight, under vectors", "W vector, A vector", "W tensor, A vector"),
        Claim("vectors beat tensors for the weight, under tensors", "W vector, A tensor", "W tensor, A tensor"),
        Claim("blocks of 32 beat vectors", "blocks of 32", "W vector, A vector"),
        Claim("blocks of 16 beat blocks of 32", "blocks of 16", "blocks of 32"),
    ),
    paper='Fig. 6d; "coarse" is tensor, "fine" is vector.',
    figures=("activations",),
)
