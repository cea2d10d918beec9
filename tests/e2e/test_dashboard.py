"""`scripts/bench --dashboard`: what it measures, writes, leaves out when it goes on, prints and draws."""

import os
import sys

import pytest

from kit import prefork, quick
from kit.support import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

from benchmarks import dashboard
from benchmarks.dashboard_models import MODELS

pytestmark = pytest.mark.optimized  # starts programs of its own


def run(*arguments, kind="--dashboard"):
    environment = {**os.environ, "CXX": quick.compiler()}
    return prefork.run([ROOT / "scripts" / "bench", kind, "--quick", *arguments], environment)


def row(model, ours, other, mode="training", **more):
    eager = {"right": "yes", "ms": 4.0, "kernel us": 3000.0, "peak MB": 300.0}
    cells = {"eager": eager, "compile": other, "tsfuser": ours}
    return {"model": model, "mode": mode, "part": "steady", "cells": cells, **more}


def cell(ms, us, mb, right="yes"):
    return {"right": right, "ms": ms, "kernel us": us, "peak MB": mb}


ROWS = [
    row("gpt2", cell(1.0, 900.0, 240.0), cell(2.0, 1000.0, 200.0)),
    row("gcn", cell(2.0, 1600.0, 110.0), cell(2.0, 1000.0, 100.0)),
    row("bert", {"error": "ValueError: no\nmore"}, cell(2.0, 1000.0, 100.0)),
]


def test_a_model_is_measured_once_and_a_file_goes_on(tmp_path):
    path = tmp_path / "results.jsonl"
    chosen = ("--json", path, "--only", "dlrm", "--modes", "training", "--peers", "eager,tsfuser")
    done = run(*chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = dashboard.read(path)
    assert (found["model"], found["mode"], found["part"]) == ("dlrm", "training", "steady")
    for peer in ("eager", "tsfuser"):
        assert found["cells"][peer]["right"] == "yes" and found["cells"][peer]["ms"] > 0
    with path.open("a") as file:
        file.write('{"model": "dlrm", "mo')  # cut off
    again = run(*chosen)
    assert again.returncode == 0 and dashboard.read(path) == [found]
    assert "dlrm, training, steady" not in again.stdout and "dlrm " in again.stdout


def test_what_the_time_did_not_suffice_for_is_measured_in_the_next_run(tmp_path, monkeypatch):
    """The processes have said what is right when the time is over, and were not asked for more."""
    now = [0.0]

    class Told:
        def __init__(self, *arguments):
            self.process = self

        def told(self, seconds, until=None):
            now[0] += 60.0
            return iter([{"peer": peer, "right": "yes"} for peer in dashboard.COMPARED])

        send = end = poll = lambda *arguments, **named: None

    monkeypatch.setattr(dashboard, "Child", Told)
    monkeypatch.setattr(dashboard.time, "monotonic", lambda: now[0])
    path = tmp_path / "results.jsonl"
    request = dashboard.Request(["dlrm"], ["training"], ["steady"], list(dashboard.COMPARED), False, 50.0)
    assert list(dashboard.measure(request, path)) == [] == dashboard.read(path)


def test_a_model_that_fails_beside_others_runs_once_more_by_itself(tmp_path, monkeypatch):
    alive = []

    class Crowded:
        def __init__(self, *arguments):
            alive.append(self)
            self.process = self

        def told(self, seconds, until=None):
            if until is None:
                return iter([{"peer": peer, "ms": 1.0} for peer in dashboard.COMPARED])
            held = len(alive) > 1 and self is alive[0]
            return iter([{"error": "OutOfMemoryError: others have it"}] if held else [{"ready": True}])

        def poll(self):
            return 1 if len(alive) > 1 and self is alive[0] else None

        def end(self):
            alive.remove(self)

        send = lambda *arguments, **named: None

    monkeypatch.setattr(dashboard, "Child", Crowded)
    modes, peers = ["training", "inference"], list(dashboard.COMPARED)
    request = dashboard.Request(["dlrm"], modes, ["steady"], peers, False)
    found = list(dashboard.measure(request, tmp_path / "results.jsonl"))
    assert [row["mode"] for row in found] == ["inference", "training"]
    assert all(row["cells"] == {peer: {"ms": 1.0} for peer in peers} for row in found)


def test_a_block_is_measured_in_its_mode(tmp_path):
    path, names = tmp_path / "results.jsonl", ["modulated", "float8_rows"]
    done = run("--json", path, "--only", ",".join(names), "--peers", "eager,tsfuser", kind="--blocks")
    assert done.returncode == 0, done.stdout + done.stderr
    found = dashboard.read(path)
    assert [(row["model"], row["mode"]) for row in found] == list(zip(names, ["training", "inference"]))
    assert all(row["cells"][peer]["right"] == "yes" for row in found for peer in ("eager", "tsfuser"))
    assert all(name in done.stdout.split("\n\n", 2)[2] for name in names)


def test_the_table_has_ratios_and_geometric_means():
    lines = dashboard.table(ROWS, "training").splitlines()
    gpt2, mean = (next(line for line in lines if line.startswith(name)) for name in ("gpt2", "mean"))
    assert gpt2.split()[1:] == "yes/yes 2.00 / 4.00 1000 / 900 0.50 0.90 1.20 - -".split()
    assert mean.split()[1:] == "2.00 / 2.83 0.71 1.20 1.15 - -".split()
    assert any(line.startswith("bert") and "yes/failed" in line for line in lines)
    assert len(dashboard.table(ROWS, "inference").splitlines()) == 2


def test_what_failed_is_listed_and_counts():
    assert dashboard.failures(ROWS) == "bert, training, steady, tsfuser: ValueError: no"
    assert dashboard.has_failed(ROWS, "tsfuser") and not dashboard.has_failed(ROWS, "compile")
    assert dashboard.has_failed([row("gcn", cell(1.0, 1.0, 1.0, "no"), {})], "tsfuser")


@pytest.mark.parametrize("model", ["dlrm", "swiglu"])
def test_a_wrong_result_is_seen(monkeypatch, model):
    from benchmarks import dashboard_child

    order = {
        "model": model,
        "mode": "training",
        "part": "steady",
        "large": False,
        "peers": ["eager", "tsfuser"],
    }
    real = dashboard_child.Subject.compiled

    def off(self, peer):
        module, run = real(self, peer)
        return module, (lambda **inputs: run(**inputs) * 1.1) if peer == "tsfuser" else run

    told = []
    monkeypatch.setattr(dashboard_child.Subject, "compiled", off)
    monkeypatch.setattr(dashboard_child, "tell", told.append)
    dashboard_child.steady(order, lambda: None)
    assert [found["right"] for found in told if "right" in found] == ["yes", "no"]


def test_the_list_has_the_kinds_of_models_of_torchs_dashboard():
    assert len(MODELS) >= 40
    assert {model.package for model in MODELS.values()} >= {"transformers", "timm", "torchvision"}


def test_a_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    dashboard.draw(ROWS, tmp_path / "plot.png", "CPU")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_a_file_is_asked_for():
    done = run("--only", "dlrm")
    assert done.returncode == 2 and "--json FILE" in done.stderr
