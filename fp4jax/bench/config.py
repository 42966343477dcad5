"""What `fp4jax bench` measures: its flags. Imports nothing that is slow to load."""

import dataclasses
from pathlib import Path
from typing import Literal

from fp4jax.train.errors import ConfigError
from fp4jax.train.naming import check_choice, parse_recipe

type TableName = Literal["products", "quantizers", "quantile", "layer", "step", "profile", "least", "tune"]

ON_GPU: tuple[TableName, ...] = ("quantizers", "quantile", "layer", "products", "step")
ON_CPU: tuple[TableName, ...] = ("step",)
ANYWHERE: tuple[TableName, ...] = ("step", "profile", "least")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Time kernels, a linear layer and a train step against their alternatives, and print ratios.

    On a GPU times are medians of kernel times; on a CPU the train step alone is measured, by the wall clock: there it
    shows what emulation costs.
    """

    tables: tuple[TableName, ...] = ()
    """What to measure: quantizers, quantile, layer, products, step, which are the default on a GPU; profile tells where
    the time of a step goes, least the least that it could take, and tune tries configurations of the product. On a CPU,
    where kernels do not run, step is the default, and profile and least work too."""
    sizes: tuple[Literal["7b", "13b"], ...] = ("7b", "13b")
    """Whose layers give the products their shapes."""
    tokens: int = 16384
    """Rows of an activation in quantizers, quantile, layer and tune."""
    product_tokens: tuple[int, ...] = (8192, 16384)
    """Rows of an activation in products."""
    recipes: tuple[str, ...] = ("fp4",)
    """Recipes of layer, step, profile and least, as for fp4jax compare."""
    model: str | None = None
    """Model of step, profile and least. By default 1.3b on a GPU, tiny on a CPU."""
    seq_len: int | None = None
    """Tokens in a sequence of step. By default 2048 on a GPU, 64 on a CPU."""
    batch_size: int = 8
    """Sequences in a step."""
    remat: Literal["none", "full", "dots", "quantized"] = "none"
    """What the backward pass of step recomputes."""
    scan_layers: bool = True
    """Compile one block of the model, and loop over it; else every block by itself, which takes XLA several times as
    long and saves the copies of what the loop keeps for backward."""
    iterations: int = 10
    """How often each is run; the median counts."""
    baselines: bool = True
    """Also measure what others offer. XLA takes a minute or two for an FP8 product to choose how to compute it."""
    quick_baselines: bool = True
    """Let XLA choose among the algorithms of cuBLASLt alone, which takes seconds, rather than its own kernels too."""
    budget: float | None = None
    """Seconds after which nothing new is begun. What runs then is finished, or is lost with the process."""
    out: Path | None = None
    """Where to write all results as JSON, anew after each. Traces of profile go to a folder beside it."""

    def resolved(self) -> "BenchConfig":
        """Checked, with defaults filled in for the device.

        Raises:
            ConfigError: a value that cannot be used; kernels asked for where there is no Hopper GPU.
        """
        import jax

        from fp4jax.kernels import is_hopper
        from fp4jax.models import MODELS

        gpu = jax.default_backend() == "gpu"
        for name in ("tokens", "batch_size", "iterations"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        for tokens in self.product_tokens:
            if tokens < 1:
                raise ConfigError(f"product_tokens={self.product_tokens} must each be at least 1")
        if self.budget is not None and self.budget <= 0:
            raise ConfigError(f"budget={self.budget} must be above 0 seconds")
        if self.seq_len is not None and self.seq_len < 1:
            raise ConfigError(f"seq_len={self.seq_len} must be at least 1")
        for recipe in self.recipes:
            parse_recipe(recipe)
        if self.out is not None and not self.out.resolve().parent.is_dir():
            raise ConfigError(f"out={str(self.out)!r}: its folder does not exist; create it, or give another")
        tables = self.tables or (ON_GPU if gpu and is_hopper() else ON_CPU)
        for table in tables:
            if table not in ANYWHERE and not is_hopper():
                raise ConfigError(
                    f"tables: {table} needs an H100 or H200, and this is {jax.devices()[0].device_kind!r}; here only "
                    f"{', '.join(ANYWHERE)} can be had"
                )
        return dataclasses.replace(
            self,
            tables=tables,
            model=check_choice("model", self.model or ("1.3b" if gpu else "tiny"), MODELS),
            seq_len=self.seq_len or (2048 if gpu else 64),
        )
