"""Figure 6b of the paper: the differentiable gradient estimator, on 4-bit weights with 8-bit activations."""

from experiments.experiment import ArmSpec, Claim, Experiment

EXPERIMENT = Experiment(
    name="dge",
    question="Is DGE a gain, nothing or a harm for 4-bit weights, by k and by clip, and why?",
    expected="A small gain over STE that does not depend on k, much of it from the shorter gradients that clipping "
    "lets pass; the paper finds .07 nats, a later report a harm.",
    cost="8 runs of 3 seeds side by side on one H200, 10 to 45 s each, and 15 to 35 s to compile, beside "
    "others on the card; bf16 is that of precision",
    arms=(
        ArmSpec("bf16", "bf16", paper=2.74),
        ArmSpec("STE", "w4a8:k=none", paper=2.83),
        ArmSpec("k = 5", "w4a8", paper=2.76),
        ArmSpec("k = 3", "w4a8:k=3", paper=2.775),
        ArmSpec("k = 10", "w4a8:k=10", paper=2.775),
        ArmSpec("k = 5, clip 10", "w4a8:clip=10"),
        ArmSpec("k = 5, clip 1", "w4a8:clip=1"),
        ArmSpec("STE, tensor-wise", "w4a8:k=none,weight=PerTensor"),
        ArmSpec("k = 5, tensor-wise", "w4a8:weight=PerTensor"),
    ),
    claims=(
        Claim("DGE (k = 5) improves on STE", "k = 5", "STE"),
        Claim("DGE (k = 3) improves on STE", "k = 3", "STE"),
        Claim("DGE (k = 10) improves on STE", "k = 10", "STE"),
        Claim("k = 5 beats k = 3", "k = 5", "k = 3"),
        Claim("k = 5 beats k = 10", "k = 5", "k = 10"),
        Claim("DGE improves on STE under tensor-wise scales", "k = 5, tensor-wise", "STE, tensor-wise"),
    ),
    paper="Fig. 6b, whose weights were scaled tensor-wise, by the commits of the authors' research branch.",
    figures=("weights",),
)
