"""`fp4jax data prepare`: the folder it writes, that the same text gives the same bytes, and damage that is seen."""

import io
import json
import lzma
import shutil
from pathlib import Path

import numpy as np
import pytest
import rich.console
import tyro

from fp4jax.train.data import DataError, DocumentRule, PrepareOptions, open_corpus, prepare
from fp4jax.train.data.manifest import Manifest

WORDS = ["the", "whale", "and", "sea", "—", "a", "naïve", "“harpooneer”", "who", "said", "<|endoftext|>", "twice"]


def text(seed: int, paragraphs: int = 60) -> str:
    rng = np.random.default_rng(seed)
    lines = [" ".join(rng.choice(WORDS, 30)) for _ in range(paragraphs)]
    return "\n\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("text")
    first, second = folder / "sea stories.txt", folder / "b.txt.xz"
    first.write_text(text(0), encoding="utf-8")
    second.write_bytes(lzma.compress(text(1).encode()))
    return first, second


@pytest.fixture(scope="module")
def prepared(files, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("prepared") / "deep" / "corpus"
    prepare(PrepareOptions(files, out, vocab_size=300, documents=DocumentRule(min_chars=0)))
    return out


@pytest.fixture
def copy(prepared, tmp_path) -> Path:
    shutil.copytree(prepared, tmp_path / "corpus")
    return tmp_path / "corpus"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_tokens_decode_to_the_text_and_cannot_forge_an_end(prepared, files):
    corpus = open_corpus(prepared)
    assert corpus.source_names == ("sea stories", "b")
    assert corpus.vocab_size == 300
    expected = [files[0].read_text(encoding="utf-8"), lzma.decompress(files[1].read_bytes()).decode()]
    end = corpus.tokenizer.end_of_document
    for source, whole in zip(corpus.sources, expected):
        documents = whole.strip().split("\n\n")
        assert source.num_documents == len(documents) == 60
        for (start, stop), document, size in zip(source.spans, documents, source.document_bytes):
            tokens = source.tokens[start:stop]
            assert corpus.tokenizer.decode(tokens) == document
            assert size == len(document.encode())
            assert [i for i, token in enumerate(tokens) if token == end] == [len(tokens) - 1]
        assert isinstance(source.tokens, np.memmap)
        assert source.tokens.dtype == np.dtype("<u2")
    assert 1.2 < corpus.bytes_per_token < 4


def test_manifest_says_what_was_written(prepared):
    manifest = json.loads((prepared / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"], manifest["dtype"]) == ("fp4jax corpus", 1, "uint16")
    assert {path.name for path in prepared.iterdir()} == {
        "manifest.json",
        "tokenizer.json",
        "000-sea-stories.tokens",
        "000-sea-stories.documents.npy",
        "001-b.tokens",
        "001-b.documents.npy",
    }
    entry = manifest["sources"][0]
    assert entry["num_tokens"] * 2 == (prepared / entry["tokens_file"]).stat().st_size
    assert json.loads(Manifest.read(prepared / "manifest.json").to_json()) == manifest
    assert prepared.stat().st_mode & 0o777 == prepared.parent.stat().st_mode & 0o777


def test_same_text_gives_the_same_bytes(prepared, files, tmp_path):
    options = PrepareOptions(files, tmp_path / "again", vocab_size=300, documents=DocumentRule(min_chars=0))
    again = prepare(options)
    assert contents(tmp_path / "again") == contents(prepared)
    assert again.fingerprint == open_corpus(prepared).fingerprint


def test_a_given_tokenizer_is_used_as_it_is(prepared, files, tmp_path):
    options = PrepareOptions(files[:1], tmp_path / "out", tokenizer=prepared / "tokenizer.json", vocab_size=5)
    corpus = prepare(options)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (prepared / "tokenizer.json").read_bytes()
    assert corpus.vocab_size == 300


def test_sections_become_sources(tmp_path):
    path = tmp_path / "all.txt"
    path.write_text("First words.\n\nmore\n\nSecond part\n\nmore of it\n")
    (tmp_path / "sections.json").write_text('{"one": "First", "two": "Second part"}')
    corpus = prepare(PrepareOptions((path,), tmp_path / "out", vocab_size=257, sections=tmp_path / "sections.json"))
    assert corpus.source_names == ("one", "two")
    assert [corpus.tokenizer.decode(source.tokens) for source in corpus.sources] == [
        "First words.\n\nmore",
        "Second part\n\nmore of it",
    ]


def test_refuses_to_replace_unless_told_and_never_what_is_no_corpus(prepared, files, copy):
    options = {"files": files[:1], "vocab_size": 260}
    before = contents(copy)
    with pytest.raises(DataError, match="holds a prepared corpus already: choose another folder or pass --overwrite"):
        prepare(PrepareOptions(out=copy, **options))
    assert contents(copy) == before
    mapped = open_corpus(copy)
    assert prepare(PrepareOptions(out=copy, overwrite=True, **options)).vocab_size == 260
    assert open_corpus(copy).source_names == ("sea stories",)
    # Whoever has the old files mapped keeps them.
    assert mapped.read(0, 50).tolist() == open_corpus(prepared).read(0, 50).tolist()
    other = copy.parent / "precious"
    other.mkdir()
    (other / "thesis.tex").write_text("all my work")
    with pytest.raises(DataError, match="exists and is not a prepared corpus: choose another folder"):
        prepare(PrepareOptions(out=other, overwrite=True, **options))
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]
    assert {path.name for path in copy.parent.iterdir()} == {"corpus", "precious"}


class _Stop(Exception):
    pass


@pytest.mark.parametrize("moment", ["_write_source", "_commit"])
def test_interrupted_it_leaves_nothing_new_and_nothing_broken(monkeypatch, files, copy, moment):
    def stop(*_):
        raise _Stop

    before = contents(copy)
    monkeypatch.setattr(f"fp4jax.train.data.preparation.{moment}", stop)
    with pytest.raises(_Stop):
        prepare(PrepareOptions(files, copy, vocab_size=257, overwrite=True))
    assert contents(copy) == before
    assert [path.name for path in copy.parent.iterdir()] == ["corpus"]


def test_unusable_text_leaves_nothing(files, tmp_path):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"x" * 100 + b"\xff")
    with pytest.raises(DataError, match=r"'.*bad\.txt' is not UTF-8: byte 0xff at position 100"):
        prepare(PrepareOptions((*files, bad), tmp_path / "out", vocab_size=257))
    with pytest.raises(DataError, match="no such text file: "):
        prepare(PrepareOptions((tmp_path / "none.txt",), tmp_path / "out", vocab_size=257))
    assert [path.name for path in tmp_path.iterdir()] == ["bad.txt"]


@pytest.mark.parametrize("vocab_size", [0, 256, 65537])
def test_vocabulary_out_of_range(files, tmp_path, vocab_size):
    with pytest.raises(DataError, match=rf"vocab_size={vocab_size} must be from 257 .* to 65536 \(what uint16"):
        prepare(PrepareOptions(files, tmp_path / "out", vocab_size=vocab_size))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (None, "no such sections file: "),
        ("{", "cannot read the sections .*json.*: "),
        ("[1]", 'should be like {"name": "the words that open its first document"}'),
        ('{"a": ""}', "should be like"),
    ],
)
def test_bad_sections_file(files, tmp_path, written, message):
    path = tmp_path / "sections.json"
    if written is not None:
        path.write_text(written)
    with pytest.raises(DataError, match=message):
        prepare(PrepareOptions(files[:1], tmp_path / "out", sections=path))
    with pytest.raises(DataError, match="describes one file, and files has 2: prepare them apart"):
        prepare(PrepareOptions(files, tmp_path / "out", sections=path))


