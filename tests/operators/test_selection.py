# SPDX-License-Identifier: Apache-2.0
"""``implementation=``: what each form means, what is refused, what is logged."""

import logging

import jax
import pytest
from jax.sharding import PartitionSpec as P

import jax_ulysses as ju
from jax_ulysses import dispatch, reference
from jax_ulysses.spec import HeadExchange, Request
from tests.helpers.worlds import world

X = (1, 8, 4, 2)
REQUEST = Request(
    operator="scatter_heads",
    dataflow="scatter",
    exchange=HeadExchange((4,), 2, 4, ("cp",)),
    w_transposed=False,
    platform="cpu",
    dtype="float32",
    shapes=((1, 2, 4, 2),),
)


class Refuses:
    """A backend that can nothing, and says so."""

    def __init__(self, reason):
        self.reason = reason

    def check(self, request):
        raise NotImplementedError(self.reason)


@pytest.fixture
def backends(monkeypatch):
    """Known answers of all implementations but ``xla``; a clean record of choices."""
    table = {
        "cuda": Refuses("no such device"),
        "pallas": Refuses("head_dim too odd"),
        "xla": reference,
        "host": Refuses("not initialised"),
    }
    monkeypatch.setattr(dispatch, "_BACKENDS", table)
    monkeypatch.setattr(dispatch, "_taken", {})
    return table


def _trace(implementation):
    w = world("cp4")
    mapped = w.shard_map(
        lambda x: ju.scatter_heads(x, "cp", implementation=implementation),
        (w.tokens,),
        w.heads,
    )
    jax.eval_shape(mapped, w.abstract(X, spec=w.tokens))
    return ju.taken_implementations()["scatter_heads"]


@pytest.mark.usefixtures("backends")
def test_none_takes_the_best_that_can():
    assert _trace(None) == {
        "implementation": "xla",
        "reason": "first of ['cuda', 'xla'] that can run this call",
        "passed_over": {"cuda": "no such device"},
    }


def test_none_prefers_in_order(backends):
    backends["pallas"] = backends["cuda"] = reference
    assert _trace(None)["implementation"] == "cuda"
    assert _trace(None)["passed_over"] == {}


@pytest.mark.usefixtures("backends")
def test_none_never_takes_the_others(backends):
    backends["xla"] = Refuses("not today")
    backends["host"] = backends["pallas"] = reference
    with pytest.raises(ExceptionGroup) as caught:
        _trace(None)
    assert "pallas" not in str(caught.value)
    assert "host" not in str(caught.value)


@pytest.mark.usefixtures("backends")
def test_a_name_is_exactly_that():
    taken = _trace("xla")
    assert taken["reason"] == "asked for by implementation='xla'"
    assert taken["passed_over"] == {}


@pytest.mark.usefixtures("backends")
@pytest.mark.parametrize("name", ["cuda", "pallas", "host"])
def test_a_single_refusal_is_its_own_error(name):
    with pytest.raises(NotImplementedError, match=rf"scatter_heads: .*{name!r}: \w+"):
        _trace(name)


@pytest.mark.usefixtures("backends")
def test_a_sequence_is_the_first_that_can():
    taken = _trace(("pallas", "xla", "cuda"))
    assert taken["implementation"] == "xla"
    assert taken["passed_over"] == {"pallas": "head_dim too odd"}
    assert _trace(["xla"])["implementation"] == "xla"


@pytest.mark.usefixtures("backends")
def test_all_of_a_sequence_refuse():
    with pytest.raises(
        ExceptionGroup, match=r"scatter_heads: no .*\['cuda', 'host'\]"
    ) as caught:
        _trace(("cuda", "host"))
    kinds = [type(e) for e in caught.value.exceptions]
    texts = [str(e) for e in caught.value.exceptions]
    assert kinds == [NotImplementedError] * 2
    assert "no such device" in texts[0]
    assert "not initialised" in texts[1]


@pytest.mark.parametrize("wrong", ["nccl", (), ("xla", "fast"), "XLA", [""], ("",)])
def test_unknown_names(wrong):
    with pytest.raises(ValueError, match=r"expected None, one of \['cuda', 'pallas', "):
        _trace(wrong)


def test_wrong_arguments_are_no_reason_to_move_on(backends):
    class Broken:
        def check(self, request):
            raise ValueError("a defect")

    backends["cuda"] = Broken()
    with pytest.raises(ValueError, match="a defect"):
        _trace(None)


@pytest.mark.usefixtures("backends")
def test_one_log_line_for_each_choice(caplog):
    caplog.set_level(logging.INFO, "jax_ulysses")
    for _ in range(3):
        _trace(None)
    assert [r.message for r in caplog.records] == [
        "scatter_heads runs on xla (first of ['cuda', 'xla'] that can run this call); "
        "not cuda: no such device"
    ]
    _trace("xla")
    assert len(caplog.records) == 2
    assert "asked for by implementation='xla'" in caplog.records[1].message


def test_settings_replace_the_default(backends):
    backends["host"] = reference
    with ju.settings(implementation="host") as now:
        assert now.implementation == "host"
        assert _trace(None)["implementation"] == "host"
        assert _trace("xla")["implementation"] == "xla"
    assert _trace(None)["implementation"] == "xla"
    with (
        ju.settings(implementation="pallas"),
        pytest.raises(NotImplementedError, match="head_dim too odd"),
    ):
        _trace(None)


def test_a_wrong_default_names_the_choices():
    with ju.settings(implementation="nccl"), pytest.raises(ValueError, match="nccl"):
        _trace(None)


@pytest.mark.usefixtures("backends")
def test_explain_has_a_reason_for_every_implementation():
    assert dispatch.explain(REQUEST) == {
        "cuda": "no such device",
        "pallas": "head_dim too odd",
        "xla": None,
        "host": "not initialised",
    }
    assert ju.available_implementations() == ("cuda", "pallas", "xla", "host")


@pytest.mark.user_case(59)
def test_implementations_with_peers_need_initialize():
    """Never at the first execution: a clear error while tracing."""
    ju.finalize()
    with pytest.raises(NotImplementedError, match="call jax_ulysses.initialize"):
        _trace("host")
    with pytest.raises(NotImplementedError, match="runs on cuda devices, not on cpu"):
        _trace("cuda")


def test_record_is_a_copy():
    _trace("xla")
    ju.taken_implementations()["scatter_heads"]["implementation"] = "other"
    assert ju.taken_implementations()["scatter_heads"]["implementation"] == "xla"


def test_specs_without_the_axis_do_not_reach_selection():
    w = world("cp4")
    mapped = w.shard_map(lambda x: ju.scatter_heads(x, "cp"), (P(),), w.heads)
    with pytest.raises(ValueError, match="replicated over axis 'cp'"):
        jax.eval_shape(mapped, w.abstract(X))
