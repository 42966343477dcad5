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
# # Your own module, your own estimator, your own format
#
# You have a model in Flax, and want to know what four bits do to it. The model should not have to know. Below is a
# small network, written with stock Flax NNX: no line of it mentions fp4jax. One call gives its linear layers a recipe.
# Then we go further, and make three things the library does not have: a gradient estimator, a four-bit format, and a
# recipe of both. Each takes less than ten lines, and the library treats it as its own.

# %%
import dataclasses

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import fp4jax
from fp4jax.estimators import Estimator
from fp4jax.rounding import position

BLUE, ORANGE, GREEN, RED, GRAY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#888888"
plt.rcParams.update(
    {
        "figure.dpi": 110, "figure.constrained_layout.use": True, "font.size": 11,
        "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    }
)  # fmt: skip

# %% [markdown]
# ## Something to learn
#
# To need no download, pictures are made here: disks, squares, triangles and crosses of 16 × 16 pixels, anywhere, of
# any size, under noise.

# %%
NAMES = ("disk", "square", "triangle", "cross")


def pictures(seed, count):
    """Images [count, 16, 16] and their classes [count]."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 4, count)
    size, cx, cy = rng.uniform(3, 5, count), rng.uniform(6, 9, count), rng.uniform(6, 9, count)
    y, x = np.mgrid[:16, :16]
    x, y, size = x - cx[:, None, None], y - cy[:, None, None], size[:, None, None]
    inside = np.maximum(abs(x), abs(y)) < size
    shapes = np.stack(
        [
            np.hypot(x, y) < size * 1.1,
            inside,
            (y > -size) & (y < size) & (2 * abs(x) < y + size),
            inside & (np.minimum(abs(x), abs(y)) < size / 3),
        ]
    )
    image = shapes[label, np.arange(count)] + rng.normal(0, 0.3, (count, 16, 16)) - 0.2
    return jnp.asarray(image, jnp.float32), jnp.asarray(label)


test_images, test_labels = pictures(0, 1024)
figure, axes = plt.subplots(1, 8, figsize=(11, 1.7))
for axis, image, label in zip(axes, test_images, test_labels):
    axis.imshow(image, cmap="gray")
    axis.set_title(NAMES[label], fontsize=10)
    axis.axis("off")
plt.show()

# %% [markdown]
# ## The model: stock Flax

# %%


class Mixer(nnx.Module):
    def __init__(self, patches, dim, *, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(dim, rngs=rngs), nnx.LayerNorm(dim, rngs=rngs)
        self.mix_up, self.mix_down = nnx.Linear(patches, 64, rngs=rngs), nnx.Linear(64, patches, rngs=rngs)
        self.up, self.down = nnx.Linear(dim, 4 * dim, rngs=rngs), nnx.Linear(4 * dim, dim, rngs=rngs)

    def __call__(self, x):  # [b, patches, dim]
        y = self.norm1(x).swapaxes(1, 2)
        x = x + self.mix_down(nnx.gelu(self.mix_up(y))).swapaxes(1, 2)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Classifier(nnx.Module):
    def __init__(self, dim=48, depth=1, *, rngs):
        self.patches = nnx.Linear(16, dim, rngs=rngs)
        self.blocks = nnx.List([Mixer(16, dim, rngs=rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(dim, rngs=rngs)
        self.head = nnx.Linear(dim, 4, rngs=rngs)

    def __call__(self, images):
        x = self.patches(images.reshape(-1, 4, 4, 4, 4).swapaxes(2, 3).reshape(-1, 16, 16))  # [b, patches, dim]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(axis=1))


# %% [markdown]
# ## One call
#
# Rules are (pattern, recipe) pairs, matched against the path of a layer; the first that matches decides, and `None`
# means high precision. First and last layer stay out, as is usual. The call changes the model in place and returns it.
# A rule that matches nothing raises, and names what it may have meant.

# %%
RULES = [("patches|head", None), (".*", fp4jax.recipes.fp4())]
model = fp4jax.nn.quantize_model(Classifier(rngs=nnx.Rngs(0)), RULES)
print(fp4jax.nn.describe_model(model))

# %% [markdown]
# Parameters are what they were: same paths, same types, same values. A checkpoint of the one loads into the other.

# %%
plain = nnx.state(Classifier(rngs=nnx.Rngs(0)), nnx.Param)
same = jax.tree.map(lambda a, b: bool((a == b).all()), plain, nnx.state(model, nnx.Param))
print("parameters equal, bit for bit:", all(jax.tree.leaves(same)))

try:
    fp4jax.nn.quantize_model(model, [("pathces|haed", None), (".*", fp4jax.recipes.fp4())])
except ValueError as error:
    print(str(error).splitlines()[0])

# %% [markdown]
# Do not take the table's word for it. `explain` traces a function and lists the products the program holds, backward
# ones too, without running it.

# %%


def loss_of(model, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


graphdef, params = nnx.split(model, nnx.Param)
gradient = jax.grad(lambda params, *batch: loss_of(nnx.merge(graphdef, params), *batch))
lines = str(fp4jax.explain(gradient, params, test_images[:64], test_labels[:64])).splitlines()
print("\n".join(lines[:9]), f"\n... {len(lines)} lines")

# %% [markdown]
# ## Train it
#
# With `nnx.Optimizer` and `nnx.jit`, like any other model.

# %%
STEPS, BATCH = 200, 64
train_images, train_labels = pictures(1, STEPS * BATCH)


def train(rules):
    """(model, losses, accuracy on the test pictures) of a model under rules; None is stock Flax."""
    model = Classifier(rngs=nnx.Rngs(0))
    if rules is not None:
        fp4jax.nn.quantize_model(model, rules)
    schedule = optax.cosine_decay_schedule(1e-2, STEPS)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, images, labels):
        loss, grads = nnx.value_and_grad(loss_of)(model, images, labels)
        optimizer.update(model, grads)
        return loss

    losses = [
        step(model, optimizer, train_images[i : i + BATCH], train_labels[i : i + BATCH])
        for i in range(0, STEPS * BATCH, BATCH)
    ]
    right = nnx.jit(lambda model, images: model(images).argmax(-1))(model, test_images) == test_labels
    return model, np.asarray(losses), float(right.mean())


runs = {"float32 (stock Flax)": train(None), "fp4: the paper's recipe": train(RULES)}
for name, (_, losses, accuracy) in runs.items():
    print(f"{name:26} loss {losses[-20:].mean():.3f}   accuracy {accuracy:.1%}")

# %% [markdown]
# ## An estimator of your own
#
# An estimator is one method: the factor $f'(u)$ that multiplies the gradient of a quantized value, given $u$ in units
# of the grid. Suppose you like the shape of the paper's DGE, large at the midpoints and small on the grid, but not
# that its mean is .59, nor its spikes. A tent does that:
#
# $$f'(u) = c + 2 (1 - c)(1 - |p|), \qquad p = 2 \frac{u - l}{r - l} - 1,$$
#
# whose mean over an interval is 1 for any floor $c$. `position` finds where $u$ stands in its interval, for every
# format. The floor matters. With $c = 0$ a weight on a grid value gets no gradient at all, and the largest weight of a
# channel always stands on one, ±max.

# %%


@dataclasses.dataclass(frozen=True)
class Tent(Estimator):
    """f' = c + 2 (1 - c)(1 - |p|): a tent over each grid interval, with mean 1."""

    floor: float = 0.25

    def factor(self, u, format):
        p = 2 * position(u.astype(jnp.float32), format) - 1
        return (self.floor + 2 * (1 - self.floor) * (1 - jnp.abs(p))).astype(u.dtype)


# %% [markdown]
# It is frozen and hashable, so that a recipe can hold it and `jit` can cache by it. It works wherever an estimator
# does. Stand-alone, for example:

# %%
spec = fp4jax.QuantSpec(fp4jax.E2M1)
u = jnp.linspace(-6, 6, 2401)
figure, axes = plt.subplots(figsize=(9, 3))
for estimator, color in ((fp4jax.STE(), GRAY), (fp4jax.DGE(), BLUE), (Tent(), ORANGE)):
    slope = jax.grad(lambda x, e=estimator: fp4jax.fake_quant(x, spec, axis=-1, estimator=e).sum())(u)
    axes.plot(u, slope, color=color, label=repr(estimator), linewidth=1.5)
axes.set(xlabel="u (units of the grid)", ylabel="f′(u)", ylim=(0, 3.9))
axes.set_title("The gradient that passes the quantizer", loc="left")
axes.legend(ncols=3, fontsize=10)
plt.show()

# %% [markdown]
# ## A format of your own
#
# A format is its number of exponent and mantissa bits, its largest value, and, if it is not IEEE's, its bias. Without
# exponent bits all codes are subnormal, $2^{1 - \text{bias}} M / 2^m$: bias −2 and three mantissa bits make that the
# integers 0 … 7. So four-bit integers are a float format as well, the `E0M3` that the paper's Table 4 leaves out. And
# one exponent bit with no mantissa is a sign and a switch: ternary weights, in 1.58 bits if packed well.

# %%
INT4 = fp4jax.FloatFormat("int4", exponent_bits=0, mantissa_bits=3, max=7.0, bias=-2)
TERNARY = fp4jax.FloatFormat("ternary", exponent_bits=1, mantissa_bits=0, max=1.0, bias=1)
for format in (INT4, TERNARY):
    print(f"{format!r:8} {format.grid.tolist()}")

ties = jnp.array([0.5, 1.5, 2.5])
print("rounding:", fp4jax.NEAREST_EVEN(ties, INT4).tolist(), fp4jax.TIES_UP(ties, INT4).tolist(), "saturates:",
      fp4jax.NEAREST_EVEN(jnp.array([9.0]), INT4).tolist())  # fmt: skip

# %% [markdown]
# Rounding, scales, packing, estimators and products come with it. They are computed from the fields, and no list of
# formats has to know of it. (A row in `fp4jax.formats.FORMATS` would put it into the conformance tests.)
#
# ## A recipe of both
#
# Three products, two operands each. `REUSE` takes the operand that the forward product has quantized already.
# Gradients go in E5M2, one scale a tensor.

# %%
gradient = fp4jax.QuantSpec(fp4jax.E5M2, fp4jax.PerTensor())


def own(name, weight, estimator):
    operands = fp4jax.Gemm(fp4jax.QuantSpec(INT4), fp4jax.QuantSpec(weight))
    return fp4jax.Recipe(
        name,
        fprop=operands,
        dgrad=fp4jax.Gemm(gradient, fp4jax.REUSE),
        wgrad=fp4jax.Gemm(fp4jax.REUSE, gradient),
        weight_estimator=estimator,
    )


for recipe in (own("INT4 under a tent", INT4, Tent()), own("ternary weights", TERNARY, fp4jax.STE())):
    runs[recipe.name] = train([("patches|head", None), (".*", recipe)])

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), width_ratios=(3, 2))
colors = (GRAY, BLUE, ORANGE, RED)
for (name, (_, losses, _)), color in zip(runs.items(), colors):
    left.plot(np.arange(4, STEPS - 4) + 1, np.convolve(losses, np.ones(9) / 9, "valid"), color=color, label=name)
