"""What a device must hold beside the state while it trains: a model of activations, with flash attention.

The temporaries of a program compiled for the CPU say little about a GPU: there XLA materializes attention's scores. So
this counts what the forward pass keeps for the backward pass, for one block of `fp4jax.models.Llama`, from shapes. With
T tokens of a microbatch on a device, tensor parallelism over t devices, activations of a bytes a value (2 in bfloat16),
and q, k, f the widths of queries, keys and MLP, divided by t:

    what                          bytes                              kept under remat
    block input                   a T d                              none, full, dots, quantized
    input of the MLP's norm       a T d                              none
    query, key, value (rotated)   a T (q + 2k)                       none
    attention output              a T q, and 4 T n/t of statistics   none
    gate, up                      2 a T f                            none
    results of all but down       e T m                              dots; e = 4 with a recipe (float32 sums), else a
    inputs of linear layers       see below                          none, quantized (codes and scales only)
    weights of linear layers      see below                          none, quantized (codes and scales only)

A linear layer from n to m features keeps of its input and of its weight

    without a recipe              a T n (once for layers that share it)      a n m
    with one, where reused        T n + scales: a byte a value               n m + scales
    with one, where not reused    a T n                                      4 n m
    with DGE                                                                 4 n m beside the codes, scales again

once for layers that read the same input under the same recipe. With sparse compensation a T n more, for the residual.
On a mesh the weights of output and down, and those without a recipe, are gathered for use: a device keeps those of all
layers, whole but for tensor parallelism. The others are gathered in the product alone: n m is divided by the devices
along fsdp, and what is 4 n m is, as off a mesh, the parameter itself, and free.

At the end of the model, `head_activations`, counted as if the head were in high precision: T vectors of d before and
after the last norm, the gathered head, T · v/t logits in float32 and their gradient in the dtype of activations.

Not counted: what a product or kernel needs while it runs, the buffers of collectives, fragmentation.
"""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp

from fp4jax.models import LlamaConfig
from fp4jax.recipe import Recipe, Reuse
from fp4jax.scaling import PerVector


@dataclasses.dataclass(frozen=True)
class Share:
    """What a device has of a microbatch and of the weights.

    Args:
        tokens: rows · tokens of a microbatch on a device, T.
        tensor: devices that share heads, MLP and vocabulary, t.
        fsdp: devices that share every parameter.
        gathered: whether weights are gathered for use, as on every mesh, even where there is nothing to gather.
    """

    tokens: int
    tensor: int = 1
    fsdp: int = 1
    gathered: bool = False


def block_activations(
    config: LlamaConfig, recipes: Mapping[str, Recipe | None], share: Share, remat: str | None = None
) -> dict[str, int]:
    """Bytes that one block keeps on a device from its forward to its backward pass, by what they hold.

    Args:
        config: the model.
        recipes: of each layer path, from `fp4jax.nn.resolve_rules`.
        share: of the device.
        remat: another policy than the configuration's.

    Example:
        >>> from fp4jax.models import MODELS
        >>> from fp4jax.models.llama import LINEAR_PATHS
        >>> recipes = dict.fromkeys(LINEAR_PATHS, fp4jax.recipes.fp4())
        >>> kept = block_activations(MODELS["7b"], recipes, Share(tokens=2048), remat="quantized")
        >>> {what: f"{size / 1e6:.0f} MB" for what, size in kept.items()}
        {'block input': '17 MB', 'linear inputs': '48 MB', 'weights': '203 MB'}
    """
    remat = config.remat if remat is None else remat
    a, tokens = jnp.dtype(config.dtype).itemsize, share.tokens
    d, heads = config.embed_dim, config.num_heads // share.tensor
    q, k, f = (
        size // share.tensor
        for size in (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.mlp_dim)
    )
    groups = (  # layers that share their input, with its width and theirs
        (("attention.query", "attention.key", "attention.value"), d, (q, k, k)),
        (("attention.output",), q, (d,)),
        (("mlp.gate", "mlp.up"), d, (f, f)),
        (("mlp.down",), f, (d,)),
    )
    inputs = weights = products = 0
    for names, n, widths in groups:
        plain, shared = 0, set()
        for name, m in zip(names, widths, strict=True):
            recipe = recipes[f"layers.{name}"]
            layer = _Linear(recipe, config, share, n, m, columns=name not in ("attention.output", "mlp.down"))
            codes_only = remat == "quantized"
            if recipe not in shared:  # quantized once for layers that quantize it alike
                shared.add(recipe)
                inputs += layer.input_codes
            plain = max(plain, 0 if codes_only else layer.plain_input)
            inputs += 0 if codes_only else layer.residual
            weights += layer.weight_codes + layer.weight_factors + (0 if codes_only else layer.plain_weight)
            products += 0 if name == "mlp.down" else layer.product  # whose result is the next block's input
        inputs += plain
    if remat == "full":
        return {"block input": a * tokens * d}
    if remat == "dots":
        return {"block input": a * tokens * d, "products": products}
    if remat == "quantized":
        return {"block input": a * tokens * d, "linear inputs": inputs, "weights": weights}
    return {
        "block input": a * tokens * d,
        "MLP norm input": a * tokens * d,
        "query, key, value": a * tokens * (q + 2 * k),
        "attention output": a * tokens * q + 4 * tokens * heads,
        "gate, up": 2 * a * tokens * f,
        "linear inputs": inputs,
        "weights": weights,
        "norm scales": 2 * 4 * d if share.gathered else 0,
    }


