"""Text to tokens and back: bytes, or a byte-level BPE held in a `tokenizers` file."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fp4jax.train.data.text import DataError
from fp4jax.train.errors import require

END_OF_DOCUMENT = "<|endoftext|>"
"""The token that closes a document in a vocabulary trained here."""
MIN_BPE_VOCAB = 257
"""The 256 bytes and the end of a document."""
MAX_VOCAB = 1 << 16
"""What uint16 token files hold."""

# Known closing tokens, so that the tokenizer files of other projects work as they are.
_END_TOKENS = (END_OF_DOCUMENT, "</s>", "<|end_of_text|>", "<eos>")
_DOCUMENTS_A_CALL = 64


class Tokenizer(Protocol):
    """What a corpus asks of a tokenizer."""

    vocab_size: int
    """Ids are below this."""
    end_of_document: int
    """The id that closes every document."""
    dtype: np.dtype
    """The narrowest type that holds an id."""

    def encode(self, documents: Iterable[str]) -> Iterator[tuple[np.ndarray, int]]:
        """Yield (tokens, UTF-8 bytes) of each document; the tokens include the closing one, the bytes do not."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of some tokens, without those that close documents; incomplete characters become U+FFFD."""
        ...


class ByteTokenizer:
    r"""The UTF-8 bytes themselves; 255, a byte that UTF-8 never uses, closes a document.

    So the vocabulary stays at 256 and no text can forge the end of a document.

    Example:
        >>> tokens, size = next(ByteTokenizer().encode(["Hi"]))
        >>> tokens.tolist(), size, ByteTokenizer().decode(tokens)
        ([72, 105, 255], 2, 'Hi')
    """

    vocab_size = 256
    end_of_document = 255
    dtype = np.dtype(np.uint8)

    def encode(self, documents: Iterable[str]) -> Iterator[tuple[np.ndarray, int]]:
        """Yield (tokens, UTF-8 bytes) of each document."""
        for document in documents:
            text = document.encode()
            yield np.frombuffer(text + b"\xff", np.uint8), len(text)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of some tokens; bytes that are no whole character become U+FFFD."""
        return bytes(int(token) for token in tokens if token != self.end_of_document).decode(errors="replace")

    def __repr__(self) -> str:
        """`ByteTokenizer()`."""
        return "ByteTokenizer()"


class FileTokenizer:
    """A tokenizer of the package `tokenizers`, such as `fp4jax data prepare` trains and Hugging Face models ship.

    Text that spells a special token is encoded as ordinary text, so no document can forge its own end.

    Args:
        path: a tokenizer.json file.

    Raises:
        DataError: no such file, not a tokenizer, more than 65,536 ids, or no token that closes a document.
        MissingPackageError: the package `tokenizers` is not installed.
    """

    def __init__(self, path: Path) -> None:
        tokenizers = require("tokenizers", "a tokenizer file")
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise DataError(f"no such tokenizer file: {str(path)!r}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read the tokenizer {str(path)!r}: {error}") from None
        try:
            tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # tokenizers raises bare Exception for every fault of the file
            raise DataError(f"{str(path)!r} is not a tokenizer file: {error}") from None
        self._tokenizer: Any = tokenizer
        tokenizer.encode_special_tokens = True
        # Long documents are cut by DocumentRule; a length limit in the file would drop text silently.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.vocab_size = max(tokenizer.get_vocab().values(), default=0) + 1
        if self.vocab_size > MAX_VOCAB:
            raise DataError(
                f"{str(path)!r} has {self.vocab_size} ids, and uint16 token files hold {MAX_VOCAB}: use a smaller one"
            )
        ends = [tokenizer.token_to_id(token) for token in _END_TOKENS]
        end = next((token for token in ends if token is not None), None)
        if end is None:
            raise DataError(
                f"{str(path)!r} has no token that closes a document: it needs one of {', '.join(_END_TOKENS)}"
            )
        self.end_of_document: int = end
        self.dtype = np.dtype(np.uint16)
        self.path = path

    def encode(self, documents: Iterable[str]) -> Iterator[tuple[np.ndarray, int]]:
        """Yield (tokens, UTF-8 bytes) of each document, encoding a few at a time on all cores."""
        for group in itertools.batched(documents, _DOCUMENTS_A_CALL):
            encodings = self._tokenizer.encode_batch_fast(list(group), add_special_tokens=False)
            for document, encoding in zip(group, encodings):
                yield np.array([*encoding.ids, self.end_of_document], np.uint16), len(document.encode())

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of some tokens, without special ones."""
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True)

    def __repr__(self) -> str:
        """`FileTokenizer('tokenizer.json')`."""
        return f"FileTokenizer({str(self.path)!r})"


def train_bpe(documents: Iterable[str], vocab_size: int, path: Path) -> None:
    """Train a byte-level BPE (GPT-2's pre-tokenizer) and write it to `path`. The same documents give the same file.

    Id 0 is `END_OF_DOCUMENT` and the 256 bytes follow, so every text can be encoded. A text too small for
    `vocab_size` merges gives a smaller vocabulary.

    Args:
        documents: the text to learn from.
        vocab_size: ids in all, from 257 to 65,536.
        path: where the tokenizer.json goes.

    Raises:
        DataError: a vocabulary of another size.
        MissingPackageError: the package `tokenizers` is not installed.

    References:
        Sennrich et al., 2016 (arXiv:1508.07909); Radford et al., 2019 (GPT-2), section 2.2.
    """
    check_vocab_size(vocab_size)
    tokenizers = require("tokenizers", "training a tokenizer")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    groups = (list(group) for group in itertools.batched(documents, _DOCUMENTS_A_CALL))
    tokenizer.train_from_iterator(groups, trainer)
    path.write_text(tokenizer.to_str(), encoding="utf-8")


def check_vocab_size(vocab_size: int) -> None:
    """Refuse a vocabulary that a byte-level BPE in uint16 cannot have.

    Raises:
        DataError: below 257 or above 65,536.
    """
    if not MIN_BPE_VOCAB <= vocab_size <= MAX_VOCAB:
        raise DataError(
            f"vocab_size={vocab_size} must be from {MIN_BPE_VOCAB} (the 256 bytes and the end of a document)"
            f" to {MAX_VOCAB} (what uint16 token files hold)"
        )
