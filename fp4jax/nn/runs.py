"""Stacked blocks that follow different recipes: cut into runs of equal recipe, each of which a scan can take."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fp4jax.dot import DotGeneral
from fp4jax.nn.layers import find_layers, install
from fp4jax.nn.product import KeyedDotGeneral, NoiseStream, QuantizedWeight
from fp4jax.recipe import Recipe


class BlockwiseDotGeneral(nnx.Module):
    """The product of a stacked layer whose blocks follow different recipes. It cannot run before `split_runs`.

    Args:
        recipes: one for each block, None for high precision.
        backend: backend of the recipes, None to choose.
        stream: noise [L] if some recipe needs it, else None.
    """

    def __init__(self, recipes: Sequence[Recipe | None], backend: str | None, stream: NoiseStream | None):
        self.recipes = tuple(recipes)
        self.backend = backend
        self.stream = nnx.data(stream)
        self.deterministic = False

    def set_view(self, deterministic: bool | None = None) -> None:
        """Used by `nnx.view`.

        Args:
            deterministic: read the stream and do not advance it, as after `module.eval()`.
        """
        if deterministic is not None:
            self.deterministic = deterministic

    def __call__(self, *args: Any, **options: Any) -> jax.Array:
        """Raises ValueError: which recipe it should follow is not known."""
        names = ", ".join("None" if recipe is None else recipe.name for recipe in self.recipes)
        raise ValueError(
            f"the blocks of this stacked layer follow different recipes ({names}); run the blocks that "
            "fp4jax.nn.split_runs returns, one after the other"
        )

    def of_block(self, block: int) -> DotGeneral | KeyedDotGeneral | None:
        """The product of one block, with the whole of the stream."""
        recipe = self.recipes[block]
        if recipe is None:
            return None
        dot = DotGeneral(recipe, self.backend)
        if not recipe.needs_key:
            return dot
        assert self.stream is not None
        keyed = KeyedDotGeneral(dot, self.stream)
        keyed.deterministic = self.deterministic
        return keyed


def equal_runs[T](values: Sequence[T]) -> list[tuple[int, int, T]]:
    """(start, stop, value) of each run of equal neighbors.

    Example:
        >>> equal_runs("aabbb")
        [(0, 2, 'a'), (2, 5, 'b')]
    """
    starts = [i for i, value in enumerate(values) if i == 0 or value != values[i - 1]]
    return [(start, stop, values[start]) for start, stop in itertools.pairwise([*starts, len(values)])]


def split_runs[M: nnx.Module](blocks: M) -> list[M]:
    """Cut stacked blocks where their recipes change. Each part is a stack of its own, with one recipe a layer.

    A model that runs its stacked blocks this way names them in a class attribute `splits_runs`; `quantize_model` then
    takes rules for single blocks of it. Parameters stay stacked in the model, so checkpoints do not depend on the
    rules; the parts hold slices of them, and gradients flow through the slices.

        class Model(nnx.Module):
            splits_runs = ("layers",)

            def __call__(self, x):
                runs = fp4jax.nn.split_runs(self.layers)
                for run in runs:
                    x = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, run)
                fp4jax.nn.join_runs(self.layers, runs)
                return x

    Args:
        blocks: a module all of whose variables have the same leading layer axis.

    Returns:
        The parts, in order; `[blocks]` itself where all blocks follow the same recipes.
    """
    mixed = _mixed(blocks)
    if not mixed:
        return [blocks]
    length = len(next(iter(mixed.values())).recipes)
    kinds = [tuple(product.recipes[i] for product in mixed.values()) for i in range(length)]
    leaves, treedef = jax.tree.flatten(blocks)
    parts = []
    for start, stop, _ in equal_runs(kinds):
        part = treedef.unflatten([leaf[start:stop] for leaf in leaves])
        for found in find_layers(part):
            if found.path in mixed:
                install(found, found.product.of_block(start), mixed[found.path].recipes[start])
        parts.append(part)
    return parts


def join_runs[M: nnx.Module](blocks: M, parts: Sequence[M]) -> None:
    """Take over what running `parts` changed, other than parameters, in place: noise counts, batch statistics.

    Args:
        blocks: what `split_runs` was given.
        parts: what it returned.
    """
    if len(parts) == 1 and parts[0] is blocks:
        return
    changing = nnx.All(nnx.Not(nnx.Param), nnx.Not(nnx.RngKey), nnx.Not(QuantizedWeight))
    whole = dict(nnx.to_flat_state(nnx.state(blocks, changing)))
    pieces = [dict(nnx.to_flat_state(nnx.state(part, changing))) for part in parts]
    sizes = [jax.tree.leaves(nnx.state(part, nnx.Param))[0].shape[0] for part in parts]
    bounds = list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))
    for path, variable in whole.items():
        # A run whose recipe draws nothing has no stream, so its counts stay.
        own = [variable[...][start:stop] for start, stop in bounds]
        new = [piece[path][...] if path in piece else old for piece, old in zip(pieces, own, strict=True)]
        whole[path] = variable.replace(jnp.concatenate(new))
    nnx.update(blocks, nnx.from_flat_state(whole))


def _mixed(blocks: nnx.Module) -> dict[str, BlockwiseDotGeneral]:
    products = {found.path: found.product for found in find_layers(blocks)}
    return {path: product for path, product in products.items() if isinstance(product, BlockwiseDotGeneral)}
