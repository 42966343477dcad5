"""`fp4jax sensitivity`: which layers the 4 bits hurt, measured by the validation loss with one of them quantized."""

import dataclasses
import datetime
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro
from flax import nnx
from rich.console import Console
from rich.table import Table

from fp4jax import telemetry
from fp4jax.models import Llama, LlamaConfig
from fp4jax.telemetry.heatmap import draw_grids
from fp4jax.train.arm import Arm, Text
from fp4jax.train.compose import recipe_rules, tried
from fp4jax.train.config import LoopOptions, ModelOptions, Settings, to_json
from fp4jax.train.data import Corpus, DataOptions, validation_batches
from fp4jax.train.errors import ConfigError, naming_high_precision
from fp4jax.train.model_files import open_model, read_text
from fp4jax.train.naming import parse_recipe
from fp4jax.train.plots import require_matplotlib
from fp4jax.train.rundir import circumstances, write_json
from fp4jax.train.step import Params, make_validation_step

FRESH = "bf16"
"""Recipe under which a fresh model is trained before it is measured."""
LEAST_GAP = 0.001
"""Nats. Of a smaller difference between no layer and all layers quantized, shares would be noise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SensitivityConfig:
    """Quantize one layer at a time, or all but one, and rank the layers by what that does to the validation loss.

    Without a model, a tiny LLaMA is trained first, in high precision, on the novels in the package.
    """

    model: tyro.conf.Positional[str | None] = None
    """A run folder of `fp4jax train`, a Hugging Face folder, packed weights, a .gguf file, or smollm2 (93 MB)."""
    recipe: str = "fp4"
    """What a layer is quantized by, with knobs if need be: fp4:alpha=0.999."""
    leave_one_out: bool = False
    """Quantize all layers but one, and rank them by what leaving it in high precision wins back."""
    by: Literal["layer", "kind", "block"] = "layer"
    """What is quantized at a time: a linear layer of a block, the same layer of all blocks, or a whole block."""
    high_precision: str = "embed|head"
    """Layers that stay in high precision throughout: a regular expression over their paths. '' takes the head too."""
    backend: str | None = None
    """Who computes the recipe's products. By default the best that supports them."""
    text: tuple[Path, ...] = ()
    """UTF-8 files (.xz too), or a prepared folder. By default what the model's run held out, or the novels."""
    seq_len: int | None = None
    """Tokens in a window. By default the run's, 256 for a fresh model, else as many as the model takes up to 1024."""
    batch_size: int = 8
    """Windows in a batch. Recipes with one scale for a tensor see all of a batch."""
    max_tokens: int = 16_384
    """About how many tokens to predict for each layer, spread evenly over the text. 0 takes all of it."""
    step: int | None = None
    """Of a run's checkpoint. By default the newest."""
    train_steps: int = 100
    """Steps that a fresh tiny model is trained for."""
    seed: int = 0
    """Seed of a fresh model."""
    top: int = 12
    """Rows of the table. The JSON file has all."""
    out: Path | None = None
    """Folder for sensitivity.json and sensitivity.png."""

    def resolved(self) -> "SensitivityConfig":
        """These settings, checked.

        Raises:
            ConfigError: a value out of range, an unknown recipe or one that quantizes nothing, a folder that is in use.
        """
        for name in ("seq_len", "batch_size", "step", "train_steps", "top"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be a positive integer")
        if self.max_tokens < 0:
            raise ConfigError(f"max_tokens={self.max_tokens} must be positive, or 0 for the whole text")
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"seed={self.seed} must be at least 0 and below 2**31")
        if not parse_recipe(self.recipe).quantizes:
            raise ConfigError(
                f"recipe {self.recipe!r} quantizes nothing, so no layer is sensitive to it; take fp4, say"
            )
        if self.step is not None and self.model is None:
            raise ConfigError(f"step={self.step} needs the run that has a checkpoint of this step")
        if self.out is not None and self.out.exists() and not (self.out.is_dir() and not any(self.out.iterdir())):
            raise ConfigError(f"out={str(self.out)!r} is in use: give a new or empty folder")
        return self


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """What quantizing one layer did.

    Args:
        layer: its name: `attention.query[3]`, `attention.query`, or `block 3`.
        kind: the path of the layer, "" where a whole block was taken.
        block: its number, None where all blocks were taken.
        loss: validation loss, nats a token.
        change: how much the loss is above that without (one at a time), or how much leaving the layer out wins back.
        error: standard error of `change` over the batches of the validation; NaN for one batch.
    """

    layer: str
    kind: str
    block: int | None
    loss: float
    change: float
    error: float


