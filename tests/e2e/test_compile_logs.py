"""What `TORCH_LOGS=tsfuser`, `TORCH_LOGS=+tsfuser` and `tsfuser.stats()` say of torch.compile's graphs."""

import logging
import re

import pytest
import torch

import tsfuser
from kit.support import run_python
from tsfuser.frontends.dynamo import program

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("forgotten")]
LOGGER = "tsfuser"  # as TORCH_LOGS names it


def function(x):
    z = torch.sin(x) * 2
    z = torch.cond(z.sum() > 0, lambda z: z.sin() + 1, lambda z: z.cos() * 2, (z,))
    return torch.softmax(z * 2, -1)


def messages(caplog, level):
    caplog.set_level(level, LOGGER)
    torch.compile(function, backend="tsfuser")(torch.randn(4, 4))
    return [record.getMessage() for record in caplog.records if record.name.startswith(LOGGER)]


def test_at_the_first_level_a_line_for_each_graph_and_for_what_python_runs(caplog):
    left, made = messages(caplog, logging.INFO)
    assert ", inference: Python runs cond at " in left and "z = torch.cond(" in left
    assert "control flow that data decide" in left and f"{__file__}:" in left
    assert made.endswith(", inference: 6 of 7 ops in 2 groups")


def test_at_the_second_level_the_graphs_at_every_step(caplog):
    found = messages(caplog, logging.DEBUG)
    titles = [text.partition("\n")[0].partition(", inference")[2] for text in found]
    assert [title for title in titles if title.endswith(":")] == [
        ", as it came:", ", cut:", ", typed:", ", typed:", ", with groups:", ", with groups:"
    ]  # fmt: skip
    assert "torch.ops.aten.sin.default" in found[0]
    typed = next(text for text in found if ", typed:" in text)
    torch._C.parse_ir(typed.partition("\n")[2])  # can be cut out and parsed again


def test_without_the_switch_nothing_is_written(caplog):
    assert messages(caplog, logging.WARNING) == []


def test_counters_cover_graphs_calls_and_what_is_left_to_python():
    compiled, x = torch.compile(function, backend="tsfuser"), torch.randn(4, 4)
    for _ in range(3):
        compiled(x)
    found = tsfuser.stats()
    assert (found["graphs"], found["graph_calls"]) == (1, 6)  # two pieces
    ((reason, count),) = found["left_to_python"].items()
    assert reason.startswith("control flow that data decide") and count == 1
    assert found["graphs_unfused"] == {}
    compiled(torch.randn(4, 4, requires_grad=True)).sum().backward()
    assert tsfuser.stats()["graphs"] == 3  # forward and backward
    tsfuser.reset()
    found = tsfuser.stats()
    assert (found["graphs"], found["graph_calls"], found["left_to_python"]) == (0, 0, {})


@pytest.mark.passes_fail
def test_counters_tell_graphs_that_were_given_up(monkeypatch):
    def broken(*given):
        raise RuntimeError("out of order")

    monkeypatch.setattr(program, "fuse", broken)
    with pytest.warns(tsfuser.TsfuserWarning, match="gave up"):
        torch.compile(lambda x: x.exp() + 1, backend="tsfuser")(torch.randn(4))
    found = tsfuser.stats()
    assert (
        found["graphs_unfused"] == {"compile_graph: RuntimeError: out of order": 1} and found["graphs"] == 0
    )


TRACED = """
import torch, tsfuser
run = torch.compile(lambda x: torch.softmax(x * 2.0, -1).sum(0), backend="tsfuser")
run(torch.rand(4, 5))
"""


def test_torchs_trace_has_graphs_and_kernels_as_artifacts(tmp_path):
    """Which tlparse shows as files."""
    traces = tmp_path / "traces"
    status, _, errors = run_python(tmp_path, TRACED, TORCH_TRACE=str(traces))
    assert status == 0, errors
    text = "".join(path.read_text() for path in traces.iterdir())
    assert '"name": "tsfuser_graph_1_inference", "encoding": "string"' in text
    assert "prim::CudaFusionGroup" in text
    assert re.search(r'"name": "tsfuser_kernel_fused_\w+"', text) and "KERNEL(fused_" in text


def test_one_group_is_no_groups(caplog):
    with caplog.at_level(logging.INFO, logger="tsfuser.frontends.dynamo.logs"):
        torch.compile(lambda x: torch.relu(x + 1.0) * 0.5, backend="tsfuser")(torch.rand(8))
    assert any(line.endswith("3 of 3 ops in 1 group") for line in caplog.messages)
