"""The tokens a model trains on: sources, the documents in them, and a split that holds documents out whole."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from fp4jax.train.data.text import DataError
from fp4jax.train.data.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """Documents that come from one place, such as a file: spans of one array of tokens.

    A selection of documents (a split) shares the array with the whole, so neither copies a memory-mapped file.
    """

    name: str
    tokens: np.ndarray
    """[t] uint8 or uint16, in memory or a memory map."""
    spans: np.ndarray
    """[documents, 2] int64: where each document starts and ends in `tokens`, ascending, without overlap."""
    document_bytes: np.ndarray
    """[documents] int64: UTF-8 bytes of the text of each document."""
    sha256: str
    """Of all of `tokens`, little-endian, whichever documents are selected."""

    @classmethod
    def from_documents(cls, name: str, documents: Iterable[tuple[np.ndarray, int]]) -> Source:
        """Join (tokens, bytes) of documents, as `Tokenizer.encode` yields them, in memory."""
        parts, sizes = zip(*documents)
        tokens = np.concatenate(parts)
        spans = spans_of_lengths(np.array([len(part) for part in parts], np.int64))
        return cls(name, tokens, spans, np.array(sizes, np.int64), sha256_of_tokens(tokens))

    @property
    def num_documents(self) -> int:
        """Documents."""
        return len(self.spans)

    @property
    def num_tokens(self) -> int:
        """Tokens, those that close the documents included."""
        return int((self.spans[:, 1] - self.spans[:, 0]).sum())

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the text."""
        return int(self.document_bytes.sum())

    def select(self, chosen: np.ndarray) -> Source:
        """The documents where `chosen` [documents] is true."""
        return dataclasses.replace(self, spans=self.spans[chosen], document_bytes=self.document_bytes[chosen])


