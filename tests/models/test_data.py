# SPDX-License-Identifier: Apache-2.0
"""Which bytes a step sees."""

import dataclasses
import pathlib
import shutil
import tracemalloc

import numpy as np
import pytest

from jax_ulysses.models import data
from jax_ulysses.models.config import ConfigError
from jax_ulysses.models.data import load_corpus, train_batch, valid_batch


def _batch(corpus, **changes):
    settings = {"seed": 0, "step": 3, "batch": 4, "seq_len": 16} | changes
    return train_batch(corpus, **settings)


def test_batches_depend_on_text_seed_and_step_only(corpus, text):
    again = load_corpus(text, 32)
    for mine, theirs in zip(_batch(corpus), _batch(again), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for change in ({"seed": 1}, {"step": 4}):
        assert not np.array_equal(_batch(corpus)[0], _batch(corpus, **change)[0])


def test_targets_are_the_next_bytes_of_the_text(corpus):
    tokens, targets = _batch(corpus, batch=64)
    assert tokens.dtype == targets.dtype == np.int32
    np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
    text = corpus.train.tobytes()
    for row, last in zip(tokens, targets[:, -1], strict=True):
        assert bytes([*row, last]) in text


def test_train_and_valid_share_no_byte(text):
    whole = b"".join(sorted((text / n).read_bytes() for n in ("a.txt", "b.txt")))
    corpus = load_corpus(text, 32)
    # A partition of the text (files may be in either order), the smaller part last.
    joined = corpus.train.tobytes() + corpus.valid.tobytes()
    assert len(joined) == len(whole)
    assert sorted(joined) == sorted(whole)
    assert 0.04 < len(corpus.valid) / len(joined) < 0.06
    tokens, targets = valid_batch(corpus, index=0, batch=64, seq_len=32)
    for row, last in zip(tokens, targets[:, -1], strict=True):
        assert bytes([*row, last]) in corpus.valid.tobytes()


def test_every_start_is_reachable_and_none_overruns(tmp_path):
    path = tmp_path / "digits"
    path.write_bytes(b"0123456789")
    corpus = load_corpus(path, 3)  # 6 bytes to train on, 4 held out.
    seen = set()
    for step in range(200):
        tokens, _ = train_batch(corpus, seed=0, step=step, batch=1, seq_len=3)
        seen.add(bytes(tokens[0].tolist()))
    assert seen == {b"012", b"123", b"234"}


def _write(root, *names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("some text " * 50)


def test_binary_and_hidden_files_are_left_out(text, tmp_path):
    corpus = load_corpus(text, 32)
    assert (corpus.num_files, corpus.num_binary) == (2, 1)
    _write(tmp_path, ".hidden", ".git/config", "kept/y.txt", "test/z")
    assert load_corpus(tmp_path, 32).num_files == 2


@pytest.mark.parametrize("kept", [100, 8192, 9000, 25_000, 40_000, 10**6])
def test_no_more_is_read_than_is_kept(kept, tmp_path, monkeypatch):
    rng = np.random.default_rng(5)
    sizes = (1, 7000, 20_000, 8193, 0, 9000)
    for number, size in enumerate(sizes):
        (tmp_path / f"{number}").write_bytes(rng.integers(1, 255, size, np.uint8))
    for number, zero in ((6, 50), (7, 8191), (8, 8192)):
        text = rng.integers(1, 255, 10_000, np.uint8)
        text[zero] = 0
        (tmp_path / f"{number}").write_bytes(text)
    # All files in the order of the shuffle, those binary in their head left out.
    whole = [(tmp_path / str(n)).read_bytes() for n in range(9)]
    order = np.random.default_rng(0).permutation(9)
    text = b"".join(whole[n] for n in order if n not in (6, 7))[:kept]

    opened = []
    open_ = pathlib.Path.open
    monkeypatch.setattr(
        pathlib.Path, "open", lambda *a, **k: opened.append(a[0]) or open_(*a, **k)
    )
    monkeypatch.setattr(data, "_MAX_BYTES", kept)
    corpus = load_corpus(tmp_path, 16)
    assert corpus.train.tobytes() + corpus.valid.tobytes() == text
    ends = np.cumsum([0 if n in (6, 7) else len(whole[n]) for n in order])
    assert len(opened) == min(9, np.searchsorted(ends, kept) + 1)


def test_a_large_file_is_not_read_whole(tmp_path, monkeypatch):
    (tmp_path / "large").write_bytes(b"x" * 20_000_000)
    monkeypatch.setattr(data, "_MAX_BYTES", 100_000)
    tracemalloc.start()
    try:
        assert load_corpus(tmp_path, 16).num_files == 1
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_installed_packages_are_not_the_standard_library(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    _write(tmp_path, "ast.py", "json/decoder.py", "README.txt", "test/t.py")
    _write(tmp_path, "site-packages/numpy/core.py", "dist-packages/apt.py")
    assert load_corpus(None, 32).num_files == 2


def test_the_fingerprint_follows_the_text(text, tmp_path, corpus):
    assert load_corpus(text, 32).fingerprint == corpus.fingerprint
    other = tmp_path / "other.txt"
    other.write_bytes((text / "a.txt").read_bytes()[:-1] + b"!")
    changed = load_corpus(other, 32).fingerprint
    assert changed != load_corpus(text / "a.txt", 32).fingerprint


def test_what_the_run_writes_is_not_part_of_the_text(text, tmp_path, monkeypatch):
    root = shutil.copytree(text, tmp_path / "text")
    before = load_corpus(root, 32).fingerprint
    _write(root, "runs/a/metrics.jsonl", "runs/a/checkpoints/4/metadata")
    assert load_corpus(root, 32).fingerprint != before
    monkeypatch.chdir(root)
    (tmp_path / "link").symlink_to(root)
    here, link = pathlib.Path(), tmp_path / "link"
    inside = pathlib.Path("runs/a")
    for path, out in [(root, root / "runs"), (here, root / inside), (link, inside)]:
        assert load_corpus(path, 32, out).fingerprint == before
    # A folder around the text, or with its name as a prefix, takes nothing away.
    files = load_corpus(root, 32).num_files
    for out in (tmp_path, tmp_path / "text2", root / "runs/b"):
        assert load_corpus(root, 32, out).num_files == files == 4
    with pytest.raises(ConfigError, match="--out .* is the folder of the text"):
        load_corpus(root, 32, here)


def test_another_text_is_named_as_the_reason(corpus, train_config):
    saved = train_config(fingerprint=corpus.fingerprint)
    corpus.check_unchanged(saved, saved.seq_len)
    changed = dataclasses.replace(saved, fingerprint="f")
    with pytest.raises(ConfigError, match=r"the text has changed.*it was f\)"):
        corpus.check_unchanged(changed, saved.seq_len)
    # That is for `check_resumable` to say.
    corpus.check_unchanged(changed, 2 * saved.seq_len)


def test_the_default_is_the_standard_library():
    corpus = load_corpus(None, 512)
    assert len(corpus.train) > 1_000_000
    assert b"import " in corpus.train[:200_000].tobytes()


def test_too_little_text_says_how_much_is_needed(tmp_path):
    with pytest.raises(ConfigError, match="0 bytes in 0 files.*need at least 66"):
        load_corpus(tmp_path, 32)
    (tmp_path / "wide").write_text("some text " * 50, encoding="utf-16")
    with pytest.raises(ConfigError, match="0 files, 1 binary .* UTF-16 has. left out"):
        load_corpus(tmp_path, 32)
    (tmp_path / "short").write_bytes(b"x" * 65)
    with pytest.raises(ConfigError, match="65 bytes in 1 files"):
        load_corpus(tmp_path, 32)
    with pytest.raises(ConfigError, match="no such file or folder"):
        load_corpus(tmp_path / "nothing", 32)
