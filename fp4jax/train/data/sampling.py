"""Batches as a pure function of (seed, step), and a fixed walk over the validation split."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np

from fp4jax.train.data.corpus import Corpus
from fp4jax.train.data.text import DataError
from fp4jax.train.errors import require

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class _Shard:
    """Which rows of a batch belong to this process: contiguous blocks, in the order of the processes."""

    batch_size: int
    process_index: int
    process_count: int

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.process_count < 1 or self.batch_size % self.process_count:
            raise ValueError(
                f"batch_size={self.batch_size} must be a positive multiple of process_count={self.process_count}"
            )
        if not 0 <= self.process_index < self.process_count:
            raise ValueError(f"process_index={self.process_index} must be in [0, {self.process_count})")

    def rows(self, batch: int) -> range:
        """Numbers of this process's rows, counted from the first row of batch 0."""
        size = self.batch_size // self.process_count
        start = batch * self.batch_size + self.process_index * size
        return range(start, start + size)


@dataclasses.dataclass(frozen=True, eq=False)
class Batches:
    """Training batches: row r of step t is window `order[t · batch_size + r]` of the corpus.

    Window i is tokens [i · seq_len, (i + 1) · seq_len] of the stream: inputs and, one further, targets, so that each
    token of the stream is predicted once an epoch (what is left at its end and fills no window is not). `order` runs
    through all windows, in a fresh shuffle each epoch, for ever; an epoch may end within a batch. Windows cross
    documents, which `end_of_document` tokens separate. Nothing here has state: to resume, ask for the next step.

    Example:
        >>> batches = Batches(embedded().split().train, seq_len=128, batch_size=8, seed=0)
        >>> batches.batch(1000)["tokens"].shape
        (8, 129)

    Raises:
        ValueError: sizes, seed or process out of range.
        DataError: fewer tokens than one window.
        MissingPackageError: the package `grain` is not installed.
    """

    corpus: Corpus
    seq_len: int
    batch_size: int
    """Rows over all processes."""
    seed: int
    """Any integer from 0."""
    process_index: int = 0
    process_count: int = 1
    """The processes' batches, one after another, are the batch of a single process."""

    def __post_init__(self) -> None:
        """Refuse what cannot be sampled before the first step."""
        _check_seq_len(self.seq_len)
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative")
        if self.num_windows < 1:
            raise DataError(
                f"the text to train on has {self.corpus.num_tokens} tokens, and one sequence takes seq_len + 1 ="
                f" {self.seq_len + 1}: give more text or a smaller seq_len"
            )
        _ = self._shard, self._windows

    @property
    def num_windows(self) -> int:
        """Windows in an epoch."""
        return max(0, self.corpus.num_tokens - 1) // self.seq_len

    def batch(self, step: int) -> Batch:
        """Rows of this process at a step: {"tokens": int32 [batch_size / process_count, seq_len + 1]}.

        Raises:
            ValueError: a negative step.
        """
        if step < 0:
            raise ValueError(f"step={step} must not be negative")
        return {"tokens": np.stack([self._windows[row] for row in self._shard.rows(step)])}

    def prefetch(self, step: int = 0, *, buffer_size: int = 2) -> Iterator[Batch]:
        """Iterate over `batch(step), batch(step + 1), …`, prepared by a background thread `buffer_size` steps ahead.

        The iterator has `close()`. An error in the thread is raised by `next`.
        """
        if step < 0 or buffer_size < 1:
            raise ValueError(f"step={step} must not be negative, and buffer_size={buffer_size} must be positive")
        grain = require("grain", "sampling batches")
        # A thread, not grain's worker processes: reading a memory map costs next to nothing, and those would need
        # absl's flags parsed. One, since more would only change which step is ready first.
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=buffer_size)
        return iter(grain.MapDataset.range(step, sys.maxsize).map(self.batch).to_iter_dataset(options))

    @functools.cached_property
    def _shard(self) -> _Shard:
        return _Shard(self.batch_size, self.process_index, self.process_count)

    @functools.cached_property
    def _windows(self) -> Sequence[np.ndarray]:
        grain = require("grain", "sampling batches")
        # grain shuffles epoch e with seed + e, so seed 1 would replay seed 0 from its second epoch on. SeedSequence
        # (whose output NumPy keeps stable) spreads neighboring seeds over the 32 bits that grain takes.
        seed = int(np.random.SeedSequence(self.seed).generate_state(1, np.uint32)[0])
        source = cast(Any, _Windows(self.corpus, self.seq_len, self.num_windows))
        return grain.MapDataset.source(source).shuffle(seed=seed).repeat()


