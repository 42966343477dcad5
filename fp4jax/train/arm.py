"""An arm of an experiment: one recipe with one seed, or several side by side, compiled and ready to train."""

import copy
import dataclasses
import functools
from collections.abc import Generator, Mapping
from typing import Any, Self

import jax
import numpy as np

from fp4jax.models import count_parameters
from fp4jax.train.compose import Parts
from fp4jax.train.config import DataOptions, Settings
from fp4jax.train.data import Batches, ByteTokenizer, Split, load, validation_batches
from fp4jax.train.errors import naming_high_precision
from fp4jax.train.optimizer import make_optimizer
from fp4jax.train.placement import Placement, SingleDevice
from fp4jax.train.step import Metrics, Params, TrainState, make_validation_step

DETERMINISTIC = {"xla_allow_excess_precision": False, "xla_gpu_deterministic_ops": True}
"""XLA's flags for `--deterministic`, given to each program as it is compiled, so that the environment plays no part.

Without excess precision a BF16 program rounds where it says (design: scan = loop, remat = none); deterministic ops
exclude atomics and, since it may choose another kernel the next time, autotuning.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """The text of a run: its two splits, and what the record says of it."""

    split: Split
    fingerprint: str

    @classmethod
    def load(cls, options: DataOptions) -> Self:
        """Read the corpus and hold out its validation split.

        Raises:
            DataError: unusable text.
        """
        corpus = load(options)
        return cls(corpus.split(options.validation_fraction), corpus.fingerprint)

    @property
    def vocab_size(self) -> int:
        """Tokens a model must know."""
        return self.split.train.vocab_size

    @property
    def token(self) -> str:
        """What a token is called on an axis."""
        return "byte" if isinstance(self.split.train.tokenizer, ByteTokenizer) else "token"

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources, in the order of their numbers."""
        return tuple(self.split.validation.source_names)


@dataclasses.dataclass(frozen=True)
class Validation:
    """Losses over the validation split, for each of S seeds.

    Args:
        loss: [S] float64, nats a token.
        by_source: for each source that was reached, [S].
        tokens: how many were predicted.
    """

    loss: np.ndarray
    by_source: Mapping[str, np.ndarray]
    tokens: int