@dataclasses.dataclass(frozen=True)
class SensitivityResult:
    """The layers, most sensitive first, between the losses of no layer and of all layers quantized.

    `gap_error` is the standard error of the difference of the two over the batches; NaN for one batch.
    """

    model: str
    high_precision_loss: float
    quantized_loss: float
    tokens: int
    layers: tuple[Sensitivity, ...]
    gap_error: float = math.nan


def sensitivity(config: SensitivityConfig, console: Console) -> SensitivityResult:
    """Measure, print a table, and write a folder if asked.

    Every layer has a switch in one compiled program (`fp4jax.telemetry.switchable`), so that a model of L blocks takes
    one compilation and 7L + 2 passes over the same tokens. Differences are paired: the same batches, the same noise.

    Returns:
        The result.

    Raises:
        ConfigError, DataError: settings, model or text that cannot be used.
        CheckpointError: a damaged checkpoint.
        MissingPackageError: an optional package is absent.

    Example:
        >>> result = sensitivity(SensitivityConfig(by="block"), Console())  # doctest: +SKIP
    """
    config = config.resolved()
    if config.out is not None:
        require_matplotlib()
    name, model, params, corpus, seq_len = _fresh(config, console) if config.model is None else _trained(config)
    losses = SwitchedLosses(model, params, corpus, config, seq_len)
    groups = dict(_groups(losses.stacks, config.by))
    none, everything = losses(None), losses([key for keys in groups.values() for key in keys])
    rows = []
    with console.status("") as status:
        for number, (group, keys) in enumerate(groups.items(), start=1):
            status.update(f"{group[0]} ({number} of {len(groups)})")
            chosen = set(keys)
            others = [key for members in groups.values() for key in members if key not in chosen]
            found = losses(others if config.leave_one_out else keys)
            before, after = (found, everything) if config.leave_one_out else (none, found)
            change, error = _paired(before, after, losses.weights)
            rows.append(Sensitivity(*group, losses.mean(found), change, error))
    rows.sort(key=by_change)
    result = SensitivityResult(
        name,
        losses.mean(none),
        losses.mean(everything),
        int(losses.weights.sum()),
        tuple(rows),
        _paired(none, everything, losses.weights)[1],
    )
    console.print(sensitivity_table(result, config))
    if config.out is not None:
        _write(result, config, seq_len)
        console.print(f"written: {config.out / 'sensitivity.json'}, .png", highlight=False, soft_wrap=True)
    return result


