"""A snapshot: the statistics of all layers at one moment, as plain numbers."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from fp4jax.telemetry.operands import FACTOR_EDGES, SQRT3_DB, STATISTICS
from fp4jax.telemetry.probe import COLUMNS, NOISE, PLACES, SHAPE

_LEAVES = ("probe", "forward")
_PLUMBING = ("dot_general", "einsum_op")


@dataclasses.dataclass(frozen=True)
class Record:
    """The statistics of one operand of one layer.

    Attributes:
        layer: dotted path of the layer, such as ``layers.attention.query``.
        index: which of a stack, such as (3,); () for a layer that is not stacked.
        place: one of ``telemetry.PLACES``.
        values: the ``telemetry.STATISTICS``; means over ``calls``, of ``snr_db`` the mean of 1/SNR as an SNR: a call
            that lost nothing adds no noise.
        calls: how often it was measured: 1, or more where a layer runs again or gradients are accumulated.
        factors: shares of the weights by the factor of their gradient (``telemetry.FACTOR_EDGES``); empty but for a
            weight with an estimator such as DGE.
    """

    layer: str
    index: tuple[int, ...]
    place: str
    values: Mapping[str, float]
    calls: int = 1
    factors: tuple[float, ...] = ()

    @property
    def label(self) -> str:
        """``layers.attention.query[3]``."""
        return f"{self.layer}[{','.join(map(str, self.index))}]" if self.index else self.layer

    @property
    def snr_db(self) -> float:
        """SNR in dB; inf where nothing was lost, NaN where the operand was not finite."""
        return self.values["snr_db"]

    @property
    def is_gradient(self) -> bool:
        """Whether the operand is dY."""
        return self.place in ("dgrad.lhs", "wgrad.rhs")

    @property
    def drowned(self) -> bool:
        """Whether it is a gradient whose norm is below √3 times that of its quantization noise (arXiv:2505.19115)."""
        return self.is_gradient and self.snr_db < SQRT3_DB


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The records of a model, in the order of its layers. Prints as the table of ``telemetry.report``.

    Attributes:
        records: one for each layer, index and quantized operand that was measured.
    """

    records: tuple[Record, ...]

    @property
    def layers(self) -> tuple[str, ...]:
        """Paths of the layers, each once."""
        return tuple(dict.fromkeys(record.layer for record in self.records))

    @property
    def places(self) -> tuple[str, ...]:
        """The places that were measured somewhere, in the order of ``PLACES``."""
        return tuple(place for place in PLACES if any(record.place == place for record in self.records))

    def of(self, layer: str | None = None, place: str | None = None) -> tuple[Record, ...]:
        """The records of a layer, of a place, or of both."""
        return tuple(r for r in self.records if layer in (None, r.layer) and place in (None, r.place))

    def values(self, name: str, *, place: str, layer: str | None = None) -> np.ndarray:
        """One statistic as a float64 array, in the order of the records.

        Raises:
            KeyError: no such statistic; the message lists them.
        """
        if name not in STATISTICS:
            raise KeyError(f"name={name!r} is no statistic; there are {', '.join(STATISTICS)}")
        return np.array([record.values[name] for record in self.of(layer, place)], np.float64)

    def product_snr_db(self, product: str = "fprop") -> dict[str, float]:
        """For each layer and index, the SNR that its quantized operands leave to a product.

        Errors of the two operands are independent, so their shares of noise add: 1/SNR = 1/SNR(lhs) + 1/SNR(rhs). An
        operand that is not quantized, or reused, adds nothing here.

        Args:
            product: "fprop", "dgrad" or "wgrad".

        Raises:
            ValueError: no such product.
        """
        if product not in ("fprop", "dgrad", "wgrad"):
            raise ValueError(f"product={product!r} must be 'fprop', 'dgrad' or 'wgrad'")
        noise: dict[str, float] = {}
        for record in self.records:
            if record.place.startswith(product):
                noise[record.label] = noise.get(record.label, 0.0) + 10 ** (-record.snr_db / 10)
        return {label: _decibels(share) for label, share in noise.items()}

    def worst(self, count: int = 5, product: str = "fprop") -> list[tuple[str, float]]:
        """The layers that FP4 hurts most: (label, ``product_snr_db``), lowest first, NaN before."""
        scores = self.product_snr_db(product).items()
        return sorted(scores, key=lambda pair: -math.inf if math.isnan(pair[1]) else pair[1])[:count]

    def rows(self) -> list[dict[str, Any]]:
        """The records as flat dicts of JSON's types, but for inf and NaN."""
        return [
            {"layer": r.layer, "index": list(r.index), "place": r.place, "calls": r.calls, **r.values}
            | ({"factors": list(r.factors)} if r.factors else {})
            for r in self.records
        ]

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, Any]]) -> "Snapshot":
        """Undoes ``rows``."""
        return cls(
            tuple(
                Record(
                    row["layer"],
                    tuple(row["index"]),
                    row["place"],
                    {name: float(row[name]) for name in STATISTICS},
                    int(row["calls"]),
                    tuple(row.get("factors", ())),
                )
                for row in rows
            )
        )

    def __str__(self) -> str:
        from fp4jax.telemetry.report import report

        return str(report(self))