class Arm:
    """One recipe of an experiment: its compiled functions and its data.

    Args:
        settings: resolved.
        recipe: what `--recipe` takes; also the arm's label.
        seeds: one trains alone. Several train side by side: every array has a leading axis [S].
        text: from `Text.load`.
        placement: where arrays live; by default the first device. Create and use the arm inside its `active()`.

    Raises:
        ConfigError: settings that do not fit together.
        DataError: too little text.
    """

    def __init__(
        self,
        settings: Settings,
        recipe: str,
        seeds: tuple[int, ...],
        text: Text,
        placement: Placement | None = None,
    ):
        self.label, self.seeds, self.text = recipe, seeds, text
        self.plan = plan = settings.plan
        self.placement = placement or SingleDevice()
        with naming_high_precision(settings.quantization.high_precision):
            parts = Parts.compose(settings, recipe, text.vocab_size, self.placement)
        self.recipe, self.model, self.architecture = parts.recipe, parts.model, parts.architecture
        init, step = parts.init, parts.step
        validate = make_validation_step(self.architecture, len(text.sources))
        if len(seeds) > 1:
            init, step, validate = jax.vmap(init), jax.vmap(step), jax.vmap(validate, in_axes=(0, 0, None))
        compile_ = self.compiled = functools.partial(
            jax.jit, compiler_options=dict(DETERMINISTIC) if plan.deterministic else None
        )
        """`jax.jit` with the options of the run."""
        self.abstract_state: TrainState = self.placement.state(jax.eval_shape(init, self._seeds()))
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state)
        self._init = compile_(init, out_shardings=shardings)
        optimizer = make_optimizer(settings.optimizer, plan.steps)

        def init_with(seed: jax.Array, params: Params) -> TrainState:
            drawn = parts.init(seed)  # the weights among it, for which nobody asks, are not drawn once compiled
            return dataclasses.replace(drawn, params=params, opt_state=optimizer.init(params))

        self._init_with = compile_(init_with, out_shardings=shardings)
        # jax_debug_nans runs a step again, one operation at a time, and needs its arguments for it.
        self.train_step = compile_(step, donate_argnums=() if jax.config.jax_debug_nans else 0)
        self._validate = compile_(validate)
        self._processes = {
            "process_index": self.placement.process_index,
            "process_count": self.placement.process_count,
        }
        self._batches = self._sampled(seeds)
        self._validation = validation_batches(
            text.split.validation,
            plan.seq_len,
            plan.batch_size // plan.accumulate,  # memory that holds a microbatch need not hold a batch
            limit=plan.eval_batches * plan.accumulate or None,
            **self._processes,
        )

    def reseeded(self, seeds: tuple[int, ...]) -> Self:
        """The same compiled functions with as many other seeds.

        Raises:
            ValueError: more seeds, or fewer.
        """
        if len(seeds) != len(self.seeds):
            raise ValueError(f"seeds={seeds} must be as many as the arm's own, {self.seeds}")
        other = copy.copy(self)
        other.seeds, other._batches = seeds, self._sampled(seeds)
        return other

    @property
    def num_parameters(self) -> int:
        """Parameters of the model."""
        return count_parameters(self.model)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that a step predicts, over all seeds."""
        return self.plan.batch_size * self.plan.seq_len * len(self.seeds)

    def init(self, params: Params | None = None) -> TrainState:
        """The state at step 0.

        Args:
            params: host arrays, to start from in place of drawn weights; of one seed.
        """
        if params is None:
            return self._init(self._seeds())

        def put(like: Any, host: np.ndarray) -> jax.Array:
            return jax.make_array_from_callback(like.shape, like.sharding, lambda part: host[part])

        return self._init_with(self._seeds(), jax.tree.map(put, self.abstract_state.params, dict(params)))

    def batches(self, start: int) -> Generator[jax.Array]:
        """The tokens of step `start`, `start + 1`, …, read ahead by a thread: [b, t + 1], or [S, b, t + 1]."""
        readers = [batches.prefetch(start) for batches in self._batches]
        try:
            while True:
                rows = [next(reader)["tokens"] for reader in readers]
                yield self.placement.batch(rows[0] if len(rows) == 1 else np.stack(rows), seeds=len(rows))
        finally:
            for reader in readers:
                reader.close()  # pyright: ignore[reportAttributeAccessIssue]  (promised by prefetch's docstring)

    def validate(self, state: TrainState) -> Validation:
        """Mean losses over the validation batches. All are enqueued before the first is waited for."""
        sums = [self._validate(state.params, state.noise, self.placement.batch(b)) for b in self._validation]
        loss, weight = (self._total(sums, name) for name in ("loss", "weight"))
        reached = [(i, name) for i, name in enumerate(self.text.sources) if weight[0, i] > 0]
        return Validation(
            loss=loss.sum(axis=1) / weight.sum(axis=1),
            by_source={name: loss[:, i] / weight[:, i] for i, name in reached},
            tokens=int(weight[0].sum()),
        )

    def _total(self, sums: list[Metrics], name: str) -> np.ndarray:
        """Sum over batches, [S, sources] float64."""
        arrays = jax.device_get([entry[name] for entry in sums])
        return np.sum(arrays, axis=0, dtype=np.float64).reshape(len(self.seeds), -1)

    def _sampled(self, seeds: tuple[int, ...]) -> list[Batches]:
        plan, train = self.plan, self.text.split.train
        return [Batches(train, plan.seq_len, plan.batch_size, seed, **self._processes) for seed in seeds]

    def _seeds(self) -> np.ndarray:
        # NumPy's, which every process of a run may pass to a program of them all.
        seeds = np.asarray(self.seeds, np.uint32)
        return seeds if len(self.seeds) > 1 else seeds[0]