left.set(xlabel="step", ylabel="training loss (nats)", yscale="log", title="One model, four recipes")
left.set_yticks([0.2, 0.5, 1.0], ["0.2", "0.5", "1"])
left.minorticks_off()
left.legend(fontsize=10)
bars = right.barh(list(runs), [100 * accuracy for *_, accuracy in runs.values()], color=colors)
right.bar_label(bars, fmt=" %.1f")
right.invert_yaxis()
right.set(xlim=(0, 112), xlabel="accuracy on 1,024 new pictures (%)")
plt.show()

# %% [markdown]
# One seed of a toy problem ranks nothing. It shows that the parts fit together: all of it is trained by the same three
# lines, and the model's code was never touched.
#
# ## Where the weights ended up
#
# `quantize` on a kernel of the trained model gives the values its product saw. The outer steps of E2M1 are wider,  so
# that all but ±6 get similar numbers of weights: little of the four bits is wasted. The uniform grid of INT4 shows the
# shape of the distribution instead. Of the ternary weights three in four are zero.

# %%
figure, axes = plt.subplots(1, 3, figsize=(11, 3))
for axis, name, format, color in zip(axes, list(runs)[1:], (fp4jax.E2M1, INT4, TERNARY), colors[1:]):
    kernel = runs[name][0].blocks[0].up.kernel[...]
    values = np.asarray(fp4jax.quantize(kernel, fp4jax.QuantSpec(format), axis=0).values, np.float32)
    share = [100 * float((values == v).mean()) for v in format.grid]
    axis.bar(range(format.grid.size), share, color=color)
    axis.set_xticks(range(format.grid.size), [f"{v:g}" for v in format.grid], fontsize=8)
    axis.set_title(name, fontsize=11)
axes[0].set_ylabel("share of the weights (%)")
figure.supxlabel("value on the grid, blocks.0.up", fontsize=11)
plt.show()

# %% [markdown]
# ## Try
#
# - Make it deeper, and give the second block another recipe: `(fp4jax.nn.Blocks("blocks", (1,)), ...)`, or keep it out
#   by `fp4jax.nn.keep_blocks`.
# - Switch to BF16 for the last steps: call `quantize_model` again, or use `fp4jax.nn.RulesSchedule`.
# - Set `floor=0` in `Tent`. What happens to the largest weight of each channel?
# - The model is in Linen? `fp4jax.linen.quantize_model` does the same, and `docs/layers.md` says how.
