# SPDX-License-Identifier: Apache-2.0
"""``python -m jax_ulysses doctor``: what it reports, and what it does when broken."""

import json
import subprocess
import sys

import jax
import pytest
from helpers import shadowed

import jax_ulysses
from jax_ulysses import dispatch, reference, selftest
from jax_ulysses.__main__ import main


@pytest.fixture
def doctor(capsys):
    def run(*args):
        status = main(["doctor", *args])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_report_as_json(doctor):
    status, out, _ = doctor("--json", "--geometry", "qwen3_235b_kv4", "--cp", "8")
    report = json.loads(out)
    assert status == 0
    assert report["versions"]["jax"] == jax.__version__
    assert report["versions"]["jax-ulysses"] == jax_ulysses.__version__
    assert report["devices"]["count"] == 8
    assert report["devices"]["peers"] == "ready for host"
    assert "2 slots of 32.0 MiB for data" in report["devices"]["heap"]
    assert report["built"]["extension"] is True
    plan = report["plan"]
    assert (plan["N"], plan["K"], plan["H"], plan["D"]) == (64, 4, 128, 4096)
    assert set(plan["operators"]) == {
        "scatter_heads",
        "gather_heads",
        "qkv_proj_a2a",
        "qkv_proj_a2a.backward",
        "a2a_out_proj",
        "a2a_out_proj.backward",
    }
    for entry in plan["operators"].values():
        assert entry["implementation"] == "xla"
        assert "not on cpu" in entry["not"]["cuda"]
        assert "not on cpu" in entry["not"]["pallas"]
        assert "host" not in entry["not"]  # It could run: the group is there.
    rows = {(r["implementation"], r["error"]) for r in report["self_test"]}
    assert rows == {("xla", None), ("host", None)}
    assert len(report["self_test"]) == 4


def test_more_ranks_than_devices(doctor):
    status, out, _ = doctor(
        "--json", "--heads", "32", "--cp", "16", "--no-self-test", "--dtype", "float32"
    )
    entry = json.loads(out)["plan"]["operators"]["qkv_proj_a2a"]
    assert status == 0
    assert entry["implementation"] == "xla"
    assert "call jax_ulysses.initialize" in entry["not"]["host"]


@pytest.mark.parametrize("command", ["jax_ulysses doctor", "jax_ulysses.doctor"])
def test_text_from_the_shell(command):
    done = subprocess.run(
        [sys.executable, "-m", *command.split(), "--geometry", "llama3_8b"],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "plan for llama3_8b: B=1 S=4096 N=32 K=8 H=128 D=4096 P=8" in done.stdout
    assert "host    qkv_proj_a2a, a2a_out_proj on 8 devices" in done.stdout


def test_the_source_folder_is_recognised(root):
    """In a clone the package without its other parts comes first, unless it is -e."""
    built = shadowed.report(root)["built"]
    assert built["extension"] is None
    assert built["reason"] == (
        "the source folder jax_ulysses/ shadows the installed package: run from "
        f"another folder than {root}, or install with pip install -e ."
    )


def test_list_of_geometries(doctor):
    status, out, _ = doctor("--geometry", "list")
    assert status == 0
    assert json.loads(out)["llama3_8b"]["heads"] == 32


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--geometry", "llama99"], ["'llama99'", "llama3_8b"]),
        (
            ["--geometry", "llama3_8b", "--heads", "30", "--head-dim", "64"],
            ["--geometry llama3_8b fixes --heads, --head-dim"],
        ),
        (["--kv-heads", "8"], ["--kv-heads without --heads"]),
        (["--heads", "30", "--cp", "4"], ["N=30", "P=4", "30 % 4 = 2"]),
        (["--heads", "32", "--cp", "8", "--seq-len", "100"], ["S=100", "100 % 8 = 4"]),
        (["--heads", "32", "--dtype", "int8"], ["int8", "bfloat16"]),
    ],
)
def test_wrong_arguments_are_one_line(doctor, args, words):
    status, out, err = doctor("--no-self-test", *args)
    assert status == 2
    assert not out
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


def test_a_broken_implementation_is_found(doctor, monkeypatch):
    class Swapped:
        check = staticmethod(reference.check)
        gather = staticmethod(reference.gather)
        a2a_gemm = staticmethod(reference.a2a_gemm)

        @staticmethod
        def scatter(ex, parts):
            return tuple(p[:, ::-1] for p in reference.scatter(ex, parts))

        @staticmethod
        def gemm_a2a(ex, x, w, bias, *, w_transposed):
            raise RuntimeError("out of order")

    monkeypatch.setitem(dispatch._BACKENDS, "xla", Swapped)
    status, out, _ = doctor("--json")
    errors = {r["error"] for r in json.loads(out)["self_test"] if r["error"]}
    assert status == 1
    assert errors == {
        "AssertionError: the exchange changed the data",
        "RuntimeError: out of order",
    }


def test_leaves_groups_alone():
    mesh = jax.make_mesh((4,), ("cp",), devices=jax.devices()[:4])
    report = jax_ulysses.initialize(mesh, "cp", 1 << 20)
    try:
        assert all(row["error"] is None for row in selftest.self_test())
        assert jax_ulysses.initialize(mesh, "cp", 1 << 20) is report
    finally:
        jax_ulysses.finalize()
