"""lm-evaluation-harness: what its `LM` interface asks of a model, and the adapter that hands it over.

`TextScorer` does the work and needs no harness. `harness_model` wraps it in the harness's base class.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fp4jax.interop.errors import InteropError, require
from fp4jax.models import Llama, token_nll

_SHORTEST = 16
"""Windows are padded to this times a power of two, so that few lengths are compiled."""


@dataclasses.dataclass(eq=False)
class TextScorer:
    """Log-likelihoods and greedy continuations of texts under a `Llama`.

    A window is padded at its end to one of a few lengths. Attention is causal, so padding reaches no token before it,
    unless a recipe takes scales or outliers over a whole tensor: choose `scope="vector"` or α = None for scores that do
    not depend on what else is in the batch.

    Args:
        model: the model; it is put into evaluation mode.
        tokenizer: a `tokenizers.Tokenizer`.
        end_of_text: the token that opens a text without context, and ends a continuation.
        batch_size: windows that are scored at once.
        max_length: tokens that the model sees at most; None is its `max_seq_len`.

    Raises:
        InteropError: the tokenizer has more tokens than the model, or does not know `end_of_text`.

    Example:
        >>> import tokenizers
        >>> from fp4jax.models import MODELS
        >>> words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<e>": 2}, unk_token="a"))
        >>> words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        >>> scorer = TextScorer(Llama(MODELS["tiny"], rngs=nnx.Rngs(0)), words, "<e>")
        >>> ((log_likelihood, greedy),) = scorer.continuations([("a b", " a")])
        >>> log_likelihood < 0, greedy
        (True, False)
    """

    model: Llama
    tokenizer: Any
    end_of_text: str = "<|endoftext|>"
    batch_size: int = 4
    max_length: int | None = None

    def __post_init__(self) -> None:
        config = self.model.config
        if (size := self.tokenizer.get_vocab_size(with_added_tokens=True)) > config.vocab_size:
            raise InteropError(f"the tokenizer has {size} tokens, and the model {config.vocab_size}")
        end = self.tokenizer.token_to_id(self.end_of_text)
        if end is None:
            raise InteropError(f"end_of_text={self.end_of_text!r} is no token of the tokenizer")
        self.end: int = end
        self.length = config.max_seq_len if self.max_length is None else min(self.max_length, config.max_seq_len)
        if self.length < 1 or self.batch_size < 1:
            raise InteropError(f"max_length={self.length} and batch_size={self.batch_size} must be positive")
        self.model.eval()
        self._graphdef, self._state = nnx.split(self.model)

    def continuations(self, pairs: Iterable[tuple[str, str]]) -> list[tuple[float, bool]]:
        """log p(continuation | context) and whether greedy decoding gives the continuation, for each pair.

        A window that is too long loses the beginning of its context. Spaces at the end of a context count as the
        beginning of the continuation, since byte-level tokens begin with them.
        """
        windows = [self._pair(context, continuation) for context, continuation in pairs]
        return self._scores(windows)

    def texts(self, texts: Iterable[str]) -> list[float]:
        """log p(text) of each text, every token predicted once, with as much of what precedes it as a window holds."""
        sums: list[float] = []
        for text in texts:
            tokens = self._encode(text)
            windows = list(self._rolling(tokens))
            sums.append(sum(value for value, _ in self._scores(windows)))
        return sums

    def generate(self, context: str, stops: Sequence[str] = (), max_tokens: int = 256) -> str:
        """The greedy continuation, up to a stop, which it does not hold, the end of the text, or `max_tokens`.

        There is no cache of keys and values: every token costs a forward pass over the window.
        """
        tokens = self._encode(context) or [self.end]
        made: list[int] = []
        for _ in range(max_tokens):
            window = np.array((tokens + made)[-self.length :], np.int32)
            padded = np.full((1, self._padded(len(window))), self.end, np.int32)
            padded[0, : len(window)] = window
            token = int(_next(self._graphdef, self._state, padded, len(window) - 1))
            if token == self.end:
                break
            made.append(token)
            text = self.tokenizer.decode(made)
            ends = [text.find(stop) for stop in stops if stop and stop in text]
            if ends:
                return text[: min(ends)]
        return self.tokenizer.decode(made)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def _pair(self, context: str, continuation: str) -> tuple[list[int], int]:
        """A window's tokens, one more than the model sees, and how many of the last are scored."""
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        before = self._encode(context) or [self.end]
        # Encoded together and then cut, as the harness does: the boundary may lie elsewhere when encoded apart.
        both = self._encode(context + continuation)
        after = both[len(self._encode(context)) :] if context else self._encode(continuation)
        if len(after) > self.length:
            raise InteropError(f"a continuation of {len(after)} tokens does not fit into max_length={self.length}")
        return (before + after)[-self.length - 1 :], len(after)

    def _rolling(self, tokens: list[int]) -> Iterator[tuple[list[int], int]]:
        for start in range(0, len(tokens), self.length):
            stop = min(start + self.length, len(tokens))
            # The last window reaches back, so that its tokens have as much before them as they can.
            begin = max(0, stop - self.length)
            before = [self.end] if begin == 0 else [tokens[begin - 1]]
            yield before + tokens[begin:stop], stop - start

    def _scores(self, windows: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        results: list[tuple[float, bool]] = [(0.0, True)] * len(windows)
        # Those of like length together, which wastes the least padding.
        order = sorted((i for i, (_, count) in enumerate(windows) if count), key=lambda i: -len(windows[i][0]))
        for begin in range(0, len(order), self.batch_size):
            rows = order[begin : begin + self.batch_size]
            longest = len(windows[rows[0]][0]) - 1
            tokens = np.full((self.batch_size, self._padded(longest) + 1), self.end, np.int32)
            for row, i in enumerate(rows):
                tokens[row, : len(windows[i][0])] = windows[i][0]
            nll, best = jax.device_get(_score(self._graphdef, self._state, tokens))
            for row, i in enumerate(rows):
                window, count = windows[i]
                scored = slice(len(window) - 1 - count, len(window) - 1)
                results[i] = -float(nll[row, scored].sum(dtype=np.float64)), bool(best[row, scored].all())
        return results

    def _padded(self, length: int) -> int:
        size = _SHORTEST
        while size < length:
            size *= 2
        return min(size, self.length)


@functools.partial(jax.jit, static_argnums=0)
def _score(graphdef: Any, state: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """nll of tokens[:, 1:] and whether each is the likeliest, both [b, t], of tokens [b, t + 1]."""
    logits = nnx.merge(graphdef, state, copy=True)(tokens[:, :-1])
    return token_nll(logits, tokens[:, 1:]), jnp.argmax(logits, axis=-1) == tokens[:, 1:]


@functools.partial(jax.jit, static_argnums=0)
def _next(graphdef: Any, state: Any, tokens: jax.Array, position: jax.Array) -> jax.Array:
    """The likeliest token after `position`."""
    return jnp.argmax(nnx.merge(graphdef, state, copy=True)(tokens)[0, position])


def harness_model(scorer: TextScorer) -> Any:
    """The model as lm-evaluation-harness takes it: `lm_eval.simple_evaluate(model=harness_model(scorer), tasks=…)`.

    Returns:
        An instance of `lm_eval.api.model.LM` with loglikelihood, loglikelihood_rolling and generate_until (greedy).

    Raises:
        MissingPackageError: the package `lm_eval` is not installed.
    """
    base = require("lm_eval.api.model", "the evaluation harness", install="lm_eval").LM

    class Fp4jaxLM(base):
        """Hands the harness's requests to the scorer."""

        def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            """(log-likelihood, whether greedy) of each (context, continuation)."""
            del disable_tqdm
            return scorer.continuations([request.args for request in requests])

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            """Log-likelihood of each text."""
            del disable_tqdm
            return scorer.texts([request.args[0] for request in requests])

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            """The greedy continuation of each (context, options)."""
            del disable_tqdm
            return [scorer.generate(context, **_generation(options)) for context, options in (r.args for r in requests)]

    return Fp4jaxLM()


def _generation(options: dict[str, Any]) -> dict[str, Any]:
    """Stops and length out of the harness's options.

    Raises:
        InteropError: sampling is asked for.
    """
    if options.get("do_sample") or options.get("temperature") not in (None, 0, 0.0):
        raise InteropError(f"generation options {options!r}: continuations are greedy, so say do_sample=false")
    until = options.get("until") or []
    return {
        "stops": [until] if isinstance(until, str) else list(until),
        "max_tokens": int(options.get("max_gen_toks") or options.get("max_new_tokens") or 256),
    }