class Split(NamedTuple):
    """Two selections of the documents of one corpus that share none; both list every source, in the same order."""

    train: Corpus
    validation: Corpus


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """One stream of tokens: the documents of all sources one after another, each closed by `end_of_document`.

    The embedded text, `--text` files and prepared folders are all of this type, and so are the parts of a split.

    Example:
        >>> corpus = embedded()
        >>> train, validation = corpus.split(0.05)
        >>> corpus.tokenizer.decode(corpus.read(0, 20))
        'CHAPTER 1. Loomings.'
    """

    sources: tuple[Source, ...]
    tokenizer: Tokenizer

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return self.tokenizer.vocab_size

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names by source id."""
        return tuple(source.name for source in self.sources)

    @property
    def num_documents(self) -> int:
        """Documents of all sources."""
        return sum(source.num_documents for source in self.sources)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sources: the length of the stream."""
        return int(self._runs.offsets[-1])

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the text of all sources."""
        return sum(source.num_bytes for source in self.sources)

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text for each token: loss / (ln 2 · this) is bits per byte, comparable across tokenizers.

        Raises:
            DataError: no tokens.
        """
        if not self.num_tokens:
            raise DataError("bytes_per_token of a corpus without tokens")
        return self.num_bytes / self.num_tokens

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of every token and its place: equal fingerprints, seeds and sizes give equal batches.

        Keep it beside a checkpoint, and refuse to resume on another.
        """
        parts = [
            (source.name, source.sha256, hashlib.sha256(source.spans.astype("<i8").tobytes()).hexdigest())
            for source in self.sources
        ]
        described = json.dumps([self.vocab_size, self.tokenizer.end_of_document, parts])
        return hashlib.sha256(described.encode()).hexdigest()

    def read(self, offset: int, length: int) -> np.ndarray:
        """Tokens [offset, offset + length) of the stream, int32 [length].

        Raises:
            IndexError: outside the stream.
        """
        runs = self._runs
        if offset < 0 or length < 0 or offset + length > runs.offsets[-1]:
            raise IndexError(f"tokens [{offset}, {offset + length}) of a corpus of {runs.offsets[-1]}")
        out = np.empty(length, np.int32)
        run = int(np.searchsorted(runs.offsets, offset, side="right")) - 1
        filled = 0
        while filled < length:
            skip = offset + filled - int(runs.offsets[run])
            take = min(length - filled, int(runs.offsets[run + 1] - runs.offsets[run]) - skip)
            start = int(runs.starts[run]) + skip
            out[filled : filled + take] = self.sources[runs.sources[run]].tokens[start : start + take]
            filled += take
            run += 1
        return out

    def only(self, source: int) -> Corpus:
        """The same corpus with one source."""
        return dataclasses.replace(self, sources=(self.sources[source],))

    def split(self, validation_fraction: float = 0.05, *, seed: int = 0) -> Split:
        """Hold out whole documents: about `validation_fraction` of the tokens, of every source about its share.

        Source by source, documents are walked in the order of a hash of (seed, source, index), and the next one is
        taken when the tokens due exceed those taken. Its own length has no part in that, so long and short documents
        are as likely. Keep `seed` the same over runs that are to be compared, whatever their own seeds. With two
        documents or more, both sides get at least one.

        Raises:
            ValueError: a fraction outside [0, 1).
            DataError: a fraction above 0 of a corpus of fewer than two documents.
        """
        if not 0 <= validation_fraction < 1:
            raise ValueError(f"validation_fraction={validation_fraction} must be at least 0 and less than 1")
        if validation_fraction > 0 and self.num_documents < 2:
            raise DataError(
                f"validation_fraction={validation_fraction} holds out whole documents, and this corpus has"
                f" {self.num_documents}: give more text, or a smaller max_chars for documents"
            )
        held = [np.zeros(source.num_documents, bool) for source in self.sources]
        if validation_fraction > 0:
            walk = sorted(
                (source, _hash(seed, self.sources[source].name, index), index)
                for source, chosen in enumerate(held)
                for index in range(len(chosen))
            )
            # Half a document, since the last one taken is as often too many as too few. So the first is never taken.
            due = -self.num_tokens / len(walk) / 2
            for source, _, index in walk:
                start, end = self.sources[source].spans[index]
                held[source][index] = take = due >= 0
                due += (validation_fraction - take) * (end - start)
            if not any(chosen.any() for chosen in held):
                source, _, index = min(walk, key=lambda entry: entry[1])
                held[source][index] = True
        return Split(
            dataclasses.replace(self, sources=tuple(s.select(~chosen) for s, chosen in zip(self.sources, held))),
            dataclasses.replace(self, sources=tuple(s.select(chosen) for s, chosen in zip(self.sources, held))),
        )

    def describe(self) -> str:
        """One line a source, and a total: documents, tokens, megabytes, bytes a token."""
        rows = [(s.name, s.num_documents, s.num_tokens, s.num_bytes) for s in self.sources]
        if len(rows) != 1:
            rows.append(("total", self.num_documents, self.num_tokens, self.num_bytes))
        width = max(len("source"), *(len(name) for name, *_ in rows))
        lines = [f"{'source':<{width}}  {'documents':>9}  {'tokens':>13}  {'MB':>8}  bytes/token"]
        for name, documents, tokens, size in rows:
            ratio = f"{size / tokens:11.2f}" if tokens else f"{'-':>11}"
            lines.append(f"{name:<{width}}  {documents:>9,}  {tokens:>13,}  {size / 1e6:>8.2f}  {ratio}")
        return "\n".join(lines)

    @functools.cached_property
    def _runs(self) -> _Runs:
        """Adjacent documents joined, so that a read touches few pieces."""
        sources, starts, lengths = [], [], []
        for index, source in enumerate(self.sources):
            if source.num_documents:
                opens = np.flatnonzero(np.append(True, source.spans[1:, 0] != source.spans[:-1, 1]))
                closes = np.append(opens[1:], source.num_documents) - 1
                sources.append(np.full(len(opens), index))
                starts.append(source.spans[opens, 0])
                lengths.append(source.spans[closes, 1] - source.spans[opens, 0])
        if not sources:
            return _Runs(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(1, np.int64))
        offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
        return _Runs(np.concatenate(sources), np.concatenate(starts), offsets)


class _Runs(NamedTuple):
    """Stretches of one source's tokens that make up the stream, in order."""

    sources: np.ndarray
    starts: np.ndarray
    offsets: np.ndarray
    """[runs + 1] where each run starts in the stream, and the length of the stream."""


def spans_of_lengths(lengths: np.ndarray) -> np.ndarray:
    """[n] lengths of documents that follow each other -> [n, 2] their starts and ends."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return np.stack([ends - lengths, ends], axis=1)


def sha256_of_tokens(tokens: np.ndarray) -> str:
    """Hash of an array of uint8 or uint16 tokens as little-endian bytes, on any machine."""
    return hashlib.sha256(np.ascontiguousarray(tokens.astype(tokens.dtype.newbyteorder("<"), copy=False))).hexdigest()


def _hash(seed: int, source: str, index: int) -> bytes:
    # Not NumPy's generators: their streams may change between versions, and a held-out set must not.
    return hashlib.blake2b(f"{seed}:{source}:{index}".encode(), digest_size=16).digest()
