"""How a Linen layer is given its product: each call of it is intercepted, and the product lent while it runs.

Linen builds most layers while the model runs, so there is nothing to convert beforehand. Interceptors are Flax's own
(`linen.intercept_methods`); they see every method of every module, inside scan, vmap, remat and jit as well.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen.dtypes import promote_dtype

from fp4jax.linen.product import DotGeneral, KeepKernelDtype, dot_general_cls
from fp4jax.nn.convert import recipe_names
from fp4jax.nn.einsum import einsum, parse_equation
from fp4jax.nn.rules import Rules, compile_rules, first_match, layer_names, no_match
from fp4jax.recipe import Recipe

LAYERS = (linen.Dense, linen.DenseGeneral, linen.Einsum)
"""The layers that can follow a recipe, their subclasses included."""

# In the flags of a scope: whose rules the layers in it follow. Flags are part of linen.jit's cache key, so that what it
# compiled under other rules, or none, is not found again.
_FLAG = "fp4jax"
_RECORDS = itertools.count()


@dataclasses.dataclass(frozen=True)
class Seen:
    """A module as it ran.

    Args:
        name: its class, as users write it: "linen.Dense".
        kernel: shape of its kernel there, where scan has taken the layer axis away; () without a kernel.
        able: whether it can follow a recipe.
        refusal: why this one cannot, or None.
    """

    name: str
    kernel: tuple[int, ...]
    able: bool
    refusal: str | None


def record(module: linen.Module, rngs: Any, args: Any, kwargs: Any) -> tuple[Any, dict[str, Seen]]:
    """(`module.init(rngs, *args, **kwargs)`, what ran by path)."""
    seen: dict[str, Seen] = {}

    def note(next_fun, args, kwargs, context):
        out = next_fun(*args, **kwargs)
        inner = context.module
        if inner.scope is not None and context.method_name != "setup":
            kernel = _local(inner)
            able = isinstance(inner, LAYERS)
            here = Seen(_name(type(inner)), kernel, able, refusal(inner) if able else None)
            path = ".".join(inner.path)
            # A lifted layer runs inside the class that lifts it, under the same path: the inner one ends first.
            if path not in seen or (here.kernel and not seen[path].kernel):
                seen[path] = here
        return out

    method = marked(kwargs.pop("method", None), ("record", next(_RECORDS)))
    with linen.intercept_methods(note):
        return module.init(rngs, *args, method=method, **kwargs), seen


def marked(method: Any, mark: Any) -> Callable[..., Any]:
    """`method` of a model, None for `__call__`, on a model whose scope carries `mark`."""

    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        _mark(module, mark)
        if isinstance(method, str):
            return getattr(module, method)(*args, **kwargs)
        function = type(module).__call__ if method is None else getattr(method, "__func__", method)
        return function(module, *args, **kwargs)

    return run


def _mark(module: linen.Module, mark: Any) -> None:
    """Mark the scopes of a bound model, from which those of modules made later are derived."""
    if module.scope is None:
        return
    module.scope.flags = module.scope.flags.copy({_FLAG: mark})
    for field in dataclasses.fields(module):  # modules given as fields are bound already, with scopes of their own
        if field.name != "parent":
            held = jax.tree.leaves(getattr(module, field.name), is_leaf=lambda leaf: isinstance(leaf, linen.Module))
            for child in held:
                if isinstance(child, linen.Module):
                    _mark(child, mark)


class Call:
    """The interceptor of one `apply`.

    Args:
        rules, backend, noise: as `quantize_model` was given them.
        variables: of the whole model.

    Raises:
        ValueError: a rule finds none of the paths in `variables`.
    """

    def __init__(self, rules: Rules, backend: str | None, noise: str, variables: Any):
        self.rules, self.backend, self.noise = rules, backend, noise
        self.kernels = kernels(variables)
        self.mark = repr((rules, backend, noise))
        paths = list(owners(variables))
        # The last block's names are enough to count the blocks of a stack.
        ends = [name for path in paths for name in self._names(path, slice(-1, None))]
        self.matchers = compile_rules(rules, ends)
        self.running: list[linen.Module] = []
        self.used: set[str] = set()
        for i, matcher in enumerate(self.matchers):
            if any(map(matcher.search, paths)) or not paths:
                continue
            if not any(matcher.search(name) for path in paths for name in self._names(path, slice(None))):
                raise no_match(i, rules[i][0], paths, "The variables have:\n  " + "\n  ".join(paths))

    def __call__(self, next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        """Called by Linen around each method of each module."""
        module = context.module
        if module.scope is None or module.scope.flags.get(_FLAG) != self.mark or context.method_name != "__call__":
            return next_fun(*args, **kwargs)
        if isinstance(module, DotGeneral):
            self.used.add(".".join(module.path[:-1]))
        if not isinstance(module, LAYERS) or any(module is outer for outer in self.running):
            return next_fun(*args, **kwargs)
        recipe = self._recipe(module)
        if recipe is None:
            return next_fun(*args, **kwargs)
        reason = refusal(module)
        if reason is not None:
            raise ValueError(cannot(".".join(module.path), recipe, reason))
        self.running.append(module)
        try:
            return self._run(module, recipe, next_fun, args, kwargs)
        finally:
            self.running.pop()

    def _run(self, module: linen.Module, recipe: Recipe, next_fun: Any, args: Any, kwargs: Any) -> Any:
        product = dot_general_cls(recipe, self.backend, self.noise)
        if isinstance(module, linen.Einsum):
            return _einsum(module, product(), recipe, *args, **kwargs)
        keep = KeepKernelDtype(recipe.output_dtype)
        with _lent(module, dot_general_cls=product, promote_dtype=keep):
            out = next_fun(*args, **kwargs)
        if not type(module).__module__.startswith("flax.") and ".".join(module.path) not in self.used:
            raise ValueError(
                cannot(
                    ".".join(module.path),
                    recipe,
                    f"its class {_name(type(module))} does not use the dot_general_cls it inherits",
                )
            )
        return out

    def _recipe(self, module: linen.Module) -> Recipe | None:
        path = ".".join(module.path)
        n = stacked(self.kernels.get(path, ()), _local(module))
        found = []
        for block in [None] if n is None else range(n):
            rule = first_match(self.matchers, layer_names(path, block))
            if rule is None:
                raise ValueError(
                    f"no rule matches layer {path!r}; add one, or end the rules with ('.*', None) to leave the rest in "
                    "high precision"
                )
            found.append(self.rules[rule][1])
        check_uniform(path, found)
        return found[0]

    def _names(self, path: str, blocks: slice) -> list[str]:
        """What the layer answers to, were its kernel's first axis that of some blocks."""
        kernel = self.kernels.get(path, ())
        several = range(kernel[0])[blocks] if len(kernel) > 2 else ()
        return [path, *(name for block in several for name in layer_names(path, block)[1:])]


