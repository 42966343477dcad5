"""The layers of an NNX model that can follow a recipe: how they are found, and where each holds its product."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx import graphlib
from flax.nnx.nn.dtypes import promote_dtype
from jax import lax

from fp4jax.dot import DotGeneral
from fp4jax.nn.einsum import DotEinsum
from fp4jax.nn.product import KeepKernelDtype, KeyedDotGeneral, unprepared
from fp4jax.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """How a kind of layer holds its product. A layer of your own takes part once it has a row in `LAYERS`.

    Args:
        product: name of the attribute that holds the product.
        stock: what that attribute may hold without a recipe; the first is put back where a recipe is taken away.
        kernel_shape: shape of the kernel of one layer; more axes in front of it mean stacked layers.
        wrap: makes of a `dot_general` what the attribute holds.
        promotes: whether the layer casts its operands by an attribute `promote_dtype`, which must leave the kernel
            alone.
        contraction: the axes of the kernel of one layer that its product sums over, in the product's order, so that
            `prepare_weights` can quantize the kernel before the layer is called; None where that cannot be told, where
            the product has batch axes, or where the layer does not give it the kernel as it is.
    """

    product: str
    stock: tuple[Callable[..., Any] | None, ...]
    kernel_shape: Callable[[Any], tuple[int, ...]]
    wrap: Callable[[Any], Any] = lambda dot: dot
    promotes: bool = True
    contraction: Callable[[Any], tuple[int, ...] | None] = lambda layer: None

    def dot_general(self, layer: nnx.Module) -> Any:
        """The product of `layer`: a `DotGeneral`, `KeyedDotGeneral`, …, or None if it follows no recipe of ours."""
        held = getattr(layer, self.product)
        held = held.dot_general if isinstance(held, DotEinsum) else held
        return held if isinstance(held, DotGeneral | nnx.Module) else None


# With batch axes a product may run elsewhere than what is prepared for a plain one, and sum in another order.


def _einsum_contraction(layer: Any) -> tuple[int, ...] | None:
    """The indices that both operands have and the result has not."""
    operands, _, out = layer.einsum_str.replace(" ", "").partition("->")
    lhs, _, rhs = operands.partition(",")
    shared = [i for i in lhs if i in rhs]
    return None if "." in rhs or any(i in out for i in shared) else tuple(map(rhs.index, shared))


def _general_contraction(layer: Any) -> tuple[int, ...] | None:
    return None if layer.batch_axis else tuple(range(len(layer.in_features)))


LAYERS: dict[type[nnx.Module], LayerKind] = {
    nnx.Linear: LayerKind(
        "dot_general",
        (lax.dot_general,),
        lambda layer: (layer.in_features, layer.out_features),
        contraction=lambda layer: (0,),
    ),
    nnx.LinearGeneral: LayerKind(
        "dot_general",
        (None, lax.dot_general),
        lambda layer: (*layer.batch_axis.values(), *layer.in_features, *layer.out_features),
        contraction=_general_contraction,
    ),
    nnx.Einsum: LayerKind(
        "einsum_op",
        (jnp.einsum,),
        lambda layer: tuple(layer.kernel_shape),
        wrap=DotEinsum,
        contraction=_einsum_contraction,
    ),
}
"""The layers that can follow a recipe, their subclasses included: those of `fp4jax.nn` are subclasses of Flax's."""


@dataclasses.dataclass(frozen=True)
class Found:
    """A module of a model that holds parameters of its own.

    Args:
        paths: its dotted paths, more than one if it is shared.
        module: the module.
        kind: where its product is, None if it can follow no recipe.
    """

    paths: tuple[str, ...]
    module: Any
    kind: LayerKind | None

    @property
    def path(self) -> str:
        """The first path."""
        return self.paths[0]

    @property
    def name(self) -> str:
        """Its class, as users write it: "nnx.Linear"."""
        cls = type(self.module)
        packages = {"flax.nnx": "nnx.", "fp4jax.nn": "fp4jax.nn."}
        prefix = next((short for long, short in packages.items() if cls.__module__.startswith(long)), "")
        return prefix + cls.__qualname__.rpartition(".")[2]

    @property
    def variables(self) -> list[nnx.Variable]:
        """The parameters it holds itself."""
        return [child for _, child in _children(self.module) if isinstance(child, nnx.Param)]

    @property
    def kernel(self) -> Any:
        """The weight of its product, None where that belongs to another module."""
        return getattr(self.module, "kernel", None)

    @property
    def product(self) -> Any:
        """The product it holds, if that is one of fp4jax; a class without a row in `LAYERS` may have one too."""
        if self.kind is not None:
            return self.kind.dot_general(self.module)
        held = getattr(self.module, "dot_general", None)
        return held if isinstance(held, DotGeneral | KeyedDotGeneral) else None

    @property
    def stack(self) -> tuple[int, ...]:
        """Sizes of the leading axes by which it is stacked; () for one layer."""
        if self.kind is None or self.kernel is None:
            return ()
        return self.kernel.shape[: max(0, self.kernel.ndim - len(self.kind.kernel_shape(self.module)))]


