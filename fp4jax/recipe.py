"""A recipe: what each of the three products of a linear layer quantizes, and how gradients pass the quantizers."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from fp4jax.estimators import STE, Estimator
from fp4jax.outliers import OCC
from fp4jax.quantize import QuantSpec
from fp4jax.scaling import PowerOfTwo


@dataclasses.dataclass(frozen=True)
class Reuse:
    """The operand as fprop quantized it: the weight in dgrad, the activation in wgrad."""

    def __repr__(self) -> str:
        return "REUSE"


REUSE = Reuse()

type Operand = QuantSpec | Reuse | None


@dataclasses.dataclass(frozen=True)
class Gemm:
    """The operands of one product: a ``QuantSpec``, None (leave in high precision) or ``REUSE``.

    =======  ==================  =====================
    product  lhs                 rhs
    =======  ==================  =====================
    fprop    activation X[m, k]  weight W[k, n]
    dgrad    gradient dY[m, n]   weight Wᵀ
    wgrad    activation Xᵀ       gradient dY[m, n]
    =======  ==================  =====================
    """

    lhs: Operand = None
    rhs: Operand = None


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the products of a layer are quantized. Frozen, hashable, comparable.

    With X the activation, W the weight, dY the gradient, and scales that leave the sum:

        fprop   Y[m,n]  = sx[m] · sw[n] · Σk Xq[m,k] Wq[k,n]
        dgrad   dX[m,k] = s1[m] · Σn Q(dY[m,n] · sw[n]) · Wq[k,n]
        wgrad   dW[k,n] = s2[n] · Σm Xq[m,k] · Q(dY[m,n] · sx[m])  ⊙ f'(W · r)

    The scale of a reused operand lies along the contraction axis of the backward product, so it is folded into the
    gradient before that is quantized. Where dgrad or wgrad name a spec of their own for W or X, it is quantized again
    along the new axis; None leaves an operand in the dtype of the activation.

    Args:
        name: short name, for tables and ``explain``.
        fprop, dgrad, wgrad: the products.
        weight_estimator: gradient through the quantizer of W.
        activation_estimator: gradient through that of X. Entries that ``outliers`` clamps pass their gradient
            unchanged.
        outliers: what to do with outliers of X before it is quantized; None for nothing.
        output_dtype: dtype of Y; by default that of the activation.

    Raises:
        TypeError: if an argument is of another kind.
        ValueError: if the parts contradict each other (each message says what would work).

    Example:
        >>> import fp4jax
        >>> fp4jax.recipes.fp4() == fp4jax.recipes.fp4(alpha=0.99)
        True
    """

    name: str
    fprop: Gemm = Gemm()
    dgrad: Gemm = Gemm()
    wgrad: Gemm = Gemm()
    weight_estimator: Estimator = STE()
    activation_estimator: Estimator = STE()
    outliers: OCC | None = None
    output_dtype: type | np.dtype | None = None

    def __post_init__(self):
        for product in ("fprop", "dgrad", "wgrad"):
            gemm = getattr(self, product)
            if not isinstance(gemm, Gemm):
                raise TypeError(f"{product}={gemm!r} must be a Gemm(lhs, rhs)")
            for side in ("lhs", "rhs"):
                operand = getattr(gemm, side)
                if not isinstance(operand, QuantSpec | Reuse | None):
                    raise TypeError(f"{product}.{side}={operand!r} must be a QuantSpec, None or REUSE")
                if isinstance(operand, QuantSpec) and operand.format.bits > 8:
                    raise ValueError(
                        f"{product}.{side} has values of {operand.format.bits} bits ({operand.format!r}); operands "
                        "have at most 8, which bfloat16 holds exactly; use None to leave one in high precision"
                    )
        for name in ("weight_estimator", "activation_estimator"):
            if not isinstance(getattr(self, name), Estimator):
                raise TypeError(f"{name}={getattr(self, name)!r} must be an Estimator such as STE() or DGE()")
        if not isinstance(self.outliers, OCC | None):
            raise TypeError(f"outliers={self.outliers!r} must be an OCC or None")
        if self.output_dtype is not None:
            object.__setattr__(self, "output_dtype", jnp.dtype(self.output_dtype))
        self._check_reuse()
        self._check_parts()

    def _check_reuse(self):
        places = {
            "fprop.lhs": self.fprop.lhs,
            "fprop.rhs": self.fprop.rhs,
            "dgrad.lhs": self.dgrad.lhs,
            "wgrad.rhs": self.wgrad.rhs,
        }
        for place, operand in places.items():
            if isinstance(operand, Reuse):
                raise ValueError(
                    f"{place}=REUSE has nothing to reuse; REUSE is for dgrad.rhs (the weight) and wgrad.lhs (the "
                    "activation)"
                )
        for place, operand, source in (
            ("dgrad.rhs", self.dgrad.rhs, self.weight_spec),
            ("wgrad.lhs", self.wgrad.lhs, self.activation_spec),
        ):
            if isinstance(operand, Reuse) and source is not None and not source.granularity.leaves_the_sum:
                raise ValueError(
                    f"{place}=REUSE cannot reuse an operand with scales by {source.granularity!r}, which lie along "
                    "fprop's contraction; give it a QuantSpec of its own, and it is quantized again along the new axis"
                )

    def _check_parts(self):
        if not self.weight_estimator.is_identity and self.fprop.rhs is None:
            raise ValueError(
                f"weight_estimator={self.weight_estimator!r} needs a quantized weight, but fprop.rhs is None"
            )
        if not self.activation_estimator.is_identity and self.fprop.lhs is None:
            raise ValueError(
                f"activation_estimator={self.activation_estimator!r} needs a quantized activation, but fprop.lhs is "
                "None"
            )
        if self.outliers is None:
            return
        if self.activation_spec is None:
            raise ValueError("outliers needs a quantized activation, but fprop.lhs is None")
        carrier = self.outliers.residual_format
        rule = self.activation_spec.scale
        if self.outliers.compensation == "residual" and isinstance(rule, PowerOfTwo) and rule.mode in ("floor", "even"):
            raise ValueError(
                f"outliers with compensation='residual' need a scale that no value exceeds, and {rule!r} lets the "
                "largest saturate: carried outliers would lose up to a quarter; use PowerOfTwo('rceil') or "
                "AbsMax()"
            )
        if self.outliers.compensation == "residual" and carrier is not None:
            missing = np.setdiff1d(self.activation_spec.format.grid, carrier.grid)
            if missing.size:
                raise ValueError(
                    f"outliers.residual_format={carrier!r} cannot hold the values of {self.activation_spec.format!r} "
                    f"(such as {missing[-1]}); use E4M3, or None for float32"
                )

    @property
    def specs(self) -> dict[str, Operand]:
        """The six operands by place, such as ``"dgrad.lhs"``."""
        return {f"{p}.{s}": getattr(getattr(self, p), s) for p in ("fprop", "dgrad", "wgrad") for s in ("lhs", "rhs")}

    @property
    def activation_spec(self) -> QuantSpec | None:
        """What fprop quantizes the activation to."""
        return self.fprop.lhs if isinstance(self.fprop.lhs, QuantSpec) else None

    @property
    def weight_spec(self) -> QuantSpec | None:
        """What fprop quantizes the weight to."""
        return self.fprop.rhs if isinstance(self.fprop.rhs, QuantSpec) else None

    @property
    def quantizes(self) -> bool:
        """Whether any operand is quantized; if not, the product is plain ``jax.lax.dot_general``."""
        return any(isinstance(spec, QuantSpec) for spec in self.specs.values())

    @property
    def needs_key(self) -> bool:
        """Whether some quantizer draws noise, so that every call needs a key."""
        return any(isinstance(spec, QuantSpec) and spec.needs_key for spec in self.specs.values())

    def describe(self) -> str:
        """Every quantizer of the recipe, a line each."""
        roles = ("activation", "weight", "gradient", "weight", "activation", "gradient")
        lines = [f"{self.name}"]
        for (place, spec), role in zip(self.specs.items(), roles, strict=True):
            text = {type(None): "high precision", Reuse: "reused from fprop"}.get(type(spec), repr(spec))
            lines.append(f"  {place:<10} {role:<10} {text}")
        lines.append(f"  weight gradient      {self.weight_estimator!r}")
        lines.append(f"  activation gradient  {self.activation_estimator!r}")
        lines.append(f"  outliers             {self.outliers if self.outliers else 'as they are'}")
        dtype = "that of the activation" if self.output_dtype is None else str(self.output_dtype)
        lines.append(f"  output dtype         {dtype}")
        return "\n".join(lines)
