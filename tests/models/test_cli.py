# SPDX-License-Identifier: Apache-2.0
"""Wrong command lines end with one line and exit code 2."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import pytest

from jax_ulysses import TokenOrder
from jax_ulysses.models.cli import parse, provide_virtual_devices
from jax_ulysses.models.config import (
    ConfigError,
    TrainConfig,
    check,
    check_resumable,
)
from jax_ulysses.models.presets import get_preset, preset_names
from jax_ulysses.models.train import main

_WRONG = {
    "unknown preset": (["--preset", "huge"], "unknown preset 'huge'.*tiny.*llama3_8b"),
    "unknown flag": (["--speed", "9"], "unrecognized arguments: --speed 9"),
    "not a number": (["--steps", "ten"], "argument --steps: invalid int value: 'ten'"),
    "batch and dp": (["--dp", "3"], "batch 4 is not divisible by dp 3"),
    "sequence and cp": (["--seq-len", "510"], "seq_len 510 is not divisible by cp 4"),
    "zigzag": (
        ["--seq-len", "508", "--token-order", "zigzag"],
        r"seq_len 508 is not divisible by 2 \* cp = 8 in zigzag order",
    ),
    "heads": (["--cp", "16"], "8 query heads cannot be split over cp 16"),
    "no ranks": (["--dp", "0"], "dp must be at least 1, got 0"),
    "no steps": (["--steps", "0"], "steps must be at least 1"),
    "rate": (["--lr", "-1"], "lr must be positive"),
    "infinite rate": (["--lr", "inf"], "lr must be positive and finite, got inf"),
    "rate that is none": (["--lr", "nan"], "lr must be positive and finite, got nan"),
    "negative seed": (["--seed", "-1"], r"seed must be from 0 to 2\*\*32 - 1, got -1"),
    "large seed": (["--seed", str(2**32)], "seed must be from 0 .* got 4294967296"),
    "attention and dtype": (
        ["--attention", "cudnn"],
        "attention cudnn needs dtype bf16, got fp32",
    ),
    "attention and devices": (
        ["--attention", "cudnn", "--dtype", "bf16"],
        "attention cudnn needs GPUs, these devices are cpu",
    ),
    "no such text": (["--data", "/no/such/text"], "no such file or folder"),
    "nothing to read": (["--data", "/dev/null"], "no such file or folder: /dev/null"),
    "resume where": (["--resume"], "--resume needs --out"),
    "absent backend": (
        ["--implementation", "cuda", "--seq-len", "32"],
        "--implementation cuda",
    ),
}


@pytest.mark.parametrize("name", _WRONG)
def test_wrong_arguments_are_one_line(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XLA_FLAGS", "")
    arguments, pattern = _WRONG[name]
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    *others, last = captured.err.splitlines()
    assert all(line.startswith("text: ") for line in others)
    assert re.search(pattern, last), last
    assert last.startswith("error: ")
    assert not list(tmp_path.iterdir()), "a run that cannot start leaves nothing"


def test_resume_without_a_checkpoint(tmp_path, capsys):
    assert main(["--resume", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"error: --resume: there is no checkpoint in {tmp_path}\n"
    )


@pytest.mark.parametrize("below", [[], ["x"], ["x", "y"]])
def test_out_is_no_file_and_not_below_one(below, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    out = file.joinpath(*below)
    # The text is not read either.
    assert main(["--out", str(out), "--data", "/no/such/text"]) == 2
    assert capsys.readouterr().err == (
        f"error: --out {out}: {file} is a file; it must be a folder\n"
    )


def test_a_folder_that_cannot_be_written_to(tmp_path, capsys, monkeypatch):
    # Root may write anywhere, so the answer is made up.
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    out = tmp_path / "runs" / "a"
    assert main(["--out", str(out), "--data", "/no/such/text"]) == 2
    assert capsys.readouterr().err == (
        f"error: --out {out}: {tmp_path} cannot be written to\n"
    )


def test_a_folder_that_cannot_be_made(capsys):
    out = "/proc/no/such/folder"
    settings = ["--preset", "tiny", "--dp", "1", "--cp", "1", "--steps", "1"]
    assert main([*settings, "--no-parity", "--out", out]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"error: {out}/checkpoints cannot be made: [Errno 2] ")


def test_a_run_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "checkpoints" / "50").mkdir(parents=True)
    assert main(["--out", str(tmp_path)]) == 2
    assert "holds a run already: add --resume" in capsys.readouterr().err


def test_a_missing_path_in_a_process_of_its_own(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "jax_ulysses.models.train", "--data", "/no/such/text"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == "error: no such file or folder: /no/such/text\n"


def test_too_few_devices_are_named(tmp_path, monkeypatch, capsys):
    # The tests' backend is up already, with 8 devices; as on a machine with 8 GPUs.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XLA_FLAGS", "")
    assert main(["--dp", "4", "--cp", "4", "--seq-len", "32"]) == 2
    assert "dp 4 x cp 4 needs 16 devices, there are 8" in capsys.readouterr().err


def test_kv_heads_and_cp_must_fit(train_config, model_config):
    six = dataclasses.replace(model_config, num_heads=12, num_kv_heads=6)
    with pytest.raises(ConfigError, match="6 KV heads and cp 4 do not fit"):
        check(train_config(model=six, cp=4))
    check(train_config(model=six, cp=2))
    check(train_config(model=six, cp=12, seq_len=48))


def test_defaults_come_from_the_preset(tmp_path):
    options = parse(["--out", str(tmp_path), "--cp", "2", "--token-order", "zigzag"])
    config, preset = options.config, get_preset("tiny")
    assert (config.dp, config.cp) == (2, 2)
    assert config.token_order is TokenOrder.ZIGZAG
    assert config.model == preset.model
    assert (config.seq_len, config.steps) == (preset.seq_len, preset.steps)


def test_a_resumed_run_keeps_its_settings(tmp_path, train_config):
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    saved = train_config(preset="tiny", steps=77, fingerprint="f")
    (tmp_path / "config.json").write_text(saved.to_json())
    options = parse(["--resume", "--out", str(tmp_path), "--cp", "2"])
    assert options.saved == saved
    now = dataclasses.replace(options.config, fingerprint="f")
    assert now == dataclasses.replace(saved, cp=2)
    check_resumable(saved, now)
    for change in ({"steps": 78}, {"fingerprint": "g"}, {"batch": 4}):
        with pytest.raises(ConfigError, match=next(iter(change))):
            check_resumable(saved, dataclasses.replace(now, **change))


def test_settings_survive_the_file(tmp_path, train_config):
    path = tmp_path / "config.json"
    path.write_text(train_config().to_json())
    assert TrainConfig.from_file(path) == train_config()
    path.write_text(json.dumps({"preset": "tiny"}))
    with pytest.raises(ConfigError, match="cannot read settings"):
        TrainConfig.from_file(path)


def test_every_preset_is_consistent(train_config):
    for name in preset_names():
        preset = get_preset(name)
        check(
            train_config(
                preset=name,
                model=preset.model,
                seq_len=preset.seq_len,
                batch=preset.batch,
            )
        )
    model = get_preset("llama3_8b").model
    assert (model.num_heads, model.num_kv_heads, model.d_model) == (32, 8, 4096)


@pytest.mark.parametrize(
    ("before", "after"),
    [("", 8), ("--xla_force_host_platform_device_count=16", 16)],
)
def test_virtual_devices(before, after, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_a=1 {before}")
    provide_virtual_devices(8)
    assert os.environ["XLA_FLAGS"].split() == [
        "--xla_a=1",
        f"--xla_force_host_platform_device_count={after}",
    ]
