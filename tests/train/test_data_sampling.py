"""Batches: a pure function of (seed, step), one pass an epoch, the same over processes; and the validation walk."""

import threading
from pathlib import Path

import numpy as np
import pytest

from fp4jax.train.data import (
    Batches,
    ByteTokenizer,
    Corpus,
    DataError,
    DocumentRule,
    PrepareOptions,
    Source,
    prepare,
    validation_batches,
)

SEQ = 16


class _Counting(ByteTokenizer):
    """Wide ids, so that every token of a test corpus can be told from the others."""

    vocab_size = 1 << 16
    end_of_document = (1 << 16) - 1


def counting(*lengths: int, start: int = 0) -> Corpus:
    """Sources of one document whose tokens count up over the whole corpus."""
    sources = []
    for index, length in enumerate(lengths):
        tokens = np.arange(start, start + length, dtype=np.uint16)
        sources.append(Source.from_documents(f"s{index}", [(tokens, length)]))
        start += length
    return Corpus(tuple(sources), _Counting())


def tokens_of(batches: Batches, steps) -> np.ndarray:
    return np.concatenate([batches.batch(step)["tokens"] for step in steps])


def test_rows_are_windows_that_overlap_by_one_token():
    corpus = counting(500, 141)  # 640 targets: 40 windows
    batches = Batches(corpus, SEQ, 8, seed=0)
    batch = batches.batch(3)
    assert list(batch) == ["tokens"]
    assert batch["tokens"].shape == (8, SEQ + 1)
    assert batch["tokens"].dtype == np.int32
    assert (np.diff(batch["tokens"], axis=1) == 1).all()
    assert (batch["tokens"][:, 0] % SEQ == 0).all()
    assert batches.num_windows == 40


