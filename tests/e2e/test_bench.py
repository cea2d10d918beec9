"""scripts/bench and scripts/sweep run, with tiny sizes, on the CPU too; what they print, write and draw."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import time

import pytest
import torch

from kit import prefork, quick
from kit.support import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

from benchmarks import (
    accuracy,
    chart,
    child,
    compiled,
    compiled_cases,
    compiled_child,
    first_step,
    floor,
    networks,
    networks_child,
    report,
    thunder_cases,
    training,
)
from benchmarks.blocks import BLOCKS, SHAPE
from benchmarks.kernels import FAMILIES
from benchmarks.peers import PEERS, available

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def run(script, *arguments):
    """Of the figures only that they are there is tested, so the kernels need not be fast."""
    return prefork.run([ROOT / "scripts" / script, *arguments], {**os.environ, "CXX": quick.compiler()})


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What one run of scripts/bench printed and wrote, without the peers that compile for seconds."""
    path = tmp_path_factory.mktemp("bench") / "bench.json"
    only = "gelu,softmax,layer_norm_shapes,pointwise,host,steps,graph"
    done = run(
        "bench", "--quick", "--only", only, "--peers", "eager,script,mef_tsfuser,tsfuser", "--json", path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, {r["name"]: r for r in json.loads(path.read_text())["results"]}


def test_every_case_is_measured_with_every_peer(measured):
    _, results = measured
    blocks = {"eager", "script", "mef_tsfuser", "tsfuser"}
    assert set(results["gelu"]["peers"]) == set(results["softmax"]["peers"]) == blocks
    assert set(results["layer_norm_shapes"]["peers"]) == {"eager", "script", "tsfuser"}
    assert set(results["gelu_step"]["peers"]) == {"eager", "script", "tsfuser"}
    errors = {n: c["error"] for r in results.values() for n, c in r["peers"].items() if "error" in c}
    assert errors == {}
    for name in blocks:
        assert results["gelu"]["peers"][name]["its"] > 0
    best = max(results["gelu"]["peers"][n]["its"] for n in ("eager", "script"))
    assert results["gelu"]["ratio"] == pytest.approx(results["gelu"]["peers"]["tsfuser"]["its"] / best)


@pytest.mark.long  # builds C++ for half a minute
def test_the_floor_of_a_step_is_one_node_of_autograd():
    x, w, b = (torch.randn(2, 3).requires_grad_(r) for r in (True, False, True))
    result = floor.built()([x, w, b])
    assert result.shape == x.shape and len(result.grad_fn.next_functions) == 3
    found = torch.autograd.grad(result.sum(), [x, b])
    assert [g.shape for g in found] == [x.shape, b.shape]
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(result.sum(), w.requires_grad_())


def test_the_table_fits_120_columns(measured):
    lines = measured[0].splitlines()
    assert max(map(len, lines)) <= 120
    assert any(line.startswith("gelu(x + b) * y, [2, 8, 64] float32") for line in lines)


def test_a_peer_that_fails_is_a_dash_with_its_error():
    cells = {
        "eager": {"its": 10.0, "gpu us": 5.0},
        "nnc": {"error": "Error: first\nno backend"},
        "tsfuser": {"its": 25.0},
    }
    result = report.Result("block", "a block", "its", cells=cells)
    assert [line.split()[-1] for line in result.table().splitlines() if "NNC" in line] == ["-"]
    assert result.ratio() == 2.5 and result.best_peer() == "eager"
    assert report.errors([result]) == "block, TorchScript + NNC: no backend"
    assert (
        json.loads(report.as_json([result], {}))["results"][0]["peers"]["nnc"]["error"]
        == "Error: first\nno backend"
    )


def test_a_wrong_result_is_an_error_and_no_figure(monkeypatch):
    monkeypatch.setattr(training, "wrong_by", lambda block, shape: 1000.0)
    settings = training.Settings.here(quick=True)
    measured = training.Static("gelu", available(["eager", "tsfuser"], cuda=False), settings)
    assert "wrong result: 1e+03 roundings" in measured.result.cells["tsfuser"]["error"]
    assert "its" in measured.result.cells["eager"] and measured.result.ratio() is None


def test_a_nan_is_wrong_and_an_error_as_eagers_is_not():
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert accuracy.beyond([exact + 3e-3], [exact + 1e-3], [exact], torch.float32) == 0
    assert accuracy.beyond([exact + 1e-2], [exact + 1e-3], [exact], torch.float32) > 10000
    for value in (torch.nan, torch.inf):
        assert accuracy.beyond([exact * value], [exact], [exact], torch.float32) > 1e300


def test_a_budget_that_is_used_up_measures_nothing_more(tmp_path):
    path = tmp_path / "bench.json"
    only = "gelu,layer_norm_shapes,start,pointwise,host,steps,graph"
    peers = "eager,tsfuser"
    done = run("bench", "--quick", "--only", only, "--peers", peers, "--budget", "1e-9", "--json", path)
    assert done.returncode == 0, done.stderr  # what is not measured has not failed
    results = json.loads(path.read_text())["results"]
    assert [result["name"] for result in results] == only.split(",")
    for result in results:
        assert result["peers"] == dict.fromkeys(peers.split(","), {"error": report.OUT_OF_TIME})
    assert "start, tsfuser: not measured: the time budget is used up" in done.stdout


def test_a_result_that_is_wrong_has_failed_whatever_else_had_no_time():
    cells = {"tsfuser": {"error": "ArithmeticError: wrong result"}, "eager": {"error": report.OUT_OF_TIME}}
    results = [report.not_measured("gelu", ["tsfuser"]), report.Result("softmax", "", "its", cells=cells)]
    assert report.has_failed(results, "tsfuser")
    assert not report.has_failed(results, "eager") and not report.has_failed(results[:1], "tsfuser")


def test_a_first_step_that_is_ended_by_the_budget_is_not_measured():
    result = first_step.measure((2, 8, 64), deadline=time.monotonic() + 0.01)
    assert result.cells == {"tsfuser": {"error": report.OUT_OF_TIME}}


@pytest.mark.parametrize("of_bench, status, said", [(0, 0, "passed"), (124, 0, "stopped"), (1, 1, "FAILED")])
def test_gpu_check_passes_where_the_benchmark_had_no_time(of_bench, status, said, tmp_path):
    """124 is what `timeout` says. The machine is made up."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    shutil.copy(ROOT / "scripts" / "gpu_check", scripts)
    (scripts / "environment").write_text(f"cd {tmp_path}\npython={tmp_path}/python\nsay() {{ echo $*; }}\n")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncase $1 in scripts/bench) exit {of_bench} ;; esac\n")
    python.chmod(0o755)
    done = subprocess.run([scripts / "gpu_check"], capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stdout + done.stderr
    assert re.search(rf"^benchmark +{said} +\d+$", done.stdout, re.M)
    assert ("not measured: the benchmark" in done.stdout) == (said == "stopped")


def test_unknown_names_are_refused():
    for arguments in (("--only", "timm_vit"), ("--peers", "eager,nobody")):  # the first is --compile's
        done = run("bench", *arguments)
        assert done.returncode == 2 and "not one of" in done.stderr


def test_cpu_tensors_have_a_table_of_their_own(tmp_path):
    path = tmp_path / "cpu.json"
    done = run("bench", "--cpu", "--quick", "--only", "bias", "--peers", "eager,tsfuser", "--json", path)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^bias +(\w+) .* \d+\.\d\d$", done.stdout, re.M) == ["forward", "training"]
    assert [set(row["us"]) for row in json.loads(path.read_text())["rows"]] == [{"eager", "tsfuser"}] * 2
    assert "geometric mean" not in done.stdout  # nothing to compare with


def test_graphs_are_of_networks_only():
    done = run("bench", "--graphs", "--quick")
    assert done.returncode == 2 and "--graphs needs --networks" in done.stderr


def test_bytes_of_the_block_are_those_of_its_tensors():
    elements = torch.Size(SHAPE).numel()
    assert BLOCKS["layer_norm"].bytes(SHAPE) == 8 * 4 * elements + 2 * elements
    assert BLOCKS["layer_norm_bf16"].bytes(SHAPE) == 8 * 2 * elements + 2 * elements
    assert BLOCKS["gelu"].bytes(SHAPE) == 8 * 4 * elements


def test_blocks_without_dropout_are_deterministic():
    for block in BLOCKS.values():
        tensors = block.tensors((2, 3, 64), "cpu")
        outputs = [block.function(*tensors, *block.without_dropout()) for _ in range(2)]
        assert torch.equal(*outputs) and outputs[0].dtype == block.dtype


def test_graphs_of_cuda_are_for_cuda_devices_only():
    assert "overhead" not in available(PEERS, cuda=False) and "overhead" in available(PEERS, cuda=True)


def test_the_chart_has_bars_and_says_so_where_it_cannot(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    cells = {name: {"its": 100.0 + k} for k, name in enumerate(PEERS)}
    results = [report.Result(n, f"{BLOCKS[n].title}, [2] float32", "its", cells=cells) for n in BLOCKS]
    chart.draw(results, tmp_path / "blocks.png", "a machine")
    assert (tmp_path / "blocks.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(chart.NoMatplotlib, match="pip install matplotlib"):
        chart.draw(results, tmp_path / "none.png", "a machine")


def test_the_sweep_runs(tmp_path):
    path = tmp_path / "sweep.json"
    done = run(
        "sweep",
        "--elements",
        8192,
        "--peers",
        "eager,tsfuser",
        "--dtype",
        "float32",
        "--length",
        "0,128,4096",
        "--json",
        path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert {row["family"] for row in rows} == set(FAMILIES)
    assert all(row["errors"] == {} and set(row["us"]) == {"eager", "tsfuser"} for row in rows)
    assert {row["phase"] for row in rows if row["family"] == "softmax"} == {"forward", "backward"}


@pytest.mark.parametrize("name", FAMILIES)
def test_shapes_of_the_sweep_hold_the_length_that_is_reduced(name):
    family = FAMILIES[name]
    for length in family.lengths:
        sizes = family.shape(length, 1 << 25)
        if sizes is None:
            assert family.layout == "middle" and length == 1 << 20
            continue
        reduced = {"inner": [-1], "outer": [0], "middle": [1], "full": [0]}.get(family.layout, [0, 2, 3])
        count = torch.Size([sizes[d] for d in reduced]).numel()
        assert count == (length or 1 << 25) and torch.Size(sizes).numel() > 0.99 * (1 << 25)


def test_networks_are_measured_when_asked(tmp_path):
    path = tmp_path / "models.json"
    only = "resnet_basic_amp,lstm"
    done = run("bench", "--quick", "--only", only, "--peers", "eager,tsfuser", "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(path.read_text())["results"]
    assert [r["name"] for r in results] == ["resnet_basic_amp", "lstm"]
    assert all(set(r["peers"]) == {"eager", "tsfuser"} and r["ratio"] > 0 for r in results)


def test_a_compiled_model_is_measured_beside_eager():
    found = []
    order = {"model": "mlp", "peer": "tsfuser", "large": False, "more": True, "seconds": 300}
    compiled_child.measure(order, found.append)
    eager = {k: v for each in found for k, v in each.get("eager", {}).items()}
    ours = {k: v for each in found for k, v in each.items() if k != "eager"}
    assert eager["its"] > 0 and ours["its"] > 0 and ours["first s"] > 0
    assert ours["graphs"] == 1 and ours["shapes"] == 20  # one for all other sizes
    on_the_cpu = not torch.cuda.is_available()
    assert (ours["gpu us"] == "n/a") == (eager["kernels"] == "n/a") == on_the_cpu


CHILD = """
import json, sys, time
order = json.loads(sys.stdin.readline() or "null")
print("a library's line", flush=True)
if order and order["peer"] == "compile":
    print(json.dumps({"first s": 2.5 if order["more"] else 0.5}), flush=True)
    if order["model"] == "mlp":
        time.sleep(1000)
if order and order["model"] == "vae":
    sys.exit(3)
if order:
    print(json.dumps({"eager": {"its": 10.0}}), flush=True)
    print(json.dumps({"first s": 1.25 if order["more"] else 0.25}), flush=True)
    if order["more"]:
        print(json.dumps({"its": 20.0, "graphs": 2, "shapes": 3}), flush=True)
"""


def test_each_process_of_the_compile_bench_ends_in_its_time_and_what_it_told_counts(tmp_path, monkeypatch):
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(compiled, "_CHILD", script)
    monkeypatch.setattr(compiled, "MOST", 1.0)
    monkeypatch.setattr(child, "SLACK", 0.5)
    peers = available(PEERS, cuda=False)
    mlp, vae = compiled.measure(["mlp", "vae"], peers, large=False, deadline=float("inf"))
    assert mlp.cells["tsfuser"] == {"first s": 1.25, "filled s": 0.25, "its": 20.0, "graphs": 2}
    assert mlp.cells["eager"] == {"its": 10.0} and mlp.facts == {"tsfuser, shapes": "3 of 20"}
    slow = mlp.cells["compile"]
    assert (slow["first s"], slow["filled s"]) == (2.5, 0.5) and "1 s were over" in slow["error"]
    assert vae.cells["tsfuser"] == {"error": "the process ended with status 3"}
    assert list(mlp.cells["tsfuser"])[:2] == ["first s", "filled s"]
    table = mlp.table().splitlines()
    assert max(map(len, table)) <= 120 and table[-2].startswith("  tsfuser") and "1.25" in table[-2]
    text = compiled.summary([mlp, vae])
    assert "first s      0.500 of torch.compile's (less is better, 1 models)" in text


def test_the_compile_bench_starts_nothing_when_the_budget_is_used_up(monkeypatch, tmp_path):
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(compiled, "_CHILD", script)
    (result,) = compiled.measure(["mlp"], available(PEERS, cuda=False), large=False, deadline=0.0)
    assert all("budget" in result.cells[peer]["error"] for peer in ("compile", "tsfuser"))


NETWORK = """
import json, sys
order = json.loads(sys.stdin.readline() or "null")
print(json.dumps({"fact": "error", "value": "1"}), "of a library", sep="\\n", flush=True)
for peer in order["peers"]:
    failed = {"error": "no"} if peer == "nnc" else {"warm-up s": 2.0}
    print(json.dumps({"peer": peer, **failed}), flush=True)
print(json.dumps({"ready": True}), flush=True)
if sys.stdin.readline():
    if order["training"]:
        sys.exit(3)
    for peer, its in (("eager", 10.0), ("tsfuser", 15.0)):
        print(json.dumps({"peer": peer, "its": its}), flush=True)
"""


@pytest.mark.parametrize("seconds", [60, 0])
def test_networks_warm_up_side_by_side_and_measure_in_turn(tmp_path, monkeypatch, seconds):
    script = tmp_path / "child.py"
    script.write_text(NETWORK)
    monkeypatch.setattr(networks, "_CHILD", script)
    monkeypatch.setattr(child, "SLACK", 5 if seconds else 0)
    peers = ["eager", "nnc", "tsfuser"]
    results = networks.measure(["encoder_stack"], peers, large=False, deadline=time.monotonic() + seconds)
    inference, training = results
    assert "inference" in inference.title and "training" in training.title
    if not seconds:
        assert all("error" in cell for r in (inference, training) for cell in r.cells.values())
        return
    assert inference.cells["tsfuser"] == {"warm-up s": 2.0, "its": 15.0} and inference.ratio() == 1.5
    assert inference.cells["nnc"] == {"error": "no"} and inference.facts == {"error": "1"}
    assert training.cells["eager"] == {"warm-up s": 2.0, "error": "the process ended with status 3"}
    assert "1.500 of eager's, inference, 1 networks" in networks.summary([inference, training])


@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=NEEDS_CUDA)])
def test_a_whole_network_is_measured(capsys, monkeypatch, graphs):
    order = {"network": "encoder_stack", "training": True, "large": False, "peers": ["eager", "tsfuser"]}
    order["graphs"] = graphs
    lines = io.StringIO("\n".join(map(json.dumps, (order, {"seconds": 60}))))
    monkeypatch.setattr(sys, "stdin", lines)
    types = torch.jit._recursive.concrete_type_store
    monkeypatch.setattr(torch.jit._recursive, "concrete_type_store", types)  # the child replaces it
    networks_child.main()
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"ready": True} in found and not [each for each in found if "error" in each]
    assert len([each for each in found if "fact" in each]) == 2
    assert {each["peer"] for each in found if each.get("its", 0) > 0} == {"eager", "tsfuser"}


def test_cases_of_the_compile_bench_are_models_of_the_tests_and_those_of_packages():
    from kit.compiled_models import MODELS

    assert set(compiled_cases.CASES) == set(MODELS)
    for name, case in compiled_cases.CASES.items():
        with torch.device("meta"):
            module = case.module(large=True)
            module(*case.inputs(True, case.first(True) + 1)), name


@pytest.mark.long
def test_the_compile_bench_runs(tmp_path):
    path = tmp_path / "compile.json"
    done = run("bench", "--compile", "--quick", "--only", "mlp,dlrm", "--peers", "tsfuser", "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(path.read_text())["results"]
    assert [r["name"] for r in results] == ["mlp", "dlrm"]
    assert all({"first s", "filled s", "its", "graphs"} <= set(r["peers"]["tsfuser"]) for r in results)


def test_the_thunder_bench_says_why_it_measures_nothing(monkeypatch):
    monkeypatch.setattr(thunder_cases.importlib.util, "find_spec", lambda name: None)
    assert "lightning-thunder is not installed: pip install" in thunder_cases.missing()


@pytest.mark.long
def test_the_thunder_bench_runs(tmp_path):
    if reason := thunder_cases.missing():
        pytest.skip(reason)
    path = tmp_path / "thunder.json"
    done = run("bench", "--thunder", "--quick", "--only", "norms", "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = json.loads(path.read_text())["results"]
    cells = result["peers"]
    assert all(cells[peer]["its"] > 0 for peer in ("eager", "thunder", "thunder_compile", "thunder_tsfuser"))
