"""A corpus: tokens and text, the split by document, and the text inside the package."""

import dataclasses
import doctest
import hashlib
import importlib
import json
import lzma
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp4jax.train.data import (
    ByteTokenizer,
    Corpus,
    DataError,
    DataOptions,
    DocumentRule,
    FileTokenizer,
    PrepareOptions,
    Source,
    embedded,
    from_text,
    load,
    prepare,
)
from fp4jax.train.errors import MissingPackageError

END = ByteTokenizer.end_of_document


@pytest.fixture(scope="module")
def novels() -> Corpus:
    return embedded()


def corpus_of(*sources: list[str]) -> Corpus:
    """Each list of documents a source, in bytes."""
    tokenizer = ByteTokenizer()
    return Corpus(
        tuple(Source.from_documents(f"s{i}", tokenizer.encode(texts)) for i, texts in enumerate(sources)), tokenizer
    )


def stream(corpus: Corpus) -> bytes:
    return bytes(corpus.read(0, corpus.num_tokens).astype(np.uint8))


def test_tokens_of_text_files_are_their_bytes_with_each_document_closed(tmp_path):
    (tmp_path / "a.txt").write_text("naïve\n\ncafé", encoding="utf-8")
    (tmp_path / "b.txt").write_text("b—", encoding="utf-8")
    corpus = from_text([tmp_path / "a.txt", tmp_path / "b.txt"], rule=DocumentRule(min_chars=0))
    assert stream(corpus) == "naïve".encode() + b"\xff" + "café".encode() + b"\xff" + "b—".encode() + b"\xff"
    assert (corpus.vocab_size, corpus.source_names, corpus.num_documents) == (256, ("a", "b"), 3)
    assert (corpus.num_tokens, corpus.num_bytes) == (18, 15)
    assert corpus.bytes_per_token == 15 / 18
    assert corpus.tokenizer.decode(corpus.read(0, 6)) == "naïve"
    assert corpus.sources[0].tokens.dtype == np.uint8


@given(st.text())
def test_bytes_round_trip_and_never_hold_the_end_token(text):
    tokens, size = next(ByteTokenizer().encode([text]))
    assert tokens[-1] == END
    assert END not in tokens[:-1]
    assert size == len(tokens) - 1
    assert ByteTokenizer().decode(tokens) == text


def test_half_a_character_decodes_to_the_replacement_character():
    assert ByteTokenizer().decode([0xE2, 0x80]) == "\ufffd"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.9])
def test_split_partitions_the_documents(seed, fraction):
    # Every document is its own marker, so the two streams tell which they hold.
    texts = [[f"<{s}:{i}>" + "x" * (i * 37 % 101) for i in range(80)] for s in range(3)]
    corpus = corpus_of(*texts)
    train, validation = corpus.split(fraction, seed=seed)
    held = [set(stream(part).decode("latin1").split("\xff")[:-1]) for part in (train, validation)]
    assert not held[0] & held[1]
    assert held[0] | held[1] == {text for source in texts for text in source}
    assert train.num_tokens + validation.num_tokens == corpus.num_tokens
    assert validation.num_tokens == pytest.approx(fraction * corpus.num_tokens, abs=2 * 110)
    for source, part in zip(corpus.sources, validation.sources):
        assert part.num_tokens == pytest.approx(fraction * source.num_tokens, abs=2 * 110)
        assert part.tokens is source.tokens
    assert train.source_names == validation.source_names == corpus.source_names


def test_split_depends_on_its_seed_and_nothing_else():
    texts = [f"{i:03d}" for i in range(200)]
    first, again, other = (corpus_of(texts).split(0.1, seed=seed).validation for seed in (0, 0, 1))
    assert first.fingerprint == again.fingerprint
    assert first.fingerprint != other.fingerprint
    # Pinned: a new version must hold out the same documents.
    held = [13, 32, 43, 52, 58, 59, 70, 72, 91, 99, 120, 121, 127, 136, 146, 147, 148, 159, 184, 188]
    assert stream(first).decode("latin1").split("\xff")[:-1] == [f"{i:03d}" for i in held]


def test_split_prefers_neither_long_nor_short_documents():
    corpus = corpus_of(["short"] * 300 + ["l" * 500] * 300)
    share = np.zeros(2)
    for seed in range(40):
        held = corpus.split(0.1, seed=seed).validation.sources[0].document_bytes
        share += [(held == 5).sum(), (held == 500).sum()]
    assert share / (40 * 300) == pytest.approx(0.1, abs=0.015)