def test_progress_counts_the_bytes_of_all_files_twice(files, tmp_path):
    shown = io.StringIO()
    console = rich.console.Console(file=shown, force_terminal=True, width=120)
    prepare(PrepareOptions(files, tmp_path / "out", vocab_size=257), console)
    lines = shown.getvalue()
    assert "training the tokenizer" in lines
    assert "writing tokens" in lines
    size = sum(path.stat().st_size for path in files) / 1000
    assert f"{size:.1f}/{size:.1f} kB" in lines


def test_command_line_help_explains_every_option(capsys):
    with pytest.raises(SystemExit):
        tyro.cli(PrepareOptions, args=["--help"], console_outputs=True)
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for words in (
        "one source, named after the file",
        "--vocab-size",
        "--documents.delimiter",
        "prepared corpus already",
    ):
        assert words in shown
    options = tyro.cli(PrepareOptions, args=["a", "b", "--out", "o", "--documents.max-chars", "5000"])
    assert options == PrepareOptions((Path("a"), Path("b")), Path("o"), documents=DocumentRule(max_chars=5000))


def edit_manifest(folder: Path, change) -> None:
    path = folder / "manifest.json"
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))


def damage_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "cut": (
        lambda f: (f / "001-b.tokens").write_bytes((f / "001-b.tokens").read_bytes()[:-2]),
        r"'.*001-b\.tokens' has \d+ bytes, and the manifest says \d+ \(\d+ tokens\): the file was cut or altered",
    ),
    "flipped": (lambda f: damage_byte(f / "001-b.tokens"), r"'.*001-b\.tokens' has sha256 .*…, and the manifest says"),
    "documents": (lambda f: damage_byte(f / "000-sea-stories.documents.npy"), r"documents\.npy' has sha256 "),
    "tokenizer": (lambda f: damage_byte(f / "tokenizer.json"), r"'.*tokenizer\.json' has sha256 "),
    "no tokens": (lambda f: (f / "001-b.tokens").unlink(), r"cannot read '.*001-b\.tokens', which the manifest names"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), r"cannot read '.*tokenizer\.json', which the manifest"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), r"no manifest at '.*manifest\.json': give a folder that"),
    "not json": (lambda f: (f / "manifest.json").write_text("{"), r"cannot read '.*manifest\.json': "),
    "not text": (lambda f: (f / "manifest.json").write_bytes(b"\xff"), r"cannot read '.*manifest\.json': "),
    "other json": (lambda f: (f / "manifest.json").write_text("[]"), "is not the manifest of a prepared corpus"),
    "format": (lambda f: edit_manifest(f, lambda m: m.update(format="x")), "it lacks 'format': 'fp4jax corpus'"),
    "version": (
        lambda f: edit_manifest(f, lambda m: m.update(version=2)),
        "has version 2, and this fp4jax reads version 1: prepare the text again",
    ),
    "dtype": (lambda f: edit_manifest(f, lambda m: m.update(dtype="uint32")), "has dtype 'uint32', and this fp4jax"),
    "vocabulary": (
        lambda f: edit_manifest(f, lambda m: m.update(vocab_size=299)),
        r"vocab_size and end_of_document \(300, 0\), and the manifest says \(299, 0\)",
    ),
    "lacking": (lambda f: edit_manifest(f, lambda m: m.pop("vocab_size")), "manifest.json' lacks vocab_size"),
    "unknown": (lambda f: edit_manifest(f, lambda m: m.update(extra=1)), "has unknown fields: extra"),
    "ill-typed": (lambda f: edit_manifest(f, lambda m: m.update(vocab_size="300")), "vocab_size='300' should be a cou"),
    "negative": (lambda f: edit_manifest(f, lambda m: m.update(vocab_size=-1)), "vocab_size=-1 should be a count"),
    "no sources": (lambda f: edit_manifest(f, lambda m: m.update(sources=[])), "lists no sources"),
    "odd source": (lambda f: edit_manifest(f, lambda m: m.update(sources=[7])), "a source is 7, and should be an obj"),
    "source lacks": (lambda f: edit_manifest(f, lambda m: m["sources"][0].pop("name")), "manifest.json' lacks name"),
    "outside": (
        lambda f: edit_manifest(f, lambda m: m["sources"][0].update(tokens_file="../x")),
        r"tokens_file='\.\./x' should name a file of the same folder",
    ),
    "bytes": (
        lambda f: edit_manifest(f, lambda m: m["sources"][0].update(num_bytes=1)),
        r"documents\.npy' does not fit the manifest",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused_with_the_name_of_the_file(copy, kind):
    harm, message = DAMAGE[kind]
    open_corpus(copy)
    harm(copy)
    with pytest.raises(DataError, match=message) as caught:
        open_corpus(copy)
    assert "\n" not in str(caught.value)


def test_hashing_the_tokens_can_be_left_out_but_not_their_size(copy):
    damage_byte(copy / "001-b.tokens")
    assert open_corpus(copy, verify=False).num_tokens == json_tokens(copy)
    DAMAGE["cut"][0](copy)
    with pytest.raises(DataError, match=DAMAGE["cut"][1]):
        open_corpus(copy, verify=False)


def json_tokens(folder: Path) -> int:
    return sum(entry["num_tokens"] for entry in json.loads((folder / "manifest.json").read_text())["sources"])
