# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # One model, four recipes: where does the error come from?
#
# A **recipe** says what each of the three products of a linear layer quantizes: the forward product $Y = XW$, and the
# two backward ones, $dX = dY\,W^\top$ and $dW = X^\top dY$. This notebook takes four of them. It trains a tiny LLaMA
# under the first and the last, looks into what all of them do with `fp4jax.telemetry`, and then takes a recipe apart,
# operand by operand, to see what each costs.
#
# | recipe | activations | weights | gradients |
# | --- | --- | --- | --- |
# | `bf16` | – | – | – |
# | `fp4_direct` | E2M1, one scale a tensor | E2M1, one scale a tensor, STE | E5M2 |
# | `fp4_vector` | E2M1, one scale a token | E2M1, one scale an output channel, STE | E5M2 |
# | `fp4` | the same, outliers clamped and compensated | the same, DGE | E5M2 |
#
# `fp4` is the paper's method ([arXiv:2501.17116](https://arxiv.org/abs/2501.17116)). FP4 is emulated here: values and
# scales are those of the hardware format, and the products run on grid values in bfloat16. Losses are meaningful,
# speed is not.

# %%
import dataclasses
import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from IPython.display import Image, display

import fp4jax
from fp4jax import telemetry
from fp4jax.models import MODELS, Llama, cross_entropy
from fp4jax.nn import default_rules
from fp4jax.train import data

COLORS = {"bf16": "#888888", "fp4_direct": "#D55E00", "fp4_vector": "#E69F00", "fp4": "#0072B2"}
plt.rcParams.update(
    {
        "figure.dpi": 110, "figure.constrained_layout.use": True, "font.size": 11,
        "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    }
)  # fmt: skip

# %% [markdown]
# ## The model and its text
#
# Three blocks of width 64, bytes as tokens, the novels that come with the package. `default_rules` gives every linear
# layer of the blocks the recipe, and leaves embedding and head alone. The initial weights do not depend on the recipe.

# %%
CONFIG = dataclasses.replace(
    MODELS["tiny"], num_layers=3, embed_dim=64, num_heads=2, num_kv_heads=2, head_dim=32, mlp_dim=176
)
STEPS, BATCH, LENGTH = 100, 16, 64

novels = data.embedded().read(0, 1_000_000)


def windows(seed, count=BATCH):
    """Random windows [count, LENGTH + 1] of the text."""
    starts = np.random.default_rng(seed).integers(0, len(novels) - LENGTH - 1, count)
    return jnp.asarray(np.stack([novels[s : s + LENGTH + 1] for s in starts]).astype(np.int32))


def build(recipe):
    return Llama(CONFIG, rules=default_rules(recipe), rngs=nnx.Rngs(0))


def loss_of(model, tokens):
    return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])


print(fp4jax.nn.describe_model(build(fp4jax.recipes.fp4())))

# %% [markdown]
# Ordinary Flax and Optax from here on; the recipe lives inside the layers.

# %%
OPTIMIZER = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 10, STEPS), b2=0.95)
BATCHES = [windows(step) for step in range(STEPS)]


def train(recipe):
    """Losses, and the trained parameters."""
    graphdef, params = nnx.split(build(recipe), nnx.Param)

    @jax.jit
    def step(params, state, tokens):
        loss, grads = jax.value_and_grad(lambda params: loss_of(nnx.merge(graphdef, params), tokens))(params)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = OPTIMIZER.init(params), []
    for tokens in BATCHES:
        params, state, loss = step(params, state, tokens)
        losses.append(loss)
    return np.asarray(losses), params


recipes = {name: fp4jax.recipes.RECIPES[name]() for name in COLORS}
trained = {name: train(recipes[name]) for name in ("bf16", "fp4")}
for name, (losses, _) in trained.items():
    print(f"{name:12} mean loss of the last 20 steps {losses[-20:].mean():.4f}")

# %% [markdown]
# A hundred steps of a toy are no experiment. The right half below is one, with all four recipes: 9M parameters, 6.6M
# tokens, three seeds, one H200, from the stored results of `experiments/precision` (its README has the tables, the
# p-values, and what was expected beforehand). There a direct cast costs 3.6 %. `fp4` ends *below* BF16 at BF16's
# learning rate, by .85 ± .37 %; the README says what that does and does not mean.

# %%
files = Path("../experiments/precision/results").glob("*.json")
stored = {record["identity"]["recipe"]: record for record in (json.loads(file.read_text()) for file in files)}

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
smooth = np.ones(9) / 9
for name, (losses, _) in trained.items():
    left.plot(
        np.arange(4, STEPS - 4) + 1, np.convolve(losses, smooth, "valid"), color=COLORS[name], label=name, linewidth=1.6
    )
left.set(xlabel="step", ylabel="training loss (nats a byte)", title="Here: 0.2M parameters, 0.1M bytes, one seed")
left.legend()
curves = {name: np.mean([lane["train"]["loss"] for lane in stored[name]["lanes"]], axis=0) for name in COLORS}
steps = stored["bf16"]["lanes"][0]["train"]["step"]
for name in ("fp4_direct", "fp4_vector", "fp4"):
    right.plot(steps, 100 * (curves[name] / curves["bf16"] - 1), color=COLORS[name], label=name, linewidth=1.6)
right.axhline(0, color=COLORS["bf16"], linewidth=1)
right.set(
    xlabel="step", ylabel="training loss above BF16's (%)", title="Stored: 9M parameters, 6.6M tokens, three seeds"
)

right.legend(loc="upper left", fontsize=10)
plt.show()

# %% [markdown]
# ## What the four bits did, by layer and operand
#
# A `Meter` is a program of its own beside the train step: a forward and a backward pass of a twin of the model, whose
# products report what they did to their operands. The model that is measured does not change, and gives the same bits.
# To compare recipes and not trainings, all are measured on the same weights, those of the BF16 run.

