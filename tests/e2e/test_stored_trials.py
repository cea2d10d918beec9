"""Outcomes of trial builds on disk: what one process has tried, the next does not try again, and whatever an
outcome depends on tells it from others."""

import re
from dataclasses import replace

import pytest
import torch

import tsfuser
from kit.support import fuse, no_fallback, script
from tsfuser import options
from tsfuser.ir.dtypes import DTYPES
from tsfuser.ops import table, trials
from tsfuser.ops.trials import NodeArg
from tsfuser.planning import stored_plans, stored_trials

MATRIX = NodeArg("tensor", "float32", 2)


@pytest.fixture
def again(monkeypatch):
    """A function after which nothing is known that is not on disk, as in a new process. Gives the names of
    rows that are tried from then on."""

    def start():
        tried = []
        trials.infer.cache_clear()
        monkeypatch.setattr(trials, "OUTCOMES", {})
        monkeypatch.setattr(stored_trials, "OUTCOMES", trials.OUTCOMES)
        monkeypatch.setattr(stored_trials, "_seen", {})
        monkeypatch.setattr(trials, "try_", lambda row, *rest: tried.append(row.name) or try_(row, *rest))
        return tried

    try_ = trials.try_
    yield start
    trials.infer.cache_clear()


@pytest.fixture(autouse=True)
def store(tmp_path):
    """An empty folder for what is kept."""
    with options.override(stored_plans=True, cache_dir=tmp_path / "cache"), no_fallback():
        yield tmp_path / "cache"


def run():
    """What `explain` says of a program that is scripted anew, without its times."""
    program = script("def f(x: Tensor, y: Tensor):\n    return (x * 2.5 + y).relu().softmax(-1).sort(0)[0]\n")
    inputs = torch.randn(6, 40), torch.randn(40)
    fused = fuse(program, *inputs)
    torch.testing.assert_close(fused(*inputs), (inputs[0] * 2.5 + inputs[1]).relu().softmax(-1).sort(0)[0])
    return re.sub(r"[\d.]+", "", str(tsfuser.explain(fused, *inputs)))


def tried_in_a_new_process(again):
    tried = again()
    run()
    return tried


def test_a_second_process_tries_nothing(again):
    assert {"aten::mul", "aten::relu", "aten::softmax"} <= set(tried_in_a_new_process(again))
    assert tried_in_a_new_process(again) == []


def test_groups_are_the_same(again):
    again()
    wanted = run()
    again()
    assert run() == wanted


def test_another_version_tries_again(again, monkeypatch):
    first = tried_in_a_new_process(again)
    monkeypatch.setattr(stored_plans, "VERSIONS", ("another",))
    assert tried_in_a_new_process(again) == first


def test_another_folder_tries_again(again, tmp_path):
    first = tried_in_a_new_process(again)
    with options.override(cache_dir=tmp_path / "other"):
        assert tried_in_a_new_process(again) == first


def test_nothing_is_kept_where_an_option_says_so(again, store):
    with options.override(stored_plans=False):
        first = tried_in_a_new_process(again)
    assert not list(store.glob("??/*.trials"))
    assert tried_in_a_new_process(again) == first
    with options.override(stored_plans=False):
        assert tried_in_a_new_process(again) == first


def test_what_cannot_be_read_is_tried(again, monkeypatch):
    first = tried_in_a_new_process(again)
    monkeypatch.setattr(stored_trials.marshal, "loads", lambda content: [1, 2])
    assert tried_in_a_new_process(again) == first


def test_outcomes_of_two_processes_are_kept(again):
    relu = table.find("aten::relu")
    for name in ("float32", "float64"):
        again()
        relu.infer({"self": NodeArg("tensor", name, 2)}, "cpu")
        stored_trials.keep()  # without a look at what is there
    tried = again()
    stored_trials.read()
    for name in ("float32", "float64", "int64"):
        relu.infer({"self": NodeArg("tensor", name, 2)}, "cpu")
    assert tried == ["aten::relu"]


def test_a_file_has_the_latest_outcomes(again, monkeypatch):
    monkeypatch.setattr(stored_trials, "_MOST", 2)
    again()
    for rank in range(1, 5):
        table.find("aten::relu").infer({"self": replace(MATRIX, rank=rank)}, "cpu")
    stored_trials.keep()
    again()
    stored_trials.read()
    assert sorted(key.partition("float32 ")[2][0] for key in map(_arguments, trials.OUTCOMES)) == ["3", "4"]


def _arguments(key):
    return key.partition("self: ")[2]


@pytest.mark.parametrize(
    "first, second",
    [
        (dict(constant=1), dict(constant=True)),
        (dict(constant=1), dict(constant=1.0)),
        (dict(constant=0.0), dict(constant=-0.0)),
        (dict(constant=(1, 0)), dict(constant=(True, False))),
        (dict(constant="1"), dict(constant=1)),
        (dict(constant=None), dict()),
        (dict(dtype="int"), dict(dtype="float")),
        (dict(kind="list"), dict(kind="none")),
        (dict(rank=1), dict(rank=2)),
        (dict(items=(MATRIX,)), dict(items=(MATRIX, MATRIX))),
    ],
)
def test_arguments_are_told_apart(first, second):
    row = table.find("aten::relu")
    keys = {
        trials._trial_key(row, (("self", NodeArg(**{"kind": "number", **fields})),), "cpu", DTYPES["float32"])
        for fields in (first, second)
    }
    assert len(keys) == 2


def test_rows_devices_and_default_dtypes_are_told_apart():
    args = (("self", MATRIX),)
    relu, negative = table.find("aten::relu"), table.find("aten::neg")
    single, double = DTYPES["float32"], DTYPES["float64"]
    asked = [(relu, args, "cpu", single), (negative, args, "cpu", single), (relu, args, "cuda:0", single),
             (relu, args, "cpu", double)]  # fmt: skip
    assert len({trials._trial_key(*what) for what in asked}) == 4


def test_a_row_of_somebody_else_is_not_kept(again):
    again()
    other = replace(table.find("aten::relu"), dtypes=("float64",))
    assert "not supported" in other.refusal({"self": MATRIX}, "cpu")
    assert trials.OUTCOMES == {}
    assert table.find("aten::relu").refusal({"self": MATRIX}, "cpu") is None
    assert len(trials.OUTCOMES) == 1
