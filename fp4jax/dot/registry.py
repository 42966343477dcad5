"""The backends. Adding one is a module with the functions of ``Backend``, and a row here."""

from typing import Any, Protocol

from jax.sharding import NamedSharding

from fp4jax.dot import hopper, xla
from fp4jax.dot.call import Call
from fp4jax.recipe import Recipe
from fp4jax.typing import Array, Key


class Backend(Protocol):
    """What a backend offers. Its results must equal those of ``xla``: bit for bit where the sums are exact."""

    def unsupported(self, call: Call) -> list[str]:
        """Why it cannot run ``call``, a reason each; empty if it can."""
        ...

    def quantize_lhs(self, lhs: Array, recipe: Recipe, axis: tuple[int, ...], key: Key | None, batch: int = 0) -> Any:
        """What fprop and wgrad need of the activation, contracted along ``axis`` (negative); a pytree.

        ``batch`` is the number of batch axes.
        """
        ...

    def quantize_rhs(self, rhs: Array, recipe: Recipe, axis: tuple[int, ...], key: Key | None, batch: int = 0) -> Any:
        """What fprop and dgrad need of the weight, contracted along ``axis`` (negative); a pytree."""
        ...

    def stored_rhs(self, quantized: Any) -> Any:
        """What ``quantize_rhs`` returned, in as few bytes as fprop and dgrad can do with."""
        ...

    def reshard_rhs(self, quantized: Any, axis: tuple[int, ...], sharding: NamedSharding) -> Any:
        """What ``quantize_rhs`` returned, split over an Explicit mesh like a weight of this sharding."""
        ...

    def fprop(self, lhs: Array, rhs: Array, x: Any, w: Any, key: Key | None, call: Call) -> tuple[Array, Any]:
        """Y and the residuals of backward; ``x`` and ``w`` are the quantized operands."""
        ...

    def dgrad(self, residuals: Any, g: Array, call: Call) -> Array:
        """Gradient of lhs."""
        ...

    def wgrad(self, residuals: Any, g: Array, call: Call) -> Array:
        """Gradient of rhs."""
        ...


# In order of preference: ``backend=None`` takes the first that supports the call.
BACKENDS: dict[str, Backend] = {"hopper": hopper, "xla": xla}


def check_name(backend: str | None) -> None:
    """Raises ValueError if ``backend`` is neither None nor in ``BACKENDS``."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(
            f"backend={backend!r} is unknown; there are {', '.join(map(repr, BACKENDS))}, or None to choose"
        )


def choose(backend: str | None, call: Call) -> str:
    """Name of the backend to run ``call``.

    Raises:
        ValueError: if ``backend`` is unknown, or cannot run the call: with its reasons, and which backends can.
    """
    reasons = {name: BACKENDS[name].unsupported(call) for name in BACKENDS}
    able = [name for name, why in reasons.items() if not why]
    if backend is None:
        if able:
            return able[0]
        details = "; ".join(f"{name}: {', '.join(why)}" for name, why in reasons.items())
        raise ValueError(f"no backend supports recipe {call.recipe.name!r} here ({details})")
    check_name(backend)
    if reasons[backend]:
        raise ValueError(
            f"backend={backend!r} does not support recipe {call.recipe.name!r} here: {', '.join(reasons[backend])}; "
            f"supported by {', '.join(map(repr, able)) or 'none'}"
        )
    return backend