@dataclasses.dataclass(frozen=True, eq=False)
class _Windows:
    """Random access to the windows of a stream."""

    corpus: Corpus
    seq_len: int
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> np.ndarray:
        return self.corpus.read(index * self.seq_len, self.seq_len + 1)


def validation_batches(
    corpus: Corpus,
    seq_len: int,
    batch_size: int,
    *,
    limit: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> Sequence[Batch]:
    """Batches that walk a corpus once in order, the same at every call: no randomness, nothing counted twice.

    Each source is cut into windows by itself, its last one short. The mean loss is Σ loss·weights / Σ weights over
    all batches, and that of source s takes the rows where `source == s`. Every token but the first of each source is
    a target with weight 1, exactly once.

    Args:
        corpus: usually `split.validation`.
        seq_len: targets in a row.
        batch_size: rows over all processes.
        limit: at most so many batches, of windows spread evenly over the corpus (and so over its sources).
        process_index: this process.
        process_count: processes; their rows, one after another, are the rows of a single process.

    Returns:
        A sequence of {"tokens": int32 [b, seq_len + 1], "weights": float32 [b, seq_len], "source": int32 [b]} with
        b = batch_size / process_count always. `source` indexes `corpus.source_names`. What fills short windows and
        the last batch is `end_of_document` with weight 0.

    Raises:
        ValueError: sizes, limit or process out of range.
        DataError: the corpus has no tokens.

    Example:
        >>> batches = validation_batches(embedded().split().validation, seq_len=128, batch_size=8, limit=4)
        >>> len(batches), batches[0]["weights"].shape
        (4, (8, 128))
    """
    _check_seq_len(seq_len)
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} must be positive, or None for the whole split")
    shard = _Shard(batch_size, process_index, process_count)
    if not corpus.num_tokens:
        raise DataError("the validation split is empty: give a validation_fraction above 0")
    rows = np.concatenate(
        [
            np.stack([np.full(len(starts), index), starts], axis=1)
            for index, source in enumerate(corpus.sources)
            for starts in [np.arange(0, source.num_tokens - 1, seq_len)]
        ]
    )
    if limit is not None and limit * batch_size < len(rows):
        rows = rows[np.arange(limit * batch_size) * len(rows) // (limit * batch_size)]
    return _ValidationBatches(corpus, seq_len, shard, rows)


@dataclasses.dataclass(frozen=True, eq=False)
class _ValidationBatches(Sequence[Batch]):
    corpus: Corpus
    seq_len: int
    shard: _Shard
    rows: np.ndarray
    """[rows, 2] int64: source, and where the row starts in that source's stream."""

    def __len__(self) -> int:
        return -(-len(self.rows) // self.shard.batch_size)

    def __getitem__(self, index: int) -> Batch:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= index < len(self):
            raise IndexError(f"validation batch {index} of {len(self)}")
        wanted = self.shard.rows(index)
        batch = {
            "tokens": np.full((len(wanted), self.seq_len + 1), self.corpus.tokenizer.end_of_document, np.int32),
            "weights": np.zeros((len(wanted), self.seq_len), np.float32),
            "source": np.zeros(len(wanted), np.int32),
        }
        for place, row in enumerate(wanted):
            if row < len(self.rows):
                source, start = (int(value) for value in self.rows[row])
                stream = self._streams[source]
                tokens = stream.read(start, min(self.seq_len + 1, stream.num_tokens - start))
                batch["tokens"][place, : len(tokens)] = tokens
                batch["weights"][place, : len(tokens) - 1] = 1
                batch["source"][place] = source
        return batch

    @functools.cached_property
    def _streams(self) -> list[Corpus]:
        return [self.corpus.only(source) for source in range(len(self.corpus.sources))]


def _check_seq_len(seq_len: int) -> None:
    if seq_len < 1:
        raise ValueError(f"seq_len={seq_len} must be positive")
