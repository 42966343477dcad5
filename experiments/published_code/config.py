"""The paper against the authors' code, as run and as released."""

from experiments.experiment import ArmSpec, Claim, Experiment

EXPERIMENT = Experiment(
    name="published_code",
    question="Does it matter which of the three one implements: the paper, the research branch, or the release?",
    expected="The research branch (E1M2 activations, α = .97) is nearest to BF16; the release, which discards what it "
    "clamps and rounds scales to powers of two, is farthest.",
    cost="2 runs of 3 seeds side by side on one H200, 50 s each, and 25 s to compile, beside others on the "
    "card; the others are those of precision",
    arms=(
        ArmSpec("bf16", "bf16"),
        ArmSpec("fp4", "fp4"),
        ArmSpec("fp4_research", "fp4_research"),
        ArmSpec("fp4_release", "fp4_release"),
    ),
    claims=(
        Claim("the research branch beats the paper", "fp4_research", "fp4"),
        Claim("the paper beats the release", "fp4", "fp4_release"),
    ),
    paper="The paper says nothing of its code; which of them made its figures is unknown.",
)