# %%
_, reference = trained["bf16"]
held_out = windows(10_000, 32)


def with_reference_weights(recipe):
    model = build(recipe)
    nnx.update(model, reference)
    return model


model = with_reference_weights(recipes["fp4_direct"])
snapshots = {"fp4_direct": telemetry.Meter(model, loss_of)(model, held_out)}
print(telemetry.report(snapshots["fp4_direct"], top=3))

# %% [markdown]
# The table names what hurts: the inputs of the down projection. The heat map shows the SNR of every operand: rows are
# layers, columns blocks. Dark is bad. `fprop.lhs` is the activation, `fprop.rhs` the weight, `dgrad.lhs` and
# `wgrad.rhs` are the gradient in E5M2.
#
# For the second one, of `fp4`, the forward pass is enough. `telemetry.capture` records it without differentiating.
# Every operand now keeps 19 to 22 dB, which is what E2M1 does with Gaussian data (notebook 01). Mind the scale of
# colors, which is each picture's own.

# %%
twin = telemetry.instrument(with_reference_weights(recipes["fp4"]))
_, sums = nnx.jit(lambda twin, tokens: telemetry.capture(loss_of, twin, tokens))(twin, held_out)
snapshots["fp4"] = telemetry.collect(sums)

with tempfile.TemporaryDirectory() as folder:
    for name, snapshot in snapshots.items():
        picture = Path(folder) / f"{name}.png"
        telemetry.draw_heatmap(snapshot, picture, title=f"{name}: SNR (dB) by layer and operand")
        display(Image(picture.read_bytes(), width=900))

# %% [markdown]
# ## What sets the SNR of an operand
#
# The **crest factor** is the largest magnitude over the root mean square, and a scale follows the largest magnitude.
# So one number of an operand predicts most of what a four-bit format will do to it. Under one scale a tensor, the
# crest is that of the tensor, and each doubling costs up to 6 dB; a scale a token or a channel meets smaller ones; OCC
# cuts the tail off. (The horizontal axis is the crest of the whole operand in both panels.)

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, sharex=True)
for axis, (name, snapshot) in zip(axes, snapshots.items()):
    for place, label, color in (("fprop.lhs", "activations", "#D55E00"), ("fprop.rhs", "weights", "#0072B2")):
        records = snapshot.of(place=place)
        axis.scatter([r.values["crest"] for r in records], [r.snr_db for r in records], color=color, label=label, s=36)
    axis.set(title=name, xlabel="crest factor, max |x| / rms", xscale="log")
    axis.set_xticks([3, 4, 6, 10, 16], ["3", "4", "6", "10", "16"])
    axis.minorticks_off()
axes[0].set_ylabel("SNR of the operand (dB)")
axes[0].legend()
plt.show()

# %% [markdown]
# ## What each operand costs the loss
#
# SNR is not loss: an error in one layer may be harmless and in another not. So take the trained BF16 model, quantize
# one kind of operand at a time in the forward product, and look at the loss of held-out text. A recipe of one's own is
# a value put together from parts.

# %%
TENSOR, VECTOR = (
    fp4jax.QuantSpec(fp4jax.E2M1, granularity) for granularity in (fp4jax.PerTensor(), fp4jax.PerVector())
)


def forward(lhs=None, rhs=None, outliers=None):
    return fp4jax.Recipe("forward", fprop=fp4jax.Gemm(lhs, rhs), outliers=outliers)


variants = {
    "W, a scale a tensor": forward(rhs=TENSOR),
    "W, a scale a channel": forward(rhs=VECTOR),
    "X, a scale a tensor": forward(lhs=TENSOR),
    "X, a scale a token": forward(lhs=VECTOR),
    "X, a scale a token, OCC": forward(lhs=VECTOR, outliers=fp4jax.OCC(0.99)),
    "both, vector-wise, OCC": forward(VECTOR, VECTOR, fp4jax.OCC(0.99)),
}
evaluate = nnx.jit(loss_of)
base = float(evaluate(with_reference_weights(None), held_out))
cost = {name: float(evaluate(with_reference_weights(recipe), held_out)) - base for name, recipe in variants.items()}

figure, axes = plt.subplots(figsize=(9, 3.6))
colors = ["#0072B2" if name[0] == "W" else "#D55E00" if name[0] == "X" else "#888888" for name in cost]
axes.bar_label(axes.barh(list(cost), list(cost.values()), color=colors), fmt=" %.4f")
axes.invert_yaxis()
axes.set(xlabel=f"loss above BF16's {base:.3f} (nats a byte), nothing retrained")
axes.set_title("The price of each operand", loc="left")
plt.show()

# %% [markdown]
# Weights are cheap. Nearly all of the price of a direct cast is paid by activations, and the heat map says by which:
# the inputs of the down projection, where two branches of the SwiGLU are multiplied and a product of two large numbers
# is a very large one. Their crest is three times that of the others, and one scale a tensor leaves them with half the
# decibels. A scale a token takes two thirds of the price back, OCC a little more. In a young model there are few
# outliers to clamp; in a grown one OCC is what saves it (notebook 02).
#
# Differences of .001 mean nothing here: one seed, and 2,048 tokens of held-out text.
#
# ## Try
#
# - `fp4jax.recipes.fp4(gradient=fp4jax.E2M1)` puts gradients into four bits as well. The report then names the ones
#   whose norm is below √3 times their quantization noise.
# - `fp4jax.nn.keep_blocks("layers", first=1)` before the other rules leaves the first block in BF16. `fp4jax
#   sensitivity` finds the block for which that helps most.
# - `telemetry.Oscillation` follows weights that hop between two codes. Do they hop more under STE or under DGE?