class SwitchedLosses:
    """Validation losses of a model with any choice of its layers quantized, from one compiled program.

    Args:
        model: its shape.
        params: its parameters.
        corpus: the text.
        config: recipe, batches.
        seq_len: of a window.

    Raises:
        ConfigError: a recipe or backend that the model cannot follow, or no layer to quantize.
        DataError: no text.

    Attributes:
        stacks: for each layer path, how many blocks it stands for; None for one alone.
        weights: float64 [batches], tokens predicted in each.
    """

    def __init__(self, model: LlamaConfig, params: Params, corpus: Corpus, config: SensitivityConfig, seq_len: int):
        rules = recipe_rules(parse_recipe(config.recipe), config.high_precision)
        with naming_high_precision(config.high_precision):
            architecture = tried(
                lambda rngs: telemetry.switchable(Llama(model, rules=rules, backend=config.backend, rngs=rngs)),
                config.backend,
            )
        state = jax.jit(lambda: architecture.init(0)[1])()  # compiled, so that parameters are not drawn
        self._state = dict(nnx.traversals.flatten_mapping(state))
        self._switches = {path: leaf for path, leaf in self._state.items() if path[-1] == "on"}
        self.stacks = {_layer(path): (leaf.shape[0] if leaf.shape else None) for path, leaf in self._switches.items()}
        limit = max(1, round(config.max_tokens / (seq_len * config.batch_size))) if config.max_tokens else None
        self._params = jax.device_put(params)
        self._batches = [jax.device_put(b) for b in validation_batches(corpus, seq_len, config.batch_size, limit=limit)]
        self._step = jax.jit(make_validation_step(architecture, len(corpus.sources)))
        self.weights = np.array([float(np.sum(batch["weights"])) for batch in self._batches])

    def __call__(self, keys: Sequence[tuple[str, int | None]] | None) -> np.ndarray:
        """Summed loss of each batch, float64 [batches], with these (path, block) quantized and no others."""
        wanted = set(keys or ())
        state = dict(self._state)
        for path, leaf in self._switches.items():
            layer = _layer(path)
            blocks = [None] if self.stacks[layer] is None else range(leaf.shape[0])
            state[path] = np.array([(layer, block) in wanted for block in blocks]).reshape(leaf.shape)
        noise = nnx.traversals.unflatten_mapping(state)
        sums = jax.device_get([self._step(self._params, noise, batch)["loss"] for batch in self._batches])
        return np.array([np.sum(part, dtype=np.float64) for part in sums])

    def mean(self, sums: np.ndarray) -> float:
        """Loss in nats a token."""
        return float(sums.sum() / self.weights.sum())


def by_change(row: Sensitivity) -> float:
    """Where a layer ranks: the largest change first, and before it NaN, a loss that is not finite."""
    return -math.inf if math.isnan(row.change) else -row.change


def sensitivity_table(result: SensitivityResult, config: SensitivityConfig) -> Table:
    """The most sensitive layers: loss, change, its standard error, and its share of what the whole recipe costs.

    There are no shares where the whole recipe costs nothing that can be told from noise; the caption then says so.
    """
    gap = result.quantized_loss - result.high_precision_loss
    no_shares = _no_shares(gap, result.gap_error)
    what = "all layers but one quantized" if config.leave_one_out else "one layer quantized at a time"
    title = f"{config.recipe}, {what}: {result.model}, {result.tokens:,} tokens"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("", justify="right")
    table.add_column(config.by, style="bold", no_wrap=True)
    change = "won back (nats)" if config.leave_one_out else "increase (nats)"
    for header in ("loss (nats)", change, *([] if no_shares else ["share of the gap (%)"])):
        table.add_column(header, justify="right")
    shown = result.layers[: config.top]
    for rank, row in enumerate(shown, start=1):
        error = "" if math.isnan(row.error) else f" ± {row.error:.4f}"
        cells = [f"{rank}", row.layer, f"{row.loss:.4f}", f"{row.change:+.4f}{error}"]
        if not no_shares:
            cells.append(f"{100 * row.change / gap:.1f}" if math.isfinite(row.change / gap) else "–")
        table.add_row(*cells)
    left = len(result.layers) - config.top
    gap_error = "" if math.isnan(result.gap_error) else f" ± {result.gap_error:.4f}"
    sentences = [
        f"{left} less sensitive not shown." if left > 0 else "",
        f"No layer quantized: {result.high_precision_loss:.4f}.",
        f"All: {result.quantized_loss:.4f}, a gap of {gap:+.4f}{gap_error}.",
        no_shares,
        "± is the standard error over batches." if gap_error or any(not math.isnan(row.error) for row in shown) else "",
    ]
    table.caption = " ".join(filter(None, sentences))
    table.caption_justify = "left"
    return table


def _no_shares(gap: float, error: float) -> str:
    """Why changes are not shown as shares of the gap; "" if they are."""
    if not math.isfinite(gap):
        return ""
    if gap <= 0:
        return "The gap is not positive, so that there are no shares of it."
    if gap < LEAST_GAP:
        return f"The gap is below {LEAST_GAP} nats, too small for shares of it."
    if gap < 2 * error:
        return "The gap is less than two standard errors, too uncertain for shares of it."
    return ""


