"""The harness's three requests against sums by hand, and, where it is installed, a local task under the harness."""

import abc
import itertools
import sys
import types

import numpy as np
import pytest
import reference_llama
import tokenizers
from small_llama import draw, small

import fp4jax
from fp4jax.interop import (
    InteropError,
    MissingPackageError,
    TextScorer,
    build_model,
    harness_model,
    layout,
    to_hf_config,
)
from fp4jax.nn import default_rules

WORDS = ["<|endoftext|>", *(chr(ord("a") + i) for i in range(26)), " "]
CONFIG = small(max_seq_len=24)


def characters() -> tokenizers.Tokenizer:
    """A token a letter."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    return tokenizer


def scorer(rules=None, **options) -> TextScorer:
    return TextScorer(build_model(CONFIG, draw(CONFIG), rules=rules), characters(), **options)


def log_probabilities(ids: list[int]) -> np.ndarray:
    """Of the next token at every place: by the NumPy model, without padding or batches."""
    leaves = layout.flat(draw(CONFIG), CONFIG)
    tensors = {name: layout.to_tensor(entry, leaves, None) for name, entry in layout.entries(CONFIG).items()}
    logits = reference_llama.logits(to_hf_config(CONFIG), tensors, np.array([ids]))[0]
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def by_hand(ids: list[int], count: int) -> float:
    table = log_probabilities(ids[:-1])
    return sum(table[i - 1, ids[i]] for i in range(len(ids) - count, len(ids)))


def encode(text: str) -> list[int]:
    return [WORDS.index(letter) for letter in text]


def test_continuations_are_the_sums_of_their_tokens():
    pairs = [("call me", " ishmael"), ("", "whale"), ("the white ", "whale"), ("x" * 40, "yz"), ("a", "")]
    scores = scorer(batch_size=2).continuations(pairs)
    expected = [
        by_hand(encode("call me ishmael"), 8),
        by_hand([0, *encode("whale")], 5),
        by_hand(encode("the white whale"), 6),  # the space at the end of the context is scored
        by_hand(encode("x" * 23 + "yz"), 2),  # 24 tokens are seen, and the last is only predicted
        0.0,
    ]
    np.testing.assert_allclose([value for value, _ in scores], expected, rtol=1e-5, atol=1e-5)
    assert scores[-1] == (0.0, True)


def test_greedy_is_said_of_the_greedy_continuation_alone():
    one = scorer()
    best = one.generate("call me", max_tokens=3)
    assert len(best) == 3
    assert one.continuations([("call me", best)])[0][1] is True
    other = "b" if best[0] != "b" else "c"
    assert one.continuations([("call me", other + best[1:])])[0][1] is False


def test_generation_takes_the_likeliest_token_again_and_again():
    ids = encode("call me")
    for _ in range(30):  # past the longest window
        ids.append(int(log_probabilities(ids[-24:])[-1].argmax()))
    made = "".join(WORDS[i] for i in ids[7:]).split(WORDS[0])[0]
    one = scorer()
    assert one.generate("call me", max_tokens=30) == made
    assert one.generate("call me", stops=[made[4:6]], max_tokens=30) == made[: made.find(made[4:6])]
    assert one.generate("", max_tokens=1) == WORDS[int(log_probabilities([0])[-1].argmax())]


@pytest.mark.parametrize("length", [1, 10, 24, 25, 60])
def test_a_long_text_is_predicted_once_with_the_most_context(length):
    text = "".join(itertools.islice(itertools.cycle("call me ishmael"), length))
    ids, expected = encode(text), 0.0
    for start in range(0, length, 24):
        stop = min(start + 24, length)
        before = ids[stop - 25 : stop] if stop > 24 else [0, *ids[:stop]]
        expected += by_hand(before, stop - start)
    (actual,) = scorer(batch_size=2).texts([text])
    assert actual == pytest.approx(expected, rel=1e-5)
    assert scorer().texts([""]) == [0.0]


def test_padding_does_not_change_a_score_under_vector_wise_scales():
    rules = default_rules(fp4jax.recipes.fp4_vector())
    one, two = scorer(rules, batch_size=1), scorer(rules, batch_size=2)
    pairs = [("call me", " ishmael"), ("some years ago", " n")]
    assert [one.continuations([pair])[0] for pair in pairs] == two.continuations(pairs)


def test_what_does_not_fit_is_refused():
    with pytest.raises(InteropError, match=r"end_of_text='</s>' is no token of the tokenizer"):
        scorer(end_of_text="</s>")
    with pytest.raises(InteropError, match=r"the tokenizer has 28 tokens, and the model 20"):
        TextScorer(build_model(small(vocab_size=20), draw(small(vocab_size=20))), characters())
    with pytest.raises(InteropError, match=r"max_length=0 and batch_size=4 must be positive"):
        scorer(max_length=0)
    with pytest.raises(InteropError, match=r"a continuation of 30 tokens does not fit into max_length=24"):
        scorer().continuations([("a", "b" * 30)])


@pytest.fixture
def stand_in(monkeypatch):
    """lm_eval.api.model with the one class that is subclassed."""

    class LM(abc.ABC):
        @abc.abstractmethod
        def loglikelihood(self, requests): ...

        @abc.abstractmethod
        def loglikelihood_rolling(self, requests): ...

        @abc.abstractmethod
        def generate_until(self, requests): ...

    module = types.ModuleType("lm_eval.api.model")
    module.LM = LM
    for name in ("lm_eval", "lm_eval.api"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", module)
    return LM


def request(*args):
    return types.SimpleNamespace(args=args)


def test_the_adapter_hands_requests_over(stand_in):
    one = scorer()
    model = harness_model(one)
    assert isinstance(model, stand_in)
    pair = ("call me", " ishmael")
    assert model.loglikelihood([request(*pair)]) == one.continuations([pair])
    assert model.loglikelihood_rolling([request("call me")]) == one.texts(["call me"])
    options = {"until": ["zq"], "max_gen_toks": 4, "do_sample": False, "temperature": 0.0}
    assert model.generate_until([request("call me", options)]) == [one.generate("call me", ["zq"], 4)]
    assert model.generate_until([request("a", {"until": "zq", "max_gen_toks": 2})]) == [one.generate("a", ["zq"], 2)]
    with pytest.raises(InteropError, match=r"continuations are greedy, so say do_sample=false"):
        model.generate_until([request("a", {"do_sample": True, "temperature": 0.7})])


def test_an_absent_harness_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MissingPackageError, match=r"the evaluation harness needs 'lm_eval': pip install 'lm_eval'"):
        harness_model(scorer())


@pytest.mark.filterwarnings("ignore")
def test_a_local_task_runs_under_the_harness(tmp_path):
    lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    from lm_eval.tasks import TaskManager

    rows = [{"text": "call me", "choices": [" ishmael", " ahab", " b"], "label": i % 3} for i in range(6)]
    datasets.Dataset.from_list(rows).to_json(tmp_path / "rows.json")
    common = f"dataset_path: json\ndataset_kwargs:\n  data_files: {{test: {tmp_path}/rows.json}}\ntest_split: test\n"
    (tmp_path / "choice.yaml").write_text(
        f"task: choice\noutput_type: multiple_choice\n{common}doc_to_text: text\ndoc_to_choice: choices\n"
        "doc_to_target: label\nmetric_list:\n  - metric: acc\n"
    )
    (tmp_path / "rolling.yaml").write_text(
        f"task: rolling\noutput_type: loglikelihood_rolling\n{common}doc_to_text: ''\ndoc_to_target: text\n"
        "metric_list:\n  - metric: bits_per_byte\n"
    )
    (tmp_path / "generation.yaml").write_text(
        f"task: generation\noutput_type: generate_until\n{common}doc_to_text: text\ndoc_to_target: text\n"
        "generation_kwargs: {until: ['zq'], max_gen_toks: 3, do_sample: false}\nmetric_list:\n  - metric: exact_match\n"
    )
    one = scorer()
    results = lm_eval.simple_evaluate(
        model=harness_model(one), tasks=["choice", "rolling", "generation"], bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
    )["results"]  # fmt: skip
    scores = [value for value, _ in one.continuations([("call me", choice) for choice in rows[0]["choices"]])]
    assert results["choice"]["acc,none"] == pytest.approx(np.mean([np.argmax(scores) == row["label"] for row in rows]))
    bits = -one.texts(["call me"])[0] / np.log(2) / len("call me")
    assert results["rolling"]["bits_per_byte,none"] == pytest.approx(bits)
    assert results["generation"]["exact_match,none"] == float(one.generate("call me", ["zq"], 3) == "call me")
