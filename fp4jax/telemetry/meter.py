"""A meter: measures a live model now and then, in a program of its own beside the train step."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from fp4jax.telemetry.instrument import Probe, instrument
from fp4jax.telemetry.snapshot import Snapshot, collect


class Meter:
    """Measures a model under a loss, without touching the model or its train step.

    It compiles one program, forward and backward of an instrumented twin, the first time it is called. The train step
    knows nothing of it, so telemetry costs nothing in the steps between; a loop calls the meter every n steps:

        meter = telemetry.Meter(model, loss)
        for step, batch in enumerate(batches, start=1):
            if step % 100 == 0:
                log.write(step, meter(model, batch))    # what the next step will do to its operands
            train_step(model, optimizer, batch)

    Noise streams are read, not advanced: the meter draws what the next step draws.

    Args:
        model: an NNX model with quantized products (see ``telemetry.instrument``); only its structure is taken.
        loss: ``loss(model, *args) -> scalar``, of arrays.
        stacked: as in ``telemetry.instrument``.

    Raises:
        ValueError: as ``telemetry.instrument`` does; on a call, for a model of another structure.

    Example:
        >>> import fp4jax, jax.numpy as jnp
        >>> model = fp4jax.nn.Linear(64, 32, recipe=fp4jax.recipes.fp4(), rngs=nnx.Rngs(0))
        >>> meter = Meter(model, lambda model, x: jnp.sum(model(x) ** 2))
        >>> [record.place for record in meter(model, jnp.ones((8, 64))).records]
        ['fprop.lhs', 'fprop.rhs', 'dgrad.lhs', 'wgrad.rhs']
    """

    def __init__(
        self,
        model: nnx.Module,
        loss: Callable[..., jax.Array],
        *,
        stacked: Callable[[str], tuple[int, ...]] | None = None,
    ):
        self._graphdef, self._probes, _ = nnx.split(instrument(model, stacked=stacked), Probe, ...)
        self._structure = nnx.graphdef(model)

        def gradient(probes: Any, state: Any, *args: Any) -> Any:
            def of_probes(probes: Any) -> jax.Array:
                return loss(nnx.merge(self._graphdef, probes, state, copy=True), *args)

            return jax.grad(of_probes)(probes)

        self.sums = jax.jit(gradient)
        """``sums(*meter.arguments(model), *args)``: the gradients of the probes, not waited for."""

    def __call__(self, model: nnx.Module, *args: Any) -> Snapshot:
        """The statistics of ``loss(model, *args)``, forward and backward. Waits for the device."""
        return collect(self.sums(*self.arguments(model), *args))

    def arguments(self, model: nnx.Module) -> tuple[Any, Any]:
        """What ``sums`` takes of a model: zeros for the probes, and the model's state."""
        graphdef, state = nnx.split(model)
        if graphdef != self._structure:
            raise ValueError(
                "the model has another structure than the one this Meter was made for; make a Meter for it (a model in "
                "eval mode differs from one in train mode)"
            )
        return self._probes, state
