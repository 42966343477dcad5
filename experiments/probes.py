"""What happens inside while an arm trains: where weights stand in their grid interval, and outliers of activations.

`MeasuredArm` takes both at every validation. All arms are measured with the same yardstick, whatever their recipe, so
that they compare and share compiled programs: weights on the E2M1 grid with a scale for each output channel, and
activations of a forward pass in the model's own dtype.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fp4jax.estimators import DGE
from fp4jax.formats import E2M1
from fp4jax.models import Llama, LlamaConfig
from fp4jax.outliers import OCC, clamp_outliers
from fp4jax.quantize import QuantSpec, find_scales, grid_values, quantize, scaled_input
from fp4jax.rounding import position
from fp4jax.train.arm import Arm, Validation
from fp4jax.train.data import validation_batches
from fp4jax.train.step import Architecture, Metrics, Params, TrainState

SPEC = QuantSpec(E2M1)
BINS = 20
SITES = {
    "attention": ("attention", "query"),
    "output": ("attention", "output"),
    "mlp": ("mlp", "gate"),
    "down": ("mlp", "down"),
}
"""Activations of a block by what consumes them: one layer a site (query, key and value read the same)."""
ROWS = 8
"""Sequences on which activations are looked at, spread over the validation split."""


def weight_codes(params: Params) -> jax.Array:
    """E2M1 values of every weight of the blocks' linear layers, doubled to integers: int8 [n]."""
    return jnp.concatenate([_codes(kernel).reshape(-1) for kernel in _kernels(params)])


def weight_positions(params: Params) -> Metrics:
    """Where weights stand in the grid interval that holds them.

    Returns:
        `histogram` [BINS], shares by position from 0 (left end) to 1 (right end), and `dge_factor`, the mean of
        f'(W · r) of DGE(5, 3): the share of the gradient that DGE lets through (.593 if positions were uniform).
    """
    counts, factors, total = jnp.zeros(BINS), jnp.float32(0), 0
    for kernel in _kernels(params):
        u = scaled_input(kernel, find_scales(kernel, SPEC, (-2,)), SPEC, (-2,))
        bins = jnp.clip((position(u, E2M1) * BINS).astype(jnp.int32), 0, BINS - 1)
        counts = counts + jnp.sum(bins[..., None] == jnp.arange(BINS), axis=tuple(range(bins.ndim)), dtype=jnp.float32)
        factors, total = factors + jnp.sum(DGE().factor(u, E2M1)), total + u.size
    return {"histogram": counts / total, "dge_factor": factors / total}


def activation_statistics(config: LlamaConfig, params: Params, tokens: jax.Array) -> dict[str, Metrics]:
    """Of the inputs of each site in a forward pass without a recipe, [layers]: see `_describe`."""
    unrolled = dataclasses.replace(config, scan_layers=False, remat="none")
    model: Any = Architecture(lambda rngs: Llama(unrolled, rngs=rngs)).merge(params, {}, 0)
    found: dict[str, list[Metrics]] = {site: [] for site in SITES}
    for site, (part, name) in SITES.items():
        layer = getattr(getattr(model.layers, part), name)
        layer.dot_general = _Recorder(layer.dot_general, found[site])
    model(tokens)
    return {site: jax.tree.map(lambda *layers: jnp.stack(layers), *entries) for site, entries in found.items()}