@pytest.mark.parametrize("batch_size", [8, 12])  # 40 windows: an epoch ends with a batch, and within one
def test_each_window_is_seen_once_an_epoch_in_a_new_order(batch_size):
    batches = Batches(counting(641), SEQ, batch_size, seed=0)
    first_tokens = tokens_of(batches, range(3 * 120 // batch_size))[:, 0]
    epochs = first_tokens[:360].reshape(9, 40)
    assert (np.sort(epochs, axis=1) == np.arange(0, 640, SEQ)).all()
    assert len({tuple(epoch) for epoch in epochs}) == 9
    # All targets of an epoch: every token but the first, once.
    epoch = tokens_of(batches, range(-(-40 // batch_size)))[:40, 1:]
    assert sorted(epoch.ravel().tolist()) == list(range(1, 641))


def test_leftover_tokens_fill_no_window():
    assert Batches(counting(SEQ + 1), SEQ, 1, seed=0).num_windows == 1
    assert Batches(counting(2 * SEQ), SEQ, 1, seed=0).num_windows == 1
    assert Batches(counting(2 * SEQ + 1), SEQ, 1, seed=0).num_windows == 2


def test_steps_are_random_access_and_seeds_differ():
    corpus = counting(6401)
    batches, again = Batches(corpus, SEQ, 4, seed=7), Batches(corpus, SEQ, 4, seed=7)
    forward = [batches.batch(step)["tokens"] for step in range(6)]
    for step in (5, 0, 3, 3):
        assert (again.batch(step)["tokens"] == forward[step]).all()
    other = Batches(corpus, SEQ, 4, seed=8)
    assert not (other.batch(0)["tokens"] == forward[0]).all()


def test_neighboring_seeds_do_not_replay_each_other_an_epoch_later():
    corpus = counting(641)
    orders = {
        (seed, epoch): tuple(tokens_of(Batches(corpus, SEQ, 40, seed), [epoch])[:, 0])
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(set(orders.values())) == 16


def test_the_order_of_a_seed_is_pinned():
    # Resuming with another version of fp4jax or grain must see the same windows.
    rows = tokens_of(Batches(counting(641), SEQ, 4, seed=0), [0, 1000])[:, 0] // SEQ
    assert rows.tolist() == [18, 35, 16, 7, 39, 29, 35, 31]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_processes_share_a_batch_row_for_row(count):
    corpus = counting(641)
    whole = Batches(corpus, SEQ, 12, seed=3)
    parts = [Batches(corpus, SEQ, 12, seed=3, process_index=i, process_count=count) for i in range(count)]
    for step in (0, 3, 10**6):
        rows = [part.batch(step)["tokens"] for part in parts]
        assert all(row.shape == (12 // count, SEQ + 1) for row in rows)
        assert (np.concatenate(rows) == whole.batch(step)["tokens"]).all()


@pytest.mark.parametrize("start", [0, 1, 9, 10, 11])
def test_prefetch_from_any_step_continues_the_uninterrupted_run(start):
    batches = Batches(counting(641), SEQ, 4, seed=1)  # 10 steps an epoch
    iterator = batches.prefetch(start, buffer_size=3)
    for step in range(start, start + 15):
        assert (next(iterator)["tokens"] == batches.batch(step)["tokens"]).all()
    iterator.close()


def test_prefetch_runs_ahead_in_one_background_thread():
    seen: list[tuple[int, str]] = []
    ahead = threading.Event()

    class Watched(Batches):
        def batch(self, step):
            seen.append((step, threading.current_thread().name))
            if step == 3:
                ahead.set()
            return super().batch(step)

    iterator = Watched(counting(641), SEQ, 4, seed=1).prefetch(buffer_size=3)
    next(iterator)
    assert ahead.wait(timeout=30)
    iterator.close()
    assert [step for step, _ in seen] == [0, 1, 2, 3]
    names = {name for _, name in seen}
    assert len(names) == 1
    assert threading.current_thread().name not in names


def test_prefetch_raises_what_happens_in_the_thread():
    class Broken(Batches):
        def batch(self, step):
            raise OSError(f"the disk is gone at step {step}")

    iterator = Broken(counting(641), SEQ, 4, seed=1).prefetch()
    with pytest.raises(OSError, match="the disk is gone at step 0"):
        next(iterator)
    iterator.close()


def test_memory_mapped_and_split_corpora_give_the_tokens_of_their_documents(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join(f"document {i} " + "words " * (i % 9) for i in range(300)))
    corpus = prepare(PrepareOptions((path,), tmp_path / "out", vocab_size=260, documents=DocumentRule(min_chars=0)))
    train = corpus.split(0.2).train
    batches = Batches(train, SEQ, 8, seed=0)
    rows = tokens_of(batches, range(-(-batches.num_windows // 8)))[: batches.num_windows]
    stream = np.concatenate([corpus.sources[0].tokens[a:b] for a, b in train.sources[0].spans])
    assert sorted(map(tuple, rows.tolist())) == sorted(
        tuple(stream[i * SEQ : (i + 1) * SEQ + 1].tolist()) for i in range(batches.num_windows)
    )
    assert isinstance(train.sources[0].tokens, np.memmap)
    assert train.sources[0].tokens is corpus.sources[0].tokens


def test_training_errors():
    corpus = counting(100)
    with pytest.raises(DataError, match=r"has 100 tokens, and one sequence takes seq_len \+ 1 = 101: give more text"):
        Batches(corpus, 100, 1, seed=0)
    assert Batches(corpus, 99, 1, seed=0).num_windows == 1
    for arguments, message in [
        ({"seq_len": 0}, "seq_len=0 must be positive"),
        ({"seed": -1}, "seed=-1 must not be negative"),
        ({"batch_size": 0}, "batch_size=0 must be a positive multiple of process_count=1"),
        ({"batch_size": 6, "process_count": 4}, "batch_size=6 must be a positive multiple of process_count=4"),
        ({"process_count": 2, "process_index": 2}, r"process_index=2 must be in \[0, 2\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            Batches(**{"corpus": corpus, "seq_len": SEQ, "batch_size": 4, "seed": 0} | arguments)
    batches = Batches(corpus, SEQ, 2, seed=2**70)
    with pytest.raises(ValueError, match="step=-1 must not be negative"):
        batches.batch(-1)
    with pytest.raises(ValueError, match="buffer_size=0 must be positive"):
        batches.prefetch(buffer_size=0)


# Sources of 100, 1, 0, 33 and 17 tokens: full windows, none, none, full, and full with nothing left over.
LENGTHS = (100, 1, 0, 33, 17)


def uneven() -> Corpus:
    full = counting(100, 1, 5, 33, 17)
    empty = full.sources[2].select(np.zeros(1, bool))
    return Corpus((*full.sources[:2], empty, *full.sources[3:]), full.tokenizer)


@pytest.mark.parametrize("batch_size", [1, 4, 5, 64])
def test_validation_counts_every_target_once_under_its_source(batch_size):
    corpus = uneven()
    batches = validation_batches(corpus, SEQ, batch_size)
    targets: dict[int, list[int]] = {}
    for batch in batches:
        assert batch["tokens"].shape == (batch_size, SEQ + 1)
        assert (batch["tokens"].dtype, batch["weights"].dtype, batch["source"].dtype) == (
            np.int32,
            np.float32,
            np.int32,
        )
        for row, weights, source in zip(batch["tokens"], batch["weights"], batch["source"]):
            counted = int(weights.sum())
            assert (weights == (np.arange(SEQ) < counted)).all()
            if counted:
                assert (np.diff(row[: counted + 1]) == 1).all()
            assert (row[counted + 1 :] == corpus.tokenizer.end_of_document).all()
            targets.setdefault(int(source), []).extend(row[1 : counted + 1].tolist())
    starts = dict(zip(range(5), [0, 100, 0, 106, 139]))
    for source, length in enumerate(LENGTHS):
        first = starts[source]
        assert targets.get(source, []) == list(range(first + 1, first + length))
    assert len(batches) == -(-(7 + 2 + 1) // batch_size)


def test_validation_is_the_same_every_time_and_indexable():
    corpus = uneven()
    first, again = validation_batches(corpus, SEQ, 4), validation_batches(corpus, SEQ, 4)
    for left, right in zip(first, again, strict=True):
        assert all((left[name] == right[name]).all() for name in ("tokens", "weights", "source"))
    with pytest.raises(IndexError, match="validation batch 3 of 3"):
        _ = first[3]


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("limit", [None, 2])
def test_validation_over_processes_is_the_single_process_batch(count, limit):
    corpus = uneven()
    whole = validation_batches(corpus, SEQ, 4, limit=limit)
    parts = [
        validation_batches(corpus, SEQ, 4, limit=limit, process_index=i, process_count=count) for i in range(count)
    ]
    assert {len(part) for part in parts} == {len(whole)}
    for index, batch in enumerate(whole):
        for name, value in batch.items():
            assert (np.concatenate([part[index][name] for part in parts]) == value).all()


def test_a_limit_spreads_over_the_whole_split():
    corpus = counting(SEQ * 400 + 1, SEQ * 200 + 1)
    batches = validation_batches(corpus, SEQ, 5, limit=12)
    assert len(batches) == 12
    rows = np.concatenate([batch["tokens"][:, 0] for batch in batches])
    sources = np.concatenate([batch["source"] for batch in batches])
    assert np.bincount(sources).tolist() == [40, 20]
    assert len(set(rows.tolist())) == 60
    assert (np.diff(rows) >= 10 * SEQ).all()
    assert (np.diff(rows) <= 10 * SEQ + 1).all()
    assert all(batch["weights"].all() for batch in batches)
    assert len(validation_batches(corpus, SEQ, 5, limit=120)) == 120
    assert len(validation_batches(corpus, SEQ, 5, limit=9999)) == 120


def test_validation_errors():
    corpus = counting(100)
    with pytest.raises(DataError, match="the validation split is empty: give a validation_fraction above 0"):
        validation_batches(corpus.split(0).validation, SEQ, 4)
    with pytest.raises(ValueError, match="limit=0 must be positive, or None for the whole split"):
        validation_batches(corpus, SEQ, 4, limit=0)
    with pytest.raises(ValueError, match="seq_len=-1 must be positive"):
        validation_batches(corpus, -1, 4)
    with pytest.raises(ValueError, match="batch_size=4 must be a positive multiple of process_count=3"):
        validation_batches(corpus, SEQ, 4, process_count=3)
