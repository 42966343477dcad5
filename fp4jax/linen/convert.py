"""`quantize_model` for Linen: recipes by rules over the paths of layers, without a change to the model's code."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
from flax import linen, nnx

from fp4jax.dot.registry import check_name
from fp4jax.linen.intercept import Call, Seen, cannot, check_uniform, kernels, marked, owners, record, stacked
from fp4jax.nn.report import LayerReport, ModelReport
from fp4jax.nn.rules import Rules, compile_rules, resolve_blocks
from fp4jax.recipe import Recipe


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedModel:
    """A Linen model whose layers follow rules: `init` and `apply` are those of the model, and so are its variables.

    Attributes:
        module: the model itself, as it was.
        rules, backend, noise: as `quantize_model` was given them.
    """

    module: linen.Module
    rules: Rules
    backend: str | None = None
    noise: str = "noise"

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        """The variables that `module.init` makes, bit for bit; nothing is quantized to make them.

        Raises:
            ValueError: a rule decides nothing, a layer is undecided or cannot follow its recipe.
        """
        variables, seen = record(self.module, rngs, args, dict(kwargs))
        _resolve(self.rules, variables, seen)
        return variables

    def apply(self, variables: Mapping[str, Any], *args: Any, method: Any = None, **kwargs: Any) -> Any:
        """`module.apply` under the rules, with its arguments.

        Raises:
            ValueError: a rule finds none of the paths in `variables`; otherwise as `init`, for the layers that run.
        """
        call = Call(self.rules, self.backend, self.noise, variables)
        with linen.intercept_methods(call):
            return self.module.apply(variables, *args, method=marked(method, call.mark), **kwargs)


def quantize_model(
    module: linen.Module | QuantizedModel, rules: Rules, *, backend: str | None = None, noise: str = "noise"
) -> QuantizedModel:
    """Give every linear layer of a Linen model the recipe that `rules` say, without touching the model.

    The layers are `linen.Dense`, `DenseGeneral` and `Einsum`, wherever they stand (so the projections of
    `linen.MultiHeadDotProductAttention`), and their subclasses. Their paths are those of their parameters:
    "Dense_0", "encoder.layers_3.attention.query". Under `linen.scan` one path and one recipe stand for all blocks.
    Variables are those of the unquantized model, and so are its checkpoints; kernels reach the quantizer in their own
    dtype, never rounded to the layer's `dtype` first. It works under `jax.jit`, `linen.jit`, `scan`, `vmap`, `remat`.

    For other recipes, from some step on, quantize the module again and trace the new `apply`.

    Args:
        module: any Linen model, unbound. Of a `QuantizedModel` the rules are replaced.
        rules: ordered (pattern, recipe or None) pairs; see `fp4jax.nn.resolve_rules`, `Blocks` and `keep_blocks`.
        backend: backend of the recipes, None to choose.
        noise: the random stream of stochastic recipes, given by `apply(..., rngs={noise: key})`.

    Raises:
        TypeError: `module` is no Linen module, or a rule no pair of pattern and recipe.
        ValueError: `module` is bound, or a pattern no regular expression. Which layers there are is known when `init`
            or `apply` run, and a rule that decides nothing raises there.

    Example:
        >>> model = linen.Sequential([linen.Dense(128), linen.relu, linen.Dense(10)])
        >>> model = quantize_model(model, [("layers_2", None), (".*", fp4jax.recipes.fp4())])
        >>> variables = model.init(jax.random.key(0), jnp.ones((4, 64)))
        >>> model.apply(variables, jnp.ones((4, 64))).shape
        (4, 10)
    """
    if isinstance(module, QuantizedModel):
        module = module.module
    if isinstance(module, nnx.Module):
        raise TypeError("module is an NNX module; fp4jax.nn.quantize_model takes those")
    if not isinstance(module, linen.Module):
        hint = "; create it first" if isinstance(module, type) else ""
        raise TypeError(f"module must be a flax.linen.Module, got {module if hint else type(module)!r}{hint}")
    if module.scope is not None:
        raise ValueError("module is bound to variables; quantize the unbound module (module.unbind()) and call apply")
    check_name(backend)
    compile_rules(rules, ())
    return QuantizedModel(module, tuple((pattern, recipe) for pattern, recipe in rules), backend, noise)


def describe_model(model: QuantizedModel, *args: Any, rngs: Any = None, **kwargs: Any) -> ModelReport:
    """Which recipe each layer follows: every module with parameters, those in high precision included.

    Args:
        model: a quantized model.
        args, kwargs: inputs of the model, as `init` takes them; arrays or `jax.ShapeDtypeStruct`. Nothing runs.
        rngs: as `init` takes them, `jax.random.key(0)` by default.

    Example:
        >>> model = linen.Sequential([linen.Conv(8, (3, 3)), linen.Dense(10)])
        >>> print(describe_model(quantize_model(model, [(".*", fp4jax.recipes.fp4())]), jnp.ones((2, 8, 8, 1))))
        path      layer        kernel         recipe  backend  parameters
        --------  -----------  -------------  ------  -------  ----------
        layers_0  linen.Conv   3 × 3 × 1 × 8  –       –                80
        layers_1  linen.Dense  8 × 10         fp4     auto             90
        47.1% of 170 parameters are quantized
    """
    seen: dict[str, Seen] = {}

    def init(rngs: Any, *args: Any) -> Any:
        variables, found = record(model.module, rngs, args, dict(kwargs))
        seen.update(found)
        return variables

    variables = jax.eval_shape(init, jax.random.key(0) if rngs is None else rngs, *args)
    decided = _resolve(model.rules, variables, seen)
    whole = kernels(variables)
    rows = []
    for path, parameters in owners(variables).items():
        name = seen[path].name if path in seen else "–"
        local = seen[path].kernel if path in seen else ()
        stack = _stack(whole.get(path, ()), local)
        recipe = decided.get(path)
        backend = None if recipe is None else model.backend
        covered = math.prod(whole[path]) if recipe is not None and recipe.quantizes else 0
        rows.append(LayerReport(path, name, local, stack, recipe, backend, parameters, covered))
    return ModelReport(tuple(rows), sum(row.parameters for row in rows), sum(row.covered for row in rows))


def _resolve(rules: Rules, variables: Any, seen: Mapping[str, Seen]) -> dict[str, Recipe | None]:
    """The recipe of each layer that can follow one."""
    whole = kernels(variables)
    able = {path: stacked(whole.get(path, ()), layer.kernel) for path, layer in seen.items() if layer.able}
    others = {path: seen[path].name if path in seen else "module" for path in owners(variables) if path not in able}
    decided = resolve_blocks(rules, able, others=others)
    for path, recipes in decided.items():
        check_uniform(path, recipes)
        reason = seen[path].refusal
        if recipes[0] is not None and reason is not None:
            raise ValueError(cannot(path, recipes[0], reason))
    return {path: recipes[0] for path, recipes in decided.items()}


def _stack(whole: tuple[int, ...], local: tuple[int, ...]) -> tuple[int, ...]:
    n = stacked(whole, local)
    return () if n is None else (n, *whole[1 : len(whole) - len(local)])
