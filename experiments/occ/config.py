"""Figure 6c of the paper: outlier clamping and compensation, on 4-bit activations with 8-bit weights."""

from experiments.experiment import ArmSpec, Claim, Experiment

EXPERIMENT = Experiment(
    name="occ",
    question="What do clamping and compensating outliers gain 4-bit activations, by quantile, scope and compensation?",
    expected="Every form with compensation improves on none, the lower α the more; clamping alone is worse than both; "
    "a sampled quantile is as good as an exact one. No divergence at this size.",
    cost="9 runs of 3 seeds side by side on one H200, 10 to 70 s each, and 15 to 60 s to compile, beside "
    "others on the card; bf16 is that of precision",
    arms=(
        ArmSpec("bf16", "bf16", paper=2.74),
        ArmSpec("no OCC", "w8a4:alpha=none", paper=float("nan")),
        ArmSpec("α = .99", "w8a4", paper=2.765),
        ArmSpec("α = .97", "w8a4:alpha=0.97", paper=2.755),
        ArmSpec("α = .999", "w8a4:alpha=0.999", paper=2.785),
        ArmSpec("clamp only", "w8a4:compensation=none"),
        ArmSpec("by token", "w8a4:scope=vector"),
        ArmSpec("sampled", "w8a4:quantile=sampled"),
        ArmSpec("no OCC, tensor-wise", "w8a4:alpha=none,activation=PerTensor"),
        ArmSpec("α = .99, tensor-wise", "w8a4:activation=PerTensor"),
    ),
    claims=(
        Claim("OCC (α = .99) improves on none", "α = .99", "no OCC"),
        Claim("α = .99 beats α = .999", "α = .99", "α = .999"),
        Claim("α = .97 beats α = .99", "α = .97", "α = .99"),
        Claim("compensation matters", "α = .99", "clamp only"),
        Claim("clamping alone beats doing nothing", "clamp only", "no OCC"),
        Claim("thresholds by token beat those of the tensor", "by token", "α = .99"),
        Claim("an exact quantile beats a sampled one", "α = .99", "sampled"),
    ),
    paper="Fig. 6c, whose activations were scaled tensor-wise, by the commits of the authors' research branch; "
    "without OCC that run ended in NaN at 4.7B tokens.",
    figures=("activations",),
)