@pytest.mark.parametrize("fraction", [0.001, 0.5, 0.999])
def test_both_sides_get_a_document(fraction):
    for count in (2, 3, 5):
        train, validation = corpus_of(["text"] * count).split(fraction)
        assert min(train.num_documents, validation.num_documents) >= 1


def test_split_errors_and_no_split():
    single = corpus_of(["all in one"])
    with pytest.raises(
        DataError, match=r"validation_fraction=0\.05 holds out whole documents, and this corpus has 1: "
    ):
        single.split()
    train, validation = single.split(0)
    assert (train.num_tokens, validation.num_tokens, validation.num_documents) == (11, 0, 0)
    for fraction in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="must be at least 0 and less than 1"):
            single.split(fraction)
    with pytest.raises(DataError, match="bytes_per_token of a corpus without tokens"):
        _ = validation.bytes_per_token


@given(st.data())
def test_read_equals_slicing_the_joined_stream(data):
    corpus = corpus_of(*(["x" * data.draw(st.integers(1, 9)) + "y" for _ in range(12)] for _ in range(2)))
    part = corpus.split(0.4, seed=data.draw(st.integers(0, 5)))[data.draw(st.integers(0, 1))]
    whole = np.concatenate([s.tokens[a:b] for s in part.sources for a, b in s.spans])
    start = data.draw(st.integers(0, len(whole)))
    length = data.draw(st.integers(0, len(whole) - start))
    found = part.read(start, length)
    assert found.dtype == np.int32
    assert found.tolist() == whole[start : start + length].tolist()


def test_read_outside_the_stream():
    corpus = corpus_of(["abc"])
    for offset, length in [(0, 5), (-1, 2), (4, 1)]:
        with pytest.raises(IndexError, match="of a corpus of 4"):
            corpus.read(offset, length)


def test_fingerprint_tells_text_names_order_and_split():
    base = corpus_of(["one", "two"], ["three", "four"])
    others = [
        corpus_of(["one", "twO"], ["three", "four"]),
        corpus_of(["three", "four"], ["one", "two"]),
        corpus_of(["onet", "wo"], ["three", "four"]),
        dataclasses.replace(base, sources=base.sources[:1]),
        *base.split(0.5),
    ]
    prints = {corpus.fingerprint for corpus in [base, *others]}
    assert len(prints) == 1 + len(others)
    assert corpus_of(["one", "two"], ["three", "four"]).fingerprint == base.fingerprint


def test_describe_counts_every_source():
    lines = corpus_of(["ab", "cd"], ["é" * 1000]).describe().splitlines()
    assert [line.split() for line in lines] == [
        ["source", "documents", "tokens", "MB", "bytes/token"],
        ["s0", "2", "6", "0.00", "0.67"],
        ["s1", "1", "2,001", "0.00", "1.00"],
        ["total", "3", "2,007", "0.00", "1.00"],
    ]
    assert "-" in corpus_of(["ab"]).split(0).validation.describe().splitlines()[1]


def test_embedded_text_is_english_and_what_the_manifest_says(novels):
    folder = Path(importlib.import_module("fp4jax.train.data").__file__).parent / "works"
    works = json.loads((folder / "manifest.json").read_text())["works"]
    assert {path.name for path in folder.glob("*.xz")} == {work["file"] for work in works}
    assert sum(path.stat().st_size for path in folder.iterdir()) < 1_600_000
    for work, source in zip(works, novels.sources, strict=True):
        text = lzma.decompress((folder / work["file"]).read_bytes())
        assert hashlib.sha256(text).hexdigest() == work["sha256"]
        assert len(text) == work["bytes"]
        assert work["died"] < 1900
        # Only the blank lines between documents are gone, and the last line end.
        assert source.num_bytes == len(text) - 2 * (source.num_documents - 1) - 1
        words = text.decode("utf-8").split()
        assert 0.03 < words.count("the") / len(words) < 0.08
    assert 4.7e6 < novels.num_bytes < 5.3e6
    assert novels.num_documents > 300
    assert novels.tokenizer.decode(novels.read(0, 37)) == "CHAPTER 1. Loomings.\nCall me Ishmael."