def _trained(config: SensitivityConfig) -> tuple[str, LlamaConfig, Params, Corpus, int]:
    """The model that was named."""
    assert config.model is not None
    text = DataOptions(text=config.text) if config.text else None
    model = open_model(config.model, step=config.step)
    corpus = read_text(model, text)
    seq_len = config.seq_len or model.seq_len
    if seq_len > model.config.max_seq_len:
        raise ConfigError(f"seq_len={seq_len} is more than the {model.config.max_seq_len} that {model.name!r} takes")
    return model.name, model.config, model.params, corpus, seq_len


def _fresh(config: SensitivityConfig, console: Console) -> tuple[str, LlamaConfig, Params, Corpus, int]:
    """A tiny model, trained in high precision."""
    loop = LoopOptions(steps=config.train_steps, seq_len=config.seq_len)
    settings = Settings(model=ModelOptions(), data=DataOptions(text=config.text), loop=loop).resolved()
    text = Text.load(settings.data)
    arm = Arm(settings, FRESH, (config.seed,), text)
    console.print(f"training a tiny LLaMA in {FRESH} for {config.train_steps} steps", highlight=False)
    state, batches = arm.init(), arm.batches(0)
    try:
        for _ in range(config.train_steps):
            state, _ = arm.train_step(state, next(batches))
    finally:
        batches.close()
    return f"tiny, {config.train_steps} steps", arm.model, state.params, text.split.validation, arm.plan.seq_len


def _groups(
    stacks: dict[str, int | None], by: str
) -> Iterator[tuple[tuple[str, str, int | None], list[tuple[str, int | None]]]]:
    """((name, kind, block), the (path, block) that are quantized together) for everything that is measured."""
    every = [(path, block) for path, n in stacks.items() for block in ([None] if n is None else range(n))]
    if by == "layer":
        for path, block in every:
            kind = path.removeprefix("layers.")
            yield (kind if block is None else f"{kind}[{block}]", kind, block), [(path, block)]
    elif by == "kind":
        for path in stacks:
            kind = path.removeprefix("layers.")
            yield (kind, kind, None), [key for key in every if key[0] == path]
    else:
        for block in dict.fromkeys(block for _, block in every):
            name = "outside the blocks" if block is None else f"block {block}"
            yield (name, "", block), [key for key in every if key[1] == block]


def _layer(path: tuple[Any, ...]) -> str:
    """The path of the layer whose switch stands at `path`."""
    return re.sub(r"\.(dot_general|einsum_op)(?=\.|$)", "", ".".join(map(str, path[:-1])))


def _paired(before: np.ndarray, after: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Weighted mean of the differences by batch, nats a token, and its standard error."""
    mean = float((after - before).sum() / weights.sum())
    if len(weights) < 2:
        return mean, math.nan
    spread = (after - before) / weights - mean
    shares = weights / weights.sum()
    return mean, float(np.sqrt(np.sum(np.square(shares * spread)) * len(weights) / (len(weights) - 1)))


def _write(result: SensitivityResult, config: SensitivityConfig, seq_len: int) -> None:
    assert config.out is not None
    config.out.mkdir(parents=True, exist_ok=True)
    record = {
        **circumstances(),
        "seq_len": seq_len,
        **{name: _finite(value) for name, value in dataclasses.asdict(result).items()},
        "settings": to_json(config),
    }
    write_json(config.out / "sensitivity.json", record)
    kinds = list(dict.fromkeys(row.kind for row in sorted(result.layers, key=lambda row: row.layer)))
    grid = np.full((len(kinds), 1 + max(row.block or 0 for row in result.layers)), np.nan)
    for row in result.layers:
        grid[kinds.index(row.kind), row.block or 0] = 1000 * row.change
    what = "loss won back by leaving it out" if config.leave_one_out else "loss added by quantizing it"
    draw_grids(
        config.out / "sensitivity.png",
        [kind or "all layers" for kind in kinds],
        {f"by {config.by}": grid},
        label=f"{what} (nats/1000)",
        title=f"{config.recipe} on {result.model}, {datetime.date.today()}",
        high_is_dark=True,
        form=lambda value: f"{value:+.2f}",
    )


def _finite(value: Any) -> Any:
    """A value for JSON: null where a number is not finite."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
