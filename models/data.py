# SPDX-License-Identifier: Apache-2.0
"""Text as bytes: which files, what is held out, and which bytes a step sees.

A batch is a pure function of (text, seed, step). So a resumed run sees exactly what
the first run would have seen, whatever mesh either runs on, with no state to save.
"""

import dataclasses
import hashlib
import pathlib
import sysconfig

import numpy as np

from .config import ConfigError, TrainConfig

# One byte in twenty is held out for validation.
_VALID_FRACTION = 0.05
# Reading more would slow the start and change nothing for models of this size.
_MAX_BYTES = 64 * 2**20
# A file with a zero byte among its first ones is binary.
_HEAD_BYTES = 8192
# Other people's packages and tests are not part of "the standard library's sources".
_NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "test"})
# An independent stream per use of the seed.
_TRAIN_STREAM, _VALID_STREAM = 0, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """A text, cut in two parts that share no byte.

    Attributes:
      train: uint8 bytes to learn from.
      valid: uint8 bytes to measure on.
      num_files: How many files they came from.
      num_binary: How many files were left out because they are binary.
      source: Where they came from, for people.
    """

    train: np.ndarray
    valid: np.ndarray
    num_files: int
    num_binary: int = 0
    source: str

    @property
    def fingerprint(self) -> str:
        """A short hash of the text and of where it was cut."""
        digest = hashlib.sha256(str(len(self.train)).encode())
        digest.update(self.train)
        digest.update(self.valid)
        return digest.hexdigest()[:16]

    def check_unchanged(self, saved: TrainConfig, seq_len: int) -> None:
        """Checks that this is the text of the run that was `saved`.

        Args:
          saved: Settings of that run.
          seq_len: S now. Another one may cut the text elsewhere, and is an error of
            its own.

        Raises:
          ConfigError: If it is another text.
        """
        if seq_len == saved.seq_len and self.fingerprint != saved.fingerprint:
            raise ConfigError(
                f"cannot resume: the text has changed, {self.source} is not what the "
                f"checkpoint was made with (fingerprint {self.fingerprint}, it was "
                f"{saved.fingerprint})"
            )


def load_corpus(
    path: pathlib.Path | None, seq_len: int, out: pathlib.Path | None = None
) -> Corpus:
    """Reads a text.

    Args:
      path: A file, or a folder that is read recursively; None takes the sources of
        the running Python's standard library.
      seq_len: S; each part must hold at least one sequence and its targets.
      out: Where the run writes. A folder below `path` is left out: its files come
        and change while the text must not.

    Raises:
      ConfigError: If there is no such path, or too little text in it, or the run
        would write between its files.
    """
    if path is None:
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        files = _list_files(root, "*.py", skipped=_NOT_THE_LIBRARY)
        source = f"Python's standard library ({root})"
    elif path.is_dir():
        files, source = _list_files(path, "*"), str(path)
        if out is not None:
            files = _without(files, path, out)
    elif path.is_file():
        files, source = [path], str(path)
    else:
        raise ConfigError(f"no such file or folder: {path}")
    # Shuffled, so that both parts are the same mixture; by a fixed seed, so that the
    # split does not depend on the run's.
    order = np.random.default_rng(0).permutation(len(files))
    texts, size, num_binary = [], 0, 0
    for index in order:
        text = _read_text(files[index], _MAX_BYTES - size)
        if text is None:
            num_binary += 1
        elif text:
            texts.append(text)
            size += len(text)
        if size == _MAX_BYTES:
            break
    data = np.frombuffer(b"".join(texts), np.uint8)
    cut = len(data) - max(int(len(data) * _VALID_FRACTION), seq_len + 1)
    if cut < seq_len + 1:
        raise ConfigError(
            f"too little text in {source}: {len(data)} bytes in {len(texts)} files, "
            f"{num_binary} binary files (with zero bytes, as UTF-16 has) left out; "
            f"sequences of {seq_len} need at least {2 * (seq_len + 1)}"
        )
    return Corpus(
        train=data[:cut],
        valid=data[cut:],
        num_files=len(texts),
        num_binary=num_binary,
        source=source,
    )


def _without(
    files: list[pathlib.Path], root: pathlib.Path, out: pathlib.Path
) -> list[pathlib.Path]:
    """Returns those `files` below `root` that are not below `out`."""
    base, inner = root.resolve(), out.resolve()
    if base == inner:
        raise ConfigError(
            f"--out {out} is the folder of the text: the run's own files would join it"
        )
    if not inner.is_relative_to(base):
        return files
    return [
        path
        for path in files
        if not (base / path.relative_to(root)).is_relative_to(inner)
    ]


def _list_files(
    root: pathlib.Path, pattern: str, skipped: frozenset[str] = frozenset()
) -> list[pathlib.Path]:
    """Returns the files below `root` in a stable order.

    Args:
      root: Where to look.
      pattern: What a file's name looks like.
      skipped: Names of folders to leave out; hidden files and folders always are.
    """

    def wanted(path: pathlib.Path) -> bool:
        parts = path.relative_to(root).parts
        hidden = any(part.startswith(".") for part in parts)
        return not hidden and skipped.isdisjoint(parts) and path.is_file()

    return sorted(path for path in root.rglob(pattern) if wanted(path))


def _read_text(path: pathlib.Path, size: int) -> bytes | None:
    """Returns a file's first `size` bytes, none if unreadable; None if it is binary."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
            if b"\0" in head:
                return None
            return (head + file.read(max(0, size - len(head))))[:size]
    except OSError:
        return b""


def train_batch(
    corpus: Corpus, *, seed: int, step: int, batch: int, seq_len: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens and targets of one step, each [B, S] int32."""
    rng = np.random.default_rng((seed, _TRAIN_STREAM, step))
    return _windows(corpus.train, rng, batch, seq_len)


def valid_batch(
    corpus: Corpus, *, index: int, batch: int, seq_len: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the `index`-th validation batch; the same for every run."""
    rng = np.random.default_rng((0, _VALID_STREAM, index))
    return _windows(corpus.valid, rng, batch, seq_len)


def _windows(
    data: np.ndarray, rng: np.random.Generator, batch: int, seq_len: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cuts random windows. Targets are shifted here, on whole sequences.

    Shifting a shard instead would lose the target of each shard's last token, which is
    the first token of the next rank.
    """
    starts = rng.integers(0, len(data) - seq_len, size=batch)
    rows = starts[:, None] + np.arange(seq_len + 1)
    windows = data[rows].astype(np.int32)
    return windows[:, :-1], windows[:, 1:]