def test_every_novel_has_held_out_chapters(novels):
    train, validation = novels.split()
    assert validation.num_tokens == pytest.approx(0.05 * novels.num_tokens, rel=0.1)
    assert all(source.num_documents for source in (*validation.sources, *train.sources))


def test_load_takes_the_package_files_or_a_prepared_folder(tmp_path, novels):
    assert load(DataOptions()).fingerprint == novels.fingerprint
    text = tmp_path / "a.txt"
    text.write_text("some words\n\n" * 40)
    assert load(DataOptions(text=(text,))).source_names == ("a",)
    prepared = prepare(PrepareOptions((text,), out=tmp_path / "out", vocab_size=257))
    assert load(DataOptions(text=(tmp_path / "out",))).fingerprint == prepared.fingerprint
    encoded = load(DataOptions(text=(text,), tokenizer=tmp_path / "out" / "tokenizer.json"))
    assert encoded.vocab_size == 257
    # The same text, tokenizer and rule in memory and on the disk are the same corpus, with the same split.
    assert encoded.fingerprint == prepared.fingerprint
    with pytest.raises(DataError, match="is a folder, and 2 paths were given"):
        load(DataOptions(text=(tmp_path / "out", text)))
    with pytest.raises(DataError, match="has its own tokenizer"):
        load(DataOptions(text=(tmp_path / "out",), tokenizer=tmp_path / "out" / "tokenizer.json"))


def test_tokenizer_file_errors(tmp_path):
    with pytest.raises(DataError, match=r"^no such tokenizer file: '.*t\.json'$"):
        FileTokenizer(tmp_path / "t.json")
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(DataError, match=r"'.*t\.json' is not a tokenizer file: "):
        FileTokenizer(tmp_path / "t.json")
    (tmp_path / "t.json").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"cannot read the tokenizer '.*t\.json': "):
        FileTokenizer(tmp_path / "t.json")


def word_level(path: Path, vocab: dict[str, int]) -> Path:
    tokenizers = importlib.import_module("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=next(iter(vocab)))).save(str(path))
    return path


def test_tokenizer_files_that_do_not_fit(tmp_path):
    with pytest.raises(DataError, match=r"has 65537 ids, and uint16 token files hold 65536"):
        FileTokenizer(word_level(tmp_path / "big.json", {"</s>": 0, "word": 65536}))
    assert FileTokenizer(word_level(tmp_path / "fits.json", {"</s>": 0, "word": 65535})).vocab_size == 65536
    with pytest.raises(DataError, match=r"no token that closes a document: it needs one of <\|endoftext\|>, </s>"):
        FileTokenizer(word_level(tmp_path / "open.json", {"word": 0}))


@pytest.mark.parametrize("package", ["grain", "tokenizers"])
def test_absent_packages_are_named_with_their_extra(monkeypatch, tmp_path, novels, package):
    monkeypatch.setitem(sys.modules, package, None)
    sampling = importlib.import_module("fp4jax.train.data.sampling")
    use = {
        "grain": lambda: sampling.Batches(novels, 8, 2, 0),
        "tokenizers": lambda: FileTokenizer(tmp_path / "tokenizer.json"),
    }[package]
    with pytest.raises(MissingPackageError, match=rf"needs '{package}': pip install 'fp4jax\[train\]'"):
        use()
    # What is left works without them: reading text, splitting, and validation.
    assert len(sampling.validation_batches(novels.split().validation, 64, 4, limit=2)) == 2


def test_examples_of_the_documentation_run(tmp_path, monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "data.md"
    examples = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("A line of text, and another.\n\n" * 2000)
    test = doctest.DocTestParser().get_doctest(examples, {}, "data.md", str(page), 0)
    assert len(test.examples) > 5
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0


@pytest.mark.parametrize("module", ["text", "tokenizer", "corpus", "load", "sampling", "preparation"])
def test_docstring_examples_run(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "emma.txt").write_text("Emma Woodhouse, handsome, clever, and rich.\n\n" * 400)
    data = importlib.import_module("fp4jax.train.data")
    names = {name: getattr(data, name) for name in dir(data) if not name.startswith("_")} | {"Path": Path}
    target = importlib.import_module(f"fp4jax.train.data.{module}")
    finder = doctest.DocTestFinder()
    examples = [test for test in finder.find(target, extraglobs=names) if test.examples]
    assert examples
    for test in examples:
        runner = doctest.DocTestRunner(verbose=False)
        assert runner.run(test).failed == 0, test.name
