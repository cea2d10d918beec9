"""scripts/bench_history: what is slower than it was is told, and what was measured is added."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_history"


def measured(lower=False, device="a GPU", **figures):
    """What scripts/bench wrote, with so many times eager's speed; None: tsfuser has failed."""
    rows = []
    for name, figure in figures.items():
        mine = (
            {"error": "it failed"} if figure is None else {"its": 1 / (2 * figure) if lower else 2 * figure}
        )
        peers = {"eager": {"its": 0.5 if lower else 2.0}, "tsfuser": mine}
        rows.append({"name": name, "measure": "its", "lower": lower, "peers": peers, "ratio": None})
    return {"device": device, "torch": "2.13.0", "results": rows}


def compared(folder, run, *arguments):
    """(exit status, the lines by name) of the script."""
    (folder / "bench.json").write_text(json.dumps(run))
    history = ["--history", folder / "history.jsonl"]
    done = subprocess.run(
        [sys.executable, SCRIPT, folder / "bench.json", *history, *arguments], capture_output=True, text=True
    )
    assert done.stderr == ""
    return done.returncode, {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()[1:]}


@pytest.mark.parametrize("lower", [False, True])
def test_a_figure_that_lost_more_than_the_threshold_is_worse(tmp_path, lower):
    for figure in (2.0, 9.0, 2.1):  # one run was odd
        assert compared(tmp_path, measured(lower, norm=figure, sum=3.0))[0] == 0
    status, lines = compared(tmp_path, measured(lower, norm=1.8, sum=2.9), "--no-add")
    assert status == 1
    assert lines == {"norm": ["1.8", "2.1", "-14%", "3", "worse"], "sum": ["2.9", "3", "-3%", "3"]}
    assert compared(tmp_path, measured(lower, norm=1.8, sum=2.9), "--threshold", "0.2")[0] == 0
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == 4


def test_a_figure_that_fails_now_is_worse(tmp_path):
    for _ in range(3):
        compared(tmp_path, measured(norm=2.0, sum=3.0))
    status, lines = compared(tmp_path, measured(norm=2.0, sum=None))
    assert status == 1 and lines["sum"] == ["-", "3", "-", "3", "worse"]
    assert compared(tmp_path, measured(norm=2.0)) == (0, {"norm": ["2", "2", "+0%", "4"]})  # --only norm


def test_other_devices_and_too_few_runs_say_nothing(tmp_path):
    for _ in range(3):
        compared(tmp_path, measured(norm=4.0, device="another GPU"))
    assert compared(tmp_path, measured(norm=2.0)) == (0, {"norm": ["2", "-", "-", "0"]})
    assert compared(tmp_path, measured(norm=1.0)) == (0, {"norm": ["1", "2", "-50%", "1"]})
