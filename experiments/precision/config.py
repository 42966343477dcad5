"""Figure 6a of the paper: what each part of the method is worth, from a direct cast to 4 bits up to the whole."""

from experiments.experiment import ArmSpec, Claim, Experiment

EXPERIMENT = Experiment(
    name="precision",
    question="How far from BF16 do FP8 and FP4 end, and what do vector-wise scales, OCC and DGE each contribute?",
    expected="bf16 < fp8 < fp4 < the two with one part < fp4_vector < fp4_direct, as in the paper; smaller gaps, "
    "since runs this short end far from where BF16 stops improving.",
    cost="7 runs of 3 seeds side by side on one H200, 20 to 55 s each, and as much to compile, beside others on "
    "the card",
    arms=(
        ArmSpec("bf16", "bf16", paper=2.74),
        ArmSpec("fp4", "fp4", paper=2.765),
        ArmSpec("fp4_vector", "fp4_vector", paper=2.855),
        ArmSpec("fp4_direct", "fp4_direct", paper=4.55),
        ArmSpec("fp4_vector + OCC", "fp4:k=none"),
        ArmSpec("fp4_vector + DGE", "fp4:alpha=none"),
        ArmSpec("fp8", "fp8", paper=2.745),
    ),
    claims=(
        Claim("vector-wise scales beat a direct cast", "fp4_vector", "fp4_direct"),
        Claim("OCC improves on vector-wise scales", "fp4_vector + OCC", "fp4_vector"),
        Claim("DGE improves on vector-wise scales", "fp4_vector + DGE", "fp4_vector"),
        Claim("both together improve on OCC alone", "fp4", "fp4_vector + OCC"),
        Claim("both together improve on DGE alone", "fp4", "fp4_vector + DGE"),
        Claim("fp4 stays behind bf16", "bf16", "fp4"),
        Claim("fp8 is better than fp4", "fp8", "fp4"),
    ),
    paper="Fig. 6a (fp4_vector: 6d), 1.3B parameters, 10B tokens of DCLM, read off the plots to ±.01.",
    figures=("weights", "activations"),
)
