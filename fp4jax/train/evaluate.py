"""`fp4jax eval`: perplexity and bits per byte of a trained model under recipes, whole and by source of the text."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from fp4jax.models import Llama, LlamaConfig
from fp4jax.nn import Rules
from fp4jax.recipes import RECIPES
from fp4jax.train.compose import recipe_rules, tried
from fp4jax.train.config import to_json
from fp4jax.train.data import Corpus, DataOptions, DocumentRule, validation_batches
from fp4jax.train.errors import ConfigError, naming_high_precision
from fp4jax.train.model_files import open_model, read_text
from fp4jax.train.naming import parse_recipe
from fp4jax.train.rundir import circumstances, write_json
from fp4jax.train.step import Params, make_validation_step

ALL = "all"
"""What --recipes takes for every recipe there is."""
WIDTH = 100
"""Columns of a table, as `fp4jax.cli` has it where output is no terminal."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Measure a trained model under recipes: nats a token, perplexity, bits a byte, whole and by source of the text.

    The text is cut into windows of seq_len tokens, and every token is predicted from those before it in its window.
    """

    model: tyro.conf.Positional[str]
    """A run folder of `fp4jax train`, a Hugging Face folder, packed weights, a .gguf file, or smollm2 (93 MB)."""
    recipes: tuple[str, ...] = ("bf16", "fp4", "fp4_direct")
    """Recipes of the linear layers, with knobs if need be: fp4:alpha=0.999. `all` takes all. Gaps are to the first."""
    text: tuple[Path, ...] = ()
    """UTF-8 files (.xz too), each a source, or a prepared folder. By default what a run held out, or the novels."""
    tokenizer: Path | None = None
    """A tokenizer.json in place of the model's own."""
    documents: DocumentRule = dataclasses.field(default_factory=DocumentRule)
    """How a text file is cut into documents."""
    seq_len: int | None = None
    """Tokens in a window. By default those of the run, or as many as the model takes, up to 1024."""
    batch_size: int = 4
    """Windows in a batch. Recipes with one scale for a tensor see all of a batch."""
    max_tokens: int = 16_384
    """About how many tokens to predict, spread evenly over the text. 0 takes all of it."""
    step: int | None = None
    """Of a run's checkpoint. By default the newest."""
    high_precision: str = "embed|head"
    """Layers to leave in high precision: a regular expression over their paths. '' quantizes all, the head too."""
    backend: str | None = None
    """Who computes the recipes' products. By default the best that supports them."""
    dtype: Literal["bfloat16", "float32"] | None = None
    """Dtype of the activations. By default that of the run, or bfloat16."""
    out: Path | None = None
    """A JSON file for the result."""

    def resolved(self) -> "EvalConfig":
        """These settings checked, with the names of recipes in place of `all`.

        Raises:
            ConfigError: a value out of range, an unknown recipe, or a file that is there already.
        """
        for name in ("batch_size", "seq_len", "step"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be a positive integer")
        if self.max_tokens < 0:
            raise ConfigError(f"max_tokens={self.max_tokens} must be positive, or 0 for the whole text")
        recipes = tuple(RECIPES) if self.recipes == (ALL,) else self.recipes
        if not recipes or len(set(recipes)) != len(recipes):
            raise ConfigError(f"recipes={recipes} must name at least one, and none twice")
        for recipe in recipes:
            parse_recipe(recipe)
        if self.out is not None and (self.out.exists() or not self.out.parent.is_dir()):
            wrong = "is there already" if self.out.exists() else "is in no folder that exists"
            raise ConfigError(f"out={str(self.out)!r} {wrong}: give a new file")
        return dataclasses.replace(self, recipes=recipes)


@dataclasses.dataclass(frozen=True)
class Score:
    """What a recipe came to on one text.

    Args:
        loss: nats a token.
        tokens: how many were predicted.
        bytes_per_token: UTF-8 bytes of text for each token.
    """

    loss: float
    tokens: int
    bytes_per_token: float

    @property
    def perplexity(self) -> float:
        """e^loss; infinite where a float cannot hold it."""
        return math.inf if self.loss > 700 else math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """loss / (ln 2 · bytes_per_token): comparable across tokenizers."""
        return self.loss / math.log(2) / self.bytes_per_token


type Scores = dict[str, Score]
"""A score for each source, and for "all"."""


def evaluate(config: EvalConfig, console: Console) -> dict[str, Scores]:
    """Measure the model that `config` names, print tables, and write JSON if asked.

    Returns:
        For each recipe its scores.

    Raises:
        ConfigError, DataError: settings, model or text that cannot be used.
        CheckpointError: a damaged checkpoint.
        MissingPackageError: an optional package is absent.
    """
    config = config.resolved()
    given = config.text or config.tokenizer
    text = DataOptions(text=config.text, tokenizer=config.tokenizer, documents=config.documents) if given else None
    model = open_model(config.model, step=config.step, dtype=config.dtype)
    corpus = read_text(model, text)
    seq_len = config.seq_len or model.seq_len
    if seq_len > model.config.max_seq_len:
        raise ConfigError(f"seq_len={seq_len} is more than the {model.config.max_seq_len} that {model.name!r} takes")
    params = jax.device_put(model.params)
    results: dict[str, Scores] = {}
    for name in config.recipes:
        rules = recipe_rules(parse_recipe(name), config.high_precision)
        with naming_high_precision(config.high_precision):
            results[name] = score(
                model.config, params, rules, corpus, seq_len=seq_len, batch_size=config.batch_size,
                max_tokens=config.max_tokens, backend=config.backend,
            )  # fmt: skip
        whole = results[name]["all"]
        console.print(f"{name}: {whole.loss:.4f} nats a token", highlight=False)
    for table in score_tables(results, model.name):
        console.print(table)
    if config.out is not None:
        write_json(config.out, to_record(results, config, seq_len))
        console.print(f"written: {config.out}", highlight=False, soft_wrap=True)
    return results


def score(
    config: LlamaConfig,
    params: Params,
    rules: Rules,
    corpus: Corpus,
    *,
    seq_len: int,
    batch_size: int,
    max_tokens: int = 0,
    backend: str | None = None,
) -> Scores:
    """Mean negative log-likelihood of a text under a model.

        loss = −1/N Σ_i log p(t_i | those before t_i in its window)

    Windows do not overlap. The first token of each source is not predicted, those that end documents are.

    Args:
        config: the model's shape.
        params: its parameters.
        rules: which linear layer follows which recipe. Stochastic ones draw the noise of seed 0 and step 0.
        corpus: the text.
        seq_len, batch_size: of a batch.
        max_tokens: about how many tokens to predict, spread evenly over the windows of the text; 0 for all.
        backend: of the recipes.

    Returns:
        A score for each source that was reached, and for "all".

    Raises:
        ConfigError: rules or a backend that this model cannot follow.
        DataError: no text.
    """
    architecture = tried(lambda rngs: Llama(config, rules=rules, backend=backend, rngs=rngs), backend)
    limit = max(1, round(max_tokens / (seq_len * batch_size))) if max_tokens else None
    batches = validation_batches(corpus, seq_len, batch_size, limit=limit)
    noise = jax.jit(lambda: architecture.init(0)[1])()  # compiled, so that parameters are not drawn
    step = jax.jit(make_validation_step(architecture, len(corpus.sources)))
    sums = jax.device_get([step(params, noise, batch) for batch in batches])
    loss, tokens = (np.sum([entry[name] for entry in sums], axis=0, dtype=np.float64) for name in ("loss", "weight"))
    size = np.array([s.num_bytes / s.num_tokens if s.num_tokens else 0.0 for s in corpus.sources])
    scores = {
        name: Score(float(loss[i] / tokens[i]), int(tokens[i]), float(size[i]))
        for i, name in enumerate(corpus.source_names)
        if tokens[i]
    }
    whole = tokens.sum()
    return {"all": Score(float(loss.sum() / whole), int(whole), float(tokens @ size / whole)), **scores}


def score_tables(results: Mapping[str, Scores], model: str) -> list[Table]:
    """The whole text by recipe; if it has several sources, also bits a byte by source, in tables that fit the page."""
    first = next(iter(results))
    whole = results[first]["all"]
    columns = ["loss (nats)", "perplexity", "bits/byte", f"gap to {first} (%)"]
    table = _table(f"{model} on {whole.tokens:,} tokens", "recipe", columns)
    for name, scores in results.items():
        s = scores["all"]
        gap = "–" if name == first else f"{100 * (s.loss / whole.loss - 1):+.2f}"
        table.add_row(name, f"{s.loss:.4f}", f"{s.perplexity:,.2f}", f"{s.bits_per_byte:.4f}", gap)
    sources = [name for name in results[first] if name != "all"]
    if len(sources) < 2:
        return [table]
    tables = [table]
    names, room = list(results), WIDTH - max(len(source) for source in sources) - len("tokens") - 7
    while names:
        # As many recipes as fit, two borders and two spaces each, and at least one.
        ends = itertools.accumulate(max(len(name), len("1.0000")) + 3 for name in names)
        fit = max(1, sum(end <= room for end in ends))
        shown, names = names[:fit], names[fit:]
        by_source = _table("Bits a byte by source", "source", ["tokens", *shown])
        for source in sources:
            cells = [f"{results[name][source].bits_per_byte:.4f}" for name in shown]
            by_source.add_row(source, f"{results[first][source].tokens:,}", *cells)
        tables.append(by_source)
    return tables


def to_record(results: Mapping[str, Scores], config: EvalConfig, seq_len: int) -> dict[str, Any]:
    """What the JSON file holds: scores, settings, and where they come from. What is not finite is null."""

    def number(value: float) -> float | None:
        return value if math.isfinite(value) else None

    def record(s: Score) -> dict[str, Any]:
        return {
            "loss": number(s.loss),
            "perplexity": number(s.perplexity),
            "bits_per_byte": number(s.bits_per_byte),
            "tokens": s.tokens,
            "bytes_per_token": s.bytes_per_token,
        }

    return {
        **circumstances(),
        "recipes": {name: {source: record(s) for source, s in scores.items()} for name, scores in results.items()},
        "seq_len": seq_len,
        "settings": to_json(config),
    }


def _table(title: str, first: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(first, style="bold", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table