def collect(sums: Any) -> Snapshot:
    """The snapshot that gradients of probes, or what ``telemetry.capture`` returned, stand for.

    Args:
        sums: an ``nnx.State`` or nested dict that holds them, whatever else it holds. Waits for the device.

    Raises:
        ValueError: there is none.

    Example:
        >>> import fp4jax, jax.numpy as jnp
        >>> from fp4jax import telemetry
        >>> twin = telemetry.instrument(fp4jax.nn.Linear(64, 32, recipe=fp4jax.recipes.fp4(), rngs=nnx.Rngs(0)))
        >>> loss = lambda twin, x: jnp.sum(twin(x) ** 2)
        >>> snapshot = collect(nnx.grad(loss, argnums=nnx.DiffState(0, telemetry.Probe))(twin, jnp.ones((8, 64))))
        >>> snapshot.places
        ('fprop.lhs', 'fprop.rhs', 'dgrad.lhs', 'wgrad.rhs')
    """
    tables = dict(_tables(sums))
    if not tables:
        raise ValueError(
            "no statistics found: pass the gradients of an instrumented model with respect to telemetry.Probe, or what "
            "telemetry.capture returned"
        )
    host = jax.device_get(tables)
    records = []
    for path, table in host.items():
        for index in np.ndindex(table.shape[: -len(SHAPE)]):
            records += _records(".".join(path), index, np.asarray(table[index], np.float64))
    return Snapshot(tuple(records))


def _records(layer: str, index: tuple[int, ...], table: np.ndarray) -> list[Record]:
    found = []
    for place, row in zip(PLACES, table, strict=True):
        calls = row[0]
        if calls == 0:
            continue
        means = dict(zip(COLUMNS[1:], (row[1:] / calls).tolist(), strict=True))
        means["snr_db"] = _decibels(means[NOISE])
        factors = tuple(means[f"factor_{i}"] for i in range(len(FACTOR_EDGES) - 1))
        found.append(
            Record(
                layer,
                tuple(map(int, index)),
                place,
                {name: means[name] for name in STATISTICS},
                round(float(calls)),
                factors if any(factors) else (),
            )
        )
    return found


def _tables(sums: Any) -> list[tuple[tuple[str, ...], Any]]:
    """(path of the layer, probe-shaped array) of every leaf named like one."""
    found = []
    for keys, leaf in jax.tree_util.tree_leaves_with_path(_pure(sums)):
        names = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in keys]
        if names and names[-1] in _LEAVES and leaf.shape[-len(SHAPE) :] == SHAPE:
            layer = names[:-1]
            if layer[-2:] == ["dot_general", "product"]:  # of a PreparedDotGeneral; a layer may be named "product" too
                layer.pop()
            while layer and layer[-1] in _PLUMBING:
                layer.pop()
            found.append((tuple(layer), leaf))
    return found


def _pure(sums: Any) -> Any:
    return nnx.to_pure_dict(sums) if isinstance(sums, nnx.State) else sums


def _decibels(noise_share: float) -> float:
    """The SNR; infinite without noise, NaN where the share is."""
    if noise_share > 0:
        return -10 * math.log10(noise_share)
    return math.nan if math.isnan(noise_share) else math.inf
