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
# # Four bits: grids, ties, scales, gradients
#
# A four-bit float has sixteen codes. This notebook looks at what can be done with them, one decision at a time:
#
# 1. which numbers the codes stand for (the **grid**),
# 2. where a number between two of them goes (**rounding**, and its ties),
# 3. what one unit of the grid means (the **scale**, and who shares it),
# 4. what gradient passes through a staircase (the **estimator**).
#
# The last two sections redraw Figures 2 and 3 of Wang et al., *Optimizing Large Language Model Training Using FP4
# Quantization* ([arXiv:2501.17116](https://arxiv.org/abs/2501.17116)). Every number is computed by the library's own
# functions, the same that a train step calls; nothing here needs a GPU.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import fp4jax

BLUE, ORANGE, GREEN, RED, GRAY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#888888"
plt.rcParams.update(
    {
        "figure.dpi": 110, "figure.constrained_layout.use": True, "font.size": 11,
        "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    }
)  # fmt: skip


def snr_db(x, y):
    """10 log10 of the energy of x over the energy of x - y."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return 10 * np.log10((x**2).sum() / ((x - y) ** 2).sum())


# %% [markdown]
# ## 1. Grids
#
# A sign, $E$ exponent bits and $M$ mantissa bits, $1 + E + M = 4$. More exponent bits spread the values out: `E1M2` is
# a ruler, `E3M0` has nothing but powers of two, and `E2M1` stands between them. There is no NaN and no infinity. All
# sixteen codes are numbers, though two of them are zero.
#
# A scale maps the largest value of a vector to the end of the grid. So what counts is how the grid lies *relative to
# its end*, against the distribution of the data. Below it is drawn so, over a Gaussian vector of 4,096 values whose
# largest stands at 1. Most of the data sits in the inner third. `E1M2` has five values there, `E2M1` nine, `E3M0`
# eleven — but those of `E3M0` crowd around zero, and its outer intervals are coarse.

# %%
formats = [fp4jax.E1M2, fp4jax.E2M1, fp4jax.E3M0]
vector = jax.random.normal(jax.random.key(0), (1, 4096))
relative = np.asarray(vector[0] / jnp.abs(vector).max())

figure, axes = plt.subplots(figsize=(9, 3.4))
axes.hist(relative, bins=120, range=(-1, 1), color=GRAY, alpha=0.3, weights=np.full(relative.size, 0.02))
for row, (format, color) in enumerate(zip(formats, (GREEN, BLUE, ORANGE))):
    grid = format.grid / format.max
    axes.plot(grid, np.full(grid.size, -0.8 - 0.9 * row), "|", color=color, markersize=18, markeredgewidth=2.2)
    quality = snr_db(vector, fp4jax.quantize(vector, fp4jax.QuantSpec(format), axis=-1).dequantize())
    label = f"{format!r}\n{quality:.1f} dB"
    axes.text(1.04, -0.8 - 0.9 * row, label, color=color, va="center", weight="bold")
axes.set(yticks=[], xlim=(-1.05, 1.2), ylim=(-3.2, None), xlabel="value / largest value")
axes.set_title("Fifteen values each, and a Gaussian vector (gray)", loc="left")
axes.spines["left"].set_visible(False)
plt.show()

# %% [markdown]
# The number beside each is the signal-to-noise ratio, $10 \log_{10} \sum x^2 / \sum (x - \hat x)^2$. It belongs to
# this distribution: with a heavier tail the ranking changes, which is section 3.
#
# ## 2. Rounding, and what becomes of a tie
#
# `NEAREST_EVEN` is what hardware does: a number halfway between two grid values goes to the one with the even code.
# `TIES_UP` is the paper's lookup table, a chain of `<` comparisons, which sends ties toward $+\infty$. They differ on
# seven of the fourteen midpoints below, and nowhere else.

# %%
u = jnp.linspace(-6.4, 6.4, 4001)
midpoints = jnp.asarray((fp4jax.E2M1.grid[1:] + fp4jax.E2M1.grid[:-1]) / 2)

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
left.plot(u, u, color=GRAY, linewidth=0.8, linestyle=":")
left.plot(u, fp4jax.NEAREST_EVEN(u, fp4jax.E2M1), color=BLUE, linewidth=1.8)
even, up = (rule(midpoints, fp4jax.E2M1) for rule in (fp4jax.NEAREST_EVEN, fp4jax.TIES_UP))
left.plot(midpoints, even, "o", color=BLUE, label="NEAREST_EVEN")
left.plot(midpoints, up, "o", color=RED, markerfacecolor="none", markersize=10, label="TIES_UP")
left.set(xlabel="u (units of the grid)", ylabel="rounded to E2M1", title="Ties")
left.legend(loc="upper left")

draws = jax.vmap(lambda key: fp4jax.STOCHASTIC(u, fp4jax.E2M1, key))(jax.random.split(jax.random.key(1), 64))
right.plot(u, u, color=GRAY, linewidth=0.8, linestyle=":")
right.plot(u[::40], draws[0, ::40], ".", color=GREEN, markersize=4, label="STOCHASTIC, one draw")
right.plot(u, draws.mean(0), color=ORANGE, linewidth=1, label="mean of 64 draws")
right.set(xlabel="u (units of the grid)", title="Noise makes the mean exact, inside ±6")
right.legend(loc="upper left")
plt.show()

# %% [markdown]
# Are ties rare enough to be ignored? For float32 data and a float32 scale, yes. Not always otherwise: bfloat16 has
# eight bits of mantissa, and a power-of-two scale leaves them alone, so that a bfloat16 number lands on a midpoint
# exactly every now and then.

# %%
weights = jax.random.normal(jax.random.key(2), (512, 512), jnp.bfloat16)
for scale in (fp4jax.AbsMax(), fp4jax.PowerOfTwo("rceil")):
    pair = [fp4jax.QuantSpec(fp4jax.E2M1, scale=scale, rounding=r) for r in (fp4jax.NEAREST_EVEN, fp4jax.TIES_UP)]
    even, up = (fp4jax.quantize(weights, spec, axis=0).dequantize() for spec in pair)
    print(f"{scale!r:28} {float((even != up).mean()):7.3%} of the entries round differently")

# %% [markdown]
# So two implementations that agree in everything but ties give different models under power-of-two scales. This is why
# a rounding has a name here, and `docs/numerics.md` lists each tie of each format.
#
# ## 3. Scales: who pays for an outlier
#
# $x \approx \hat q \cdot s$ with $s = \max|x| / 6$. Whoever shares a scale shares its largest member. Take Gaussian
# rows of 256 values, and let one entry in every fourth row grow. What happens to all *other* entries?
#
# - `PerTensor`: one scale for all. One row with an outlier spoils every row.
# - `PerVector`: one for each token of an activation, or each output channel of a weight. The paper's choice, since
#   such a scale leaves the sum of a product.
# - `PerBlock(32)` with a power-of-two scale is MXFP4; `PerBlock(16)` with an E4M3 scale under a tensor-wide one is
#   NVFP4. They confine the damage to a block, and pay for it in bits and in a rounded scale.

# %%
specs = {
    "PerTensor": fp4jax.QuantSpec(fp4jax.E2M1, fp4jax.PerTensor()),
    "PerVector": fp4jax.QuantSpec(fp4jax.E2M1, fp4jax.PerVector()),
    "MXFP4: PerBlock(32), 2^e": fp4jax.QuantSpec(fp4jax.E2M1, fp4jax.PerBlock(32), fp4jax.PowerOfTwo("rceil")),
    "NVFP4: PerBlock(16), E4M3": fp4jax.QuantSpec(fp4jax.E2M1, fp4jax.PerBlock(16), fp4jax.TwoLevel()),
}
rows = jax.random.normal(jax.random.key(3), (64, 256))
sizes = np.geomspace(2, 200, 18)


def rest_snr(spec):
    """SNR of all but the outlier, for every size of it."""

    def one(size):
        x = rows.at[::4, 100].set(size)  # in every fourth row
        y = fp4jax.quantize(x, spec, axis=-1).dequantize()
        error = ((x - y) ** 2).at[::4, 100].set(0).sum()
        return 10 * jnp.log10((rows**2).at[::4, 100].set(0).sum() / error)

    return jax.jit(jax.vmap(one))(jnp.asarray(sizes, jnp.float32))


figure, axes = plt.subplots(figsize=(9, 4))
for (name, spec), color in zip(specs.items(), (RED, BLUE, ORANGE, GREEN)):
    bits = 8 * fp4jax.quantize(jnp.zeros((64, 4096)), spec, axis=-1).nbytes / (64 * 4096)
    axes.semilogx(
        sizes, rest_snr(spec), color=color, linewidth=2, label=f"{name}   ({bits:.2f} bits a value at k = 4096)"
    )
axes.set(xlabel="outlier / standard deviation, in every fourth row", ylabel="SNR of all other entries (dB)")
axes.set_title("Who shares a scale with an outlier pays for it", loc="left")
axes.axhline(0, color=GRAY, linewidth=0.8)
axes.legend(loc="lower left")
plt.show()

# %% [markdown]
# At 0 dB the error is as large as the signal: everything else was rounded to zero. Vectors hold three of four rows
# harmless, blocks nearly everything. (The MXFP4 line starts lower than its blocks deserve. A power-of-two scale is on
# average 1.4 times too large.) Real activations have such outliers, in few fixed channels: notebook 02.
#
# ## 4. A product in four bits: the paper's Figure 2
#
# The figure follows a small matrix through the quantizer. Its largest entry is 1.39, so $\gamma = 6 / 1.39 = 4.32$
# (printed as 4.31) multiplies it to fill the grid; each entry is rounded; the product runs on the grid values, and
# $1/\gamma$ is multiplied in afterwards. Here is the same path for a $4 \times 4$ weight, one scale for each output
# channel (column).

# %%
w = jnp.array(
    [[1.39, -0.21, 0.08, 0.55], [-0.62, 0.90, 0.31, -1.02], [0.17, -0.44, -0.73, 0.26], [0.03, 0.28, 0.52, -0.11]]
)
spec = fp4jax.QuantSpec(fp4jax.E2M1)
q = fp4jax.quantize(w, spec, axis=0)
stages = {
    "W": w,
    "W · r,  r = 6 / max|column|": w / q.scale,
    "on the grid: 4 bits each": q.values.astype(jnp.float32),
    "values · scale": q.dequantize(),
}
figure, axes = plt.subplots(1, 4, figsize=(12, 3.2))
for axis, (title, matrix) in zip(axes, stages.items()):
    limit = float(jnp.abs(matrix).max())
    axis.imshow(matrix, cmap="RdBu", vmin=-limit, vmax=limit)
    for (i, j), value in np.ndenumerate(np.asarray(matrix)):
        dark = abs(value) > 0.6 * limit
        axis.text(j, i, f"{value:.3g}", ha="center", va="center", color="white" if dark else "black", fontsize=11)
    axis.set(xticks=[], yticks=[])
    axis.set_title(title, fontsize=11)
    axis.spines[:].set_visible(False)
figure.suptitle(f"r of the first column: 6 / 1.39 = {1 / float(q.scale[0, 0]):.2f}", x=0.01, ha="left", fontsize=11)
plt.show()

# %% [markdown]
# With $X$ quantized by rows and $W$ by columns both scales leave the sum,
#
# $$Y_{mn} = s^x_m \, s^w_n \sum_k \hat X_{mk} \hat W_{kn},$$
#
# so the tensor cores see nothing but grid values. Their products and sums are small multiples of 1/4: exact, in any
# order. That is why `dot_general` under a recipe gives the same bits on every backend.

# %%
x = jax.random.normal(jax.random.key(4), (3, 4))
recipe = fp4jax.Recipe("forward", fprop=fp4jax.Gemm(spec, spec))
product = fp4jax.dot_general(x, w, (((1,), (0,)), ((), ())), recipe=recipe)
qx = fp4jax.quantize(x, spec, axis=1)
by_hand = qx.scale * q.scale * (qx.values.astype(jnp.float32) @ q.values.astype(jnp.float32))
print("largest difference between dot_general and the formula:", float(jnp.abs(product - by_hand).max()))
print(f"SNR of the product: {snr_db(x @ w, product):.1f} dB")

# %% [markdown]
# ## 5. The gradient of a staircase: the paper's Figure 3
#
# The derivative of rounding is zero almost everywhere, which would stop training. The **straight-through estimator**
# (STE) pretends it is 1. The paper's **differentiable gradient estimator** (DGE) replaces each step by a smooth one,
#
# $$f(u) = l + \tfrac{r - l}{2} \left(1 + \operatorname{sgn}(p) |p|^{1/k}\right),$$
#
# $$p = 2 \frac{u - l}{r - l} - 1,$$
#
# in the grid interval $[l, r)$ that holds $u$, and takes its derivative $f'(u) = \min(|p|^{1/k - 1} / k,\ 3)$ in the
# backward pass only. The forward pass keeps the hard steps. The cap is needed, since $f'$ is infinite at the midpoint.

# %%
u = jnp.linspace(0, 6, 6001)
grid = jnp.asarray(fp4jax.E2M1.grid[7:])
lower = jnp.clip(jnp.searchsorted(grid, u, side="right") - 1, 0, grid.size - 2)
l, r = grid[lower], grid[lower + 1]
p = 2 * (u - l) / (r - l) - 1

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
left.plot(u, fp4jax.NEAREST_EVEN(u, fp4jax.E2M1), color="black", linewidth=2, label="forward: hard")
for k, color in ((3.0, GREEN), (5.0, BLUE), (10.0, ORANGE)):
    left.plot(u, l + (r - l) / 2 * (1 + jnp.sign(p) * jnp.abs(p) ** (1 / k)), color=color, label=f"f, k = {k:.0f}")
    right.plot(u, fp4jax.DGE(k=k).factor(u, fp4jax.E2M1), color=color, linewidth=1.4, label=f"DGE, k = {k:.0f}")
right.axhline(1, color=RED, linestyle="--", label="STE")
left.set(xlabel="u", ylabel="f(u)", title="What the estimator pretends the staircase is")
right.set(xlabel="u", ylabel="f′(u)", title="What multiplies the gradient", ylim=(0, 3.9))
left.legend()
right.legend(ncols=2, loc="upper right", fontsize=10)
plt.show()

# %% [markdown]
# Near a midpoint a small step changes the code, and DGE lets three times the gradient through. On a grid value nothing
# short of half an interval changes anything, and a fifth is left ($1/k$). Two consequences are worth a number.
#
# **DGE shrinks gradients.** The mean of $f'$ over an interval is below 1. Adam divides by the size of the gradient, so
# that a constant factor cancels; clipping by a global norm comes before Adam, and sees the smaller one.
#
# **It spends them where codes change.** Give uniformly spread weights one random gradient step, of the same norm under
# either estimator, and count the weights whose code changed.

# %%
weights = jax.random.uniform(jax.random.key(5), (100_000,), minval=-6.0, maxval=6.0)
gradient = jax.random.normal(jax.random.key(6), weights.shape)
before = fp4jax.NEAREST_EVEN(weights, fp4jax.E2M1)
print("estimator   mean f′   codes that change by a step of relative norm .001, .003, .01")
for name, estimator in {"STE": fp4jax.STE(), **{f"DGE k={k:.0f}": fp4jax.DGE(k=k) for k in (3.0, 5.0, 10.0)}}.items():
    factor = estimator.factor(weights, fp4jax.E2M1)
    step = factor * gradient
    step = step / jnp.linalg.norm(step) * jnp.linalg.norm(weights)
    moved = [fp4jax.NEAREST_EVEN(weights - size * step, fp4jax.E2M1) != before for size in (0.001, 0.003, 0.01)]
    print(f"{name:10} {float(factor.mean()):8.3f}   {'  '.join(f'{float(m.mean()):7.3%}' for m in moved)}")

# %% [markdown]
# For the same distance DGE (k = 5) changes three times as many codes as STE by the smallest step, and 1.3 times as
# many by the largest. Whether that is progress or dithering is not a question of one step. It depends on whether the
# codes settle, which `fp4jax.telemetry.Oscillation` counts during a run, and on the loss at the end, which
# `experiments/dge` compares over seeds.
#
# ## Try
#
# - Put `fp4jax.E1M2` into section 3. Which granularities profit, and from which outlier on do they lose?
# - `fp4jax.PowerOfTwo` has the modes `floor`, `even`, `rceil`, `ceil`. Which has the best SNR for Gaussian blocks, and
#   what does it do to the largest value of a block?
# - Replace the uniform weights of the last table by those of a trained layer.
