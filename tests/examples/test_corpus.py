"""The corpus is the same everywhere, and its batches resume bit for bit."""

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from meshpar.examples.corpus import batch_at, batches, load_corpus

DATA = np.random.default_rng(0).integers(256, size=500, dtype=np.uint8)


@pytest.fixture
def library(tmp_path):
    """Two hundred files of their own names, and some that must not be read."""
    for i in range(200):
        folder = tmp_path / f"package{i % 7}"
        folder.mkdir(exist_ok=True)
        (folder / f"module{i}.py").write_bytes(f"<{i}>".encode())
    for skipped in ("test", "package1/tests", "idlelib", "site-packages/x", "dist-packages"):
        (tmp_path / skipped).mkdir(parents=True)
        (tmp_path / skipped / "module.py").write_bytes(b"SKIPPED")
    (tmp_path / "notes.txt").write_bytes(b"SKIPPED")
    return tmp_path


def files(part):
    return set(part.tobytes().decode().strip("<>").split("><"))


def test_each_file_is_in_one_part(library):
    corpus = load_corpus(root=library)
    train, validation = files(corpus.train), files(corpus.validation)
    assert train | validation == {str(i) for i in range(200)}
    assert not train & validation
    assert 1 <= len(validation) <= 25  # about one in twenty


def test_one_more_file_moves_no_other(library):
    before = load_corpus(root=library)
    (library / "another.py").write_bytes(b"<another>")
    after = load_corpus(root=library)
    assert files(after.validation) - {"another"} == files(before.validation)
    assert files(after.train) - {"another"} == files(before.train)


def test_the_cap_keeps_whole_files(library):
    whole = load_corpus(root=library)
    capped = load_corpus(root=library, max_bytes=100)
    assert 90 < len(capped.train) + len(capped.validation) <= 100
    assert files(capped.train) < files(whole.train)


def test_a_folder_without_source_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no \.py file"):
        load_corpus(root=tmp_path)


def test_the_standard_library_is_a_megabyte_and_the_same_in_every_process():
    corpus = load_corpus(max_bytes=2_000_000)
    assert len(corpus.train) > 1_000_000
    assert len(corpus.validation) > 10_000
    code = (
        "from meshpar.examples.corpus import load_corpus; import zlib;"
        "c = load_corpus(max_bytes=2_000_000); print(zlib.crc32(c.train), zlib.crc32(c.validation))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1


def test_labels_are_the_next_tokens():
    batch = batch_at(DATA, 4, 16, seed=0, step=3)
    assert batch["tokens"].shape == batch["labels"].shape == (4, 16)
    assert batch["tokens"].dtype == batch["labels"].dtype == np.int32
    assert_array_equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    for row in np.concatenate([batch["tokens"], batch["labels"][:, -1:]], axis=1):
        assert row.astype(np.uint8).tobytes() in DATA.tobytes()


def test_a_run_that_resumes_sees_the_batches_of_one_that_did_not_stop():
    whole = list(itertools.islice(batches(DATA, 3, 8, seed=5), 10))
    resumed = list(itertools.islice(batches(DATA, 3, 8, seed=5, start_step=6), 4))
    for lhs, rhs in zip(whole[6:], resumed, strict=True):
        assert_array_equal(lhs["tokens"], rhs["tokens"])
        assert_array_equal(lhs["labels"], rhs["labels"])


def test_steps_and_seeds_give_other_batches():
    seen = {
        batch_at(DATA, 3, 8, seed=seed, step=step)["tokens"].tobytes()
        for seed in range(4)
        for step in range(4)
    }
    assert len(seen) == 16


def test_every_window_can_be_drawn():
    data = np.arange(4, dtype=np.uint8)
    first = {
        int(batch_at(data, 8, 2, seed=0, step=s)["tokens"][i, 0])
        for s in range(5)
        for i in range(8)
    }
    assert first == {0, 1}
    assert_array_equal(batch_at(data, 1, 3, seed=0, step=0)["labels"], [[1, 2, 3]])


def test_too_little_data_is_refused():
    with pytest.raises(ValueError, match=r"seq_len=500.*needs 501 bytes.*data has 500.*<= 499"):
        batch_at(DATA, 1, 500, seed=0, step=0)