def owners(variables: Any) -> dict[str, int]:
    """How many parameters each module holds itself, by path."""
    found: dict[str, int] = {}
    for keys, leaf in _parameters(variables):
        path = ".".join(keys[:-1])
        found[path] = found.get(path, 0) + math.prod(leaf.shape)
    return found


def kernels(variables: Any) -> dict[str, tuple[int, ...]]:
    """Shape of each module's kernel, by path; scan has stacked it."""
    return {".".join(keys[:-1]): leaf.shape for keys, leaf in _parameters(variables) if keys[-1] == "kernel"}


def stacked(whole: tuple[int, ...], local: tuple[int, ...]) -> int | None:
    """Number of blocks of which `local` is the kernel of one and `whole` that of all; None if they are the same."""
    if len(whole) <= len(local) or not local:
        return None
    # linen.scan may stack along any axis; the first one without which the shapes agree is it, whatever the others.
    return next((n for i, n in enumerate(whole) if (*whole[:i], *whole[i + 1 :]) == local), whole[0])


def check_uniform(path: str, recipes: Sequence[Recipe | None]) -> None:
    """Raise ValueError if the blocks of a stack are to follow different recipes."""
    if len(set(recipes)) > 1:
        raise ValueError(
            f"layer {path!r} is a stack of {len(recipes)} blocks that linen.scan or linen.vmap run as one, so they "
            f"share a recipe, but the rules give them {recipe_names(recipes)}. Give all blocks the same, or build them "
            "one by one"
        )