def kind_of(module: Any) -> LayerKind | None:
    """The row of `LAYERS` for the class of `module`, or for the nearest of its bases."""
    return next((LAYERS[base] for base in type(module).__mro__ if base in LAYERS), None)


def find_layers(model: nnx.Module) -> list[Found]:
    """Every module of `model` that can follow a recipe or holds parameters, each once, in the order of the paths."""
    paths: dict[int, list[str]] = {}
    modules: dict[int, Any] = {}
    for path, module in walk(model):
        if kind_of(module) or any(isinstance(child, nnx.Param) for _, child in _children(module)):
            paths.setdefault(id(module), []).append(path)
            modules[id(module)] = module
    return [Found(tuple(paths[i]), module, kind_of(module)) for i, module in modules.items()]


def walk(model: nnx.Module) -> Iterator[tuple[str, Any]]:
    """(path, module) for every module and container of modules; a shared one comes once a path."""
    return _walk(model, (), ())


def _walk(node: Any, path: tuple[str, ...], above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    if id(node) in above:  # a module that refers back to one that contains it
        return
    yield ".".join(path), node
    for key, child in _children(node):
        if not isinstance(child, nnx.Variable) and graphlib.is_node(child):
            yield from _walk(child, (*path, str(key)), (*above, id(node)))


def _children(node: Any) -> Iterator[tuple[Any, Any]]:
    # Public iterators visit a shared module once, under one of its paths; rules have to know them all.
    impl = graphlib.get_node_impl(node)
    if impl is not None:
        yield from impl.node_dict(node).items()


def refusal(found: Found) -> str | None:
    """Why a recipe cannot be given to this layer, or None."""
    kind, layer = found.kind, found.module
    if kind is None:
        return f"{found.name} has no product that can follow a recipe"
    held = getattr(layer, kind.product)
    if getattr(layer, "dot_general_cls", None) is not None:
        return f"it has a dot_general_cls of its own, {layer.dot_general_cls!r}"
    ours = unprepared(kind.dot_general(layer))
    if not (held in kind.stock or isinstance(ours, DotGeneral | KeyedDotGeneral) or hasattr(ours, "recipes")):
        return f"its {kind.product} is {held!r}, not one of Flax or fp4jax"
    if (
        kind.promotes
        and layer.promote_dtype is not promote_dtype
        and not isinstance(layer.promote_dtype, KeepKernelDtype)
    ):
        return (
            f"it has a promote_dtype of its own, {layer.promote_dtype!r}, which may round the kernel before it is "
            "quantized (fp4jax.nn.KeepKernelDtype does not)"
        )
    if found.stack and found.kernel.shape[len(found.stack) :] != kind.kernel_shape(layer):
        return (
            f"its kernel has shape {found.kernel.shape}, which is not a stack of kernels {kind.kernel_shape(layer)} "
            "along leading axes; stack layers along axis 0 (nnx.vmap with out_axes=0)"
        )
    if not _calls_product(type(layer), kind):
        return (
            f"its class {found.name} overrides __call__ and mentions neither {kind.product} nor super(), so that the "
            f"recipe might never be used; if it is, say so by fp4jax.nn.LAYERS[{found.name}] = "
            "fp4jax.nn.LAYERS[nnx.Linear], or the row of another base"
        )
    return None


def calls_as_known(cls: type) -> bool:
    """Whether `__call__` is that of a class in `LAYERS`."""
    return cls.__call__ is next(base for base in cls.__mro__ if base in LAYERS).__call__


def _calls_product(cls: type, kind: LayerKind) -> bool:
    """Whether `__call__` is that of a class in `LAYERS`, or plainly uses what such a class offers."""
    code = getattr(cls.__call__, "__code__", None)
    if calls_as_known(cls) or code is None:
        return calls_as_known(cls)
    return bool({kind.product, "super"} & {*code.co_names, *code.co_freevars})


def replace_product(found: Found, product: Any) -> None:
    """Put `product` into the layer in place of what it holds, and leave all else."""
    assert found.kind is not None
    held = found.kind.wrap(product)
    setattr(found.module, found.kind.product, nnx.data(held) if isinstance(held, nnx.Module) else nnx.static(held))


def install(found: Found, product: Any, recipe: Recipe | None) -> None:
    """Put `product` into the layer, and let the layer cast as `recipe` wants it; None takes the recipe away."""
    kind, layer = found.kind, found.module
    assert kind is not None
    if product is None:
        setattr(layer, kind.product, nnx.static(kind.stock[0]))
    else:
        replace_product(found, product)
    if kind.promotes:
        preferred = getattr(layer, "preferred_element_type", None)
        output = recipe.output_dtype if preferred is None and recipe is not None else preferred
        layer.promote_dtype = promote_dtype if product is None else KeepKernelDtype(output)
    if hasattr(layer, "recipe"):
        layer.recipe = recipe