class MeasuredArm(Arm):
    """An arm that also measures weights and activations, at every validation.

    Attributes:
        measured: a row a validation: `step`, `weights` and `activations`, each value with a leading axis [S];
            `weights.changed` is the share of codes that differ from the last validation's, and `weights.flipped` of
            those that the very next step changes (absent where none follows).
        memory: bytes that the compiled train step needs, state included; None before `warm_up`.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.measured: list[dict[str, Any]] = []
        self._plain_step: Any = self.train_step
        self.train_step = self._step
        rows = validation_batches(self.text.split.validation, self.plan.seq_len, ROWS, limit=1)[0]["tokens"][:, :-1]
        self._rows = self.placement.batch(rows)
        self._programs = _programs(self.model, len(self.seeds) > 1)
        self.memory: int | None = None
        self._last_codes: jax.Array | None = None
        self._watched: jax.Array | None = None

    def validate(self, state: TrainState) -> Validation:
        """See `Arm.validate`; also measures."""
        self._measure(state)
        return super().validate(state)

    def warm_up(self) -> None:
        """Compile everything, so that training starts at once; what it computes for that is thrown away."""
        batches = self.batches(0)
        self._plain_step = self._plain_step.lower(self.abstract_state, next(batches)).compile()
        batches.close()
        needed = self._plain_step.memory_analysis()
        self.memory = needed.argument_size_in_bytes + needed.temp_size_in_bytes
        self.validate(self.init())
        jax.block_until_ready(self._programs.differ(self._watched, self._watched))
        self.measured, self._last_codes, self._watched = [], None, None

    def measurements(self) -> list[dict[str, Any]]:
        """`measured` on the host, every leaf an array with a leading axis [S]."""
        host = jax.device_get(self.measured)
        if len(self.seeds) == 1:
            host = [{**jax.tree.map(lambda x: np.asarray(x)[None], row), "step": row["step"]} for row in host]
        return [{**row, "step": int(row["step"])} for row in host]

    def _measure(self, state: TrainState) -> None:
        codes = self._programs.codes(state.params)
        weights = self._programs.positions(state.params)
        if self._last_codes is not None:
            weights["changed"] = self._programs.differ(codes, self._last_codes)
        self._last_codes = self._watched = codes
        activations = self._programs.activations(state.params, self._rows)
        self.measured.append({"step": np.ravel(state.step)[0], "weights": weights, "activations": activations})

    def _step(self, state: TrainState, tokens: jax.Array) -> tuple[TrainState, Metrics]:
        result = self._plain_step(state, tokens)
        if self._watched is not None:
            row = self.measured[-1]
            codes = self._programs.codes(result[0].params)
            row["weights"]["flipped"] = self._programs.differ(codes, self._watched)
            self._watched = None
        return result


class _Programs(NamedTuple):
    """Compiled measurements, the same for all arms of a model."""

    codes: Callable[[Params], jax.Array]
    positions: Callable[[Params], Metrics]
    activations: Callable[[Params, jax.Array], dict[str, Metrics]]
    differ: Callable[[Any, Any], jax.Array]


@functools.cache
def _programs(config: LlamaConfig, several_seeds: bool) -> _Programs:
    over_seeds = jax.vmap if several_seeds else lambda function, **_: function
    activations = over_seeds(functools.partial(activation_statistics, config), in_axes=(0, None))
    return _Programs(
        codes=jax.jit(over_seeds(weight_codes)),
        positions=jax.jit(over_seeds(weight_positions)),
        activations=jax.jit(activations),
        differ=jax.jit(lambda a, b: jnp.mean(a != b, axis=-1, dtype=jnp.float32)),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Recorder:
    """A `dot_general` that describes its lhs, inside one trace."""

    inner: Any
    found: list[Metrics]

    def __call__(self, lhs: jax.Array, rhs: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        self.found.append(_describe(lhs))
        return self.inner(lhs, rhs, *args, **kwargs)


def _describe(x: jax.Array) -> Metrics:
    """Outliers of [tokens, d]: largest over rms, kurtosis, and the SNR of E2M1 (dB) without and with OCC (α = .99)."""
    wide = x.astype(jnp.float32)
    power = jnp.mean(jnp.square(wide))
    clamped, residual = clamp_outliers(wide, OCC(0.99), axis=-1)
    direct, kept = (quantize(part, SPEC, axis=-1).dequantize(jnp.float32) for part in (wide, clamped))
    return {
        "peak": jnp.max(jnp.abs(wide)) / jnp.sqrt(power),
        "kurtosis": jnp.mean(jnp.square(jnp.square(wide))) / jnp.square(power),
        "snr": _snr(power, wide - direct),
        "snr_occ": _snr(power, wide - kept - residual),
    }


def _snr(power: jax.Array, error: jax.Array) -> jax.Array:
    return 10 * jnp.log10(power / jnp.mean(jnp.square(error)))


def _kernels(params: Params) -> list[jax.Array]:
    """Kernels of the blocks, [layers, k, n]."""
    return [leaf for leaf in jax.tree.leaves(params["layers"]) if leaf.ndim == 3]


def _codes(kernel: jax.Array) -> jax.Array:
    values = grid_values(kernel, find_scales(kernel, SPEC, (-2,)), SPEC, (-2,), None)
    return (values * 2).astype(jnp.int8)