def cannot(path: str, recipe: Recipe, reason: str | None) -> str:
    """The message for a layer that cannot follow its recipe."""
    return f"layer {path!r} cannot follow recipe {recipe.name!r}: {reason}. Give it None in the rules"


def refusal(module: Any) -> str | None:
    """Why a recipe cannot be given to this layer, or None."""
    for name in ("dot_general", "dot_general_cls"):
        if getattr(module, name, None) is not None:
            return f"it has a {name} of its own, {getattr(module, name)!r}"
    if module.promote_dtype is not promote_dtype and not isinstance(module.promote_dtype, KeepKernelDtype):
        return (
            f"it has a promote_dtype of its own, {module.promote_dtype!r}, which may round the kernel before it is "
            "quantized (fp4jax.linen.KeepKernelDtype does not)"
        )
    if isinstance(module, linen.Einsum) and type(module).__call__ is not linen.Einsum.__call__:
        return (
            f"its class {_name(type(module))} is not linen.Einsum itself, whose product cannot be replaced from outside"
        )
    return None


def _einsum(module: linen.Einsum, product: Any, recipe: Recipe, inputs: Any, einsum_str: str | None = None) -> Any:
    """`linen.Einsum.__call__` with its product replaced; Flax calls `jnp.einsum` there and takes no other."""
    equation = linen.merge_param("einsum_str", module.einsum_str, einsum_str)
    kernel = module.param("kernel", module.kernel_init, module.shape, module.param_dtype)
    _, rhs, out = parse_equation(equation, jnp.ndim(inputs), len(module.shape))
    sizes = [module.shape[rhs.index(index)] if index in rhs else None for index in out]
    bias = None
    if module.use_bias:
        shape = tuple(size for size in sizes if size is not None)
        bias = module.param("bias", module.bias_init, shape, module.param_dtype)
    preferred = module.preferred_element_type
    promote = KeepKernelDtype(recipe.output_dtype if preferred is None else preferred)
    inputs, kernel, bias = promote(inputs, kernel, bias, dtype=module.dtype)
    y = einsum(
        equation, inputs, kernel, dot_general=product, precision=module.precision, preferred_element_type=preferred
    )
    return y if bias is None else y + jnp.reshape(bias, [1 if size is None else size for size in sizes])


@contextlib.contextmanager
def _lent(module: linen.Module, **values: Any) -> Iterator[None]:
    """Set fields of a module, which is frozen, for as long as it runs. Layers that lift it copy its fields."""
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            object.__setattr__(module, name, value)
        yield
    finally:
        for name, value in before.items():
            object.__setattr__(module, name, value)


def _parameters(variables: Any) -> list[tuple[tuple[str, ...], Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(linen.meta.unbox(variables.get("params", {})))
    return [(tuple(str(getattr(key, "key", key)) for key in keys), leaf) for keys, leaf in leaves]


def _local(module: linen.Module) -> tuple[int, ...]:
    """Shape of the kernel that a module sees where it runs."""
    assert module.scope is not None
    kernel = linen.meta.unbox(module.scope.get_variable("params", "kernel"))
    return () if kernel is None else tuple(jnp.shape(kernel))


def _name(cls: type) -> str:
    return ("linen." if cls.__module__.startswith("flax.linen") else "") + cls.__qualname__.rpartition(".")[2]