def head_activations(config: LlamaConfig, share: Share) -> dict[str, int]:
    """Bytes that a device holds around the head when backward begins, by what they hold.

    Args:
        config: the model.
        share: of the device.
    """
    a, d, v = jnp.dtype(config.dtype).itemsize, config.embed_dim, config.vocab_size // share.tensor
    return {
        "last norm": 2 * a * share.tokens * d,
        "head": a * d * v,
        "logits and their gradient": (4 + a) * share.tokens * v,
    }


@dataclasses.dataclass(frozen=True)
class _Linear:
    """What a linear layer from n to m features keeps, on a device."""

    recipe: Recipe | None
    config: LlamaConfig
    share: Share
    n: int
    m: int
    columns: bool
    """Whether "fsdp" splits the contraction of its weight, which is then gathered in the product alone."""

    @property
    def _itemsize(self) -> int:
        return jnp.dtype(self.config.dtype).itemsize

    @property
    def _quantizes(self) -> bool:
        return self.recipe is not None and self.recipe.quantizes

    @property
    def input_codes(self) -> int:
        recipe = self.recipe
        if recipe is None or not isinstance(recipe.wgrad.lhs, Reuse) or recipe.activation_spec is None:
            return 0
        wide = recipe.outliers is not None and recipe.outliers.compensation == "residual"
        wide = wide and recipe.outliers.residual_format is None  # pyright: ignore[reportOptionalMemberAccess]
        vectors = self.share.tokens if isinstance(recipe.activation_spec.granularity, PerVector) else 1
        return self.share.tokens * self.n * (4 if wide else 1) + 4 * vectors

    @property
    def plain_input(self) -> int:
        recipe = self.recipe
        needed = recipe is None or not self.input_codes or not recipe.activation_estimator.is_identity
        return self._itemsize * self.share.tokens * self.n if needed else 0

    @property
    def residual(self) -> int:
        recipe = self.recipe
        if recipe is None or recipe.outliers is None or recipe.wgrad.lhs is None:
            return 0
        sparse = recipe.outliers.compensation == "sparse"
        return self._itemsize * self.share.tokens * self.n if sparse else 0

    @property
    def weight_codes(self) -> int:
        recipe = self.recipe
        if recipe is None or not isinstance(recipe.dgrad.rhs, Reuse) or recipe.weight_spec is None:
            return 0
        parts = self.share.fsdp if self.columns else 1
        return self.n // parts * self.m + self._weight_scales

    @property
    def weight_factors(self) -> int:
        """1 / scale, by which an estimator such as DGE finds the places of the weights on the grid."""
        recipe = self.recipe
        if recipe is None or recipe.weight_spec is None or recipe.weight_estimator.is_identity:
            return 0
        return self._weight_scales if recipe.weight_spec.granularity.leaves_the_sum else 0

    @property
    def _weight_scales(self) -> int:
        assert self.recipe is not None
        assert self.recipe.weight_spec is not None
        return 4 * (self.m if isinstance(self.recipe.weight_spec.granularity, PerVector) else 1)

    @property
    def plain_weight(self) -> int:
        recipe = self.recipe
        if recipe is None or not recipe.quantizes:
            return self._itemsize * self.n * self.m
        if self.weight_codes and recipe.weight_estimator.is_identity:
            return 0
        return 4 * self.n * self.m if self.share.gathered and not self.columns else 0

    @property
    def product(self) -> int:
        return (4 if self._quantizes else self._itemsize) * self.share.tokens * self.m
