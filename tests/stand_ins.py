"""Stand-ins for fp4jax's specs: the oracle reads class names and attributes only, so its own tests need no fp4jax."""

import dataclasses


class PerTensor:
    pass


class PerVector:
    pass


@dataclasses.dataclass(frozen=True)
class PerBlock:
    size: int


@dataclasses.dataclass(frozen=True)
class PerBlock2D:
    rows: int
    cols: int


class AbsMax:
    pass


@dataclasses.dataclass(frozen=True)
class PowerOfTwo:
    mode: str


class TwoLevel:
    pass


class STE:
    pass


class ClippedSTE:
    pass


@dataclasses.dataclass(frozen=True)
class DGE:
    k: float = 5.0
    clip: float = 3.0


@dataclasses.dataclass(frozen=True)
class Spec:
    format: str = "E2M1"
    granularity: object = dataclasses.field(default_factory=PerVector)
    scale: object = dataclasses.field(default_factory=AbsMax)
    rounding: str = "nearest_even"


@dataclasses.dataclass(frozen=True)
class Occ:
    alpha: float = 0.99
    scope: str = "tensor"
    compensation: str = "residual"
    residual_format: str = "E4M3"
