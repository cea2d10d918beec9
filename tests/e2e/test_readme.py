"""The scripts of nvFuser's README, as written there but for `import tsfuser` and, on a CPU machine, the
device."""

import re

import pytest

from kit.support import ROOT, run_python
from tsfuser import options

pytestmark = pytest.mark.graphs

FORWARD = """
import torch
import tsfuser

def forward(x):
    o = x + 1.0
    o = o.relu()
    return o

shape = (2, 32, 128, 512)
input = torch.rand(*shape).cuda()
t = torch.jit.script(forward)

with torch.jit.fuser("fuser2"):
    for k in range(4):
        o = t(input)
"""
CHECK = "assert torch.equal(o, forward(input)); print(t.graph_for(input)); print(dict(tsfuser.stats()))\n"


def on(device, source):
    return source if device == "cuda" else source.replace(".cuda()", "")


@pytest.fixture
def environment(target, tmp_path):
    return {
        "TSFUSER_HOST_LAUNCH": "fibers" if target == "cpu-fibers" else "block",
        "PYTORCH_NVFUSER_DISABLE_FALLBACK": "1",
    }


def test_debugging_example_shows_guard_group_and_fallback(target, environment, tmp_path):
    status, out, err = run_python(tmp_path, on(target, FORWARD) + CHECK, **environment)
    assert status == 0, err
    assert re.search(
        r"%\d+ : bool = prim::CudaFusionGuard\[types=\[Float\(2, 32, 128, 512, "
        r"strides=\[2097152, 65536, 512, 1\]",
        out,
    )
    assert re.search(r"prim::If\(%\d+\)", out)
    assert re.search(r"prim::CudaFusionGroup_\d+\[cache_id=\d+\]\(%x", out)
    assert 'prim::Constant[name="fallback_function", fallback=1]' in out
    group = out[out.index("with prim::CudaFusionGroup_") :]
    assert "aten::add" in group and "aten::relu" in group
    assert "'plans_built': 1" in out and "'fallbacks': {}" in out


def test_graph_fuser_log_shows_both_graphs(target, environment, tmp_path):
    status, out, err = run_python(
        tmp_path, on(target, FORWARD), PYTORCH_JIT_LOG_LEVEL="graph_fuser", **environment
    )
    assert status == 0, err
    before = err.index("Before Fusion:")
    compiled = err.index("Before Compilation:")
    assert before < compiled
    assert "prim::profile[profiled_type=Float(2, 32, 128, 512" in err[before:compiled]
    assert "prim::CudaFusionGuard" in err[compiled:] and "prim::FallbackGraph" in err[compiled:]


def test_partition_log_names_the_nodes_that_are_not_fused(target, environment, tmp_path):
    source = on(target, FORWARD).replace("o = o.relu()", "o = o.relu().sort(0)[0]")
    status, out, err = run_python(
        tmp_path, source, PYTORCH_JIT_LOG_LEVEL=">partition:graph_fuser", **environment
    )
    assert status == 0, err
    assert re.search(r"\[partition\].*aten::sort", err)


def test_dumps_of_the_kernel(target, environment, tmp_path):
    words = ",".join(sorted(options.ACTING["dump"]))
    source = f"import os\nos.chdir({str(tmp_path)!r})\n" + on(target, FORWARD)
    status, out, err = run_python(tmp_path, source, PYTORCH_NVFUSER_DUMP=words, **environment)
    assert status == 0 and "without a meaning" not in err, err
    kernel = re.search(r"KERNEL\(\w*add\w*relu", out)
    assert kernel and kernel[0] in (tmp_path / "__tmp_kernel1.cu").read_text()
    headed = options.ACTING["dump"] - {"cuda_to_file", "dump_eff_bandwidth"}
    assert [word for word in headed if f"= {word}: " not in out] == []
    assert re.search(r"^fused_add_relu run in [\d.]+ ms, achieved: [\d.]+ GB/s$", out, re.M)


def test_the_example_of_explain(target, environment, tmp_path):
    """The script is that of docs/troubleshooting.md, and so is what it prints but for numbers."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    section = page[page.index("\n## Why is this not fused?") :]
    script, expected = re.findall(r"```(?:python)?\n(.*?)```", section, re.S)[:2]
    (tmp_path / "block.py").write_text(script.replace("torch.rand(2048", "torch.rand(64"))
    source = (
        "import sys, runpy\nsys.argv = ['tsfuser', 'explain', 'block.py']\n"
        "runpy.run_module('tsfuser', run_name='__main__')"
    )
    status, out, err = run_python(
        tmp_path, f"import os\nos.chdir({str(tmp_path)!r})\n{source}\n", **environment
    )
    assert status == 0, err
    shapes = r"pointwise:|row:|grid|\d+ piece|a step takes"
    kept = [
        [line for line in text.split("\n") if line and not re.match(rf"\s+({shapes})", line)]
        for text in (out, expected)
    ]
    assert kept[0] == kept[1] and len(kept[0]) > 8


def test_the_first_example_of_the_readme(target, environment, tmp_path):
    """As it stands there: both ops are fused, into one kernel."""
    [script] = re.findall(r"```python\n(import torch.*?)```", (ROOT / "README.md").read_text(), re.S)
    status, out, err = run_python(tmp_path, on(target, script) + CHECK.replace("input", "x"), **environment)
    assert status == 0, err
    assert "forward: 2 ops fused in 1 group and 1 kernel" in out, out


def test_the_torch_compile_line_of_the_readme(target, environment, tmp_path):
    [line] = re.findall(r"```python\n(model = .*?\n)```", (ROOT / "README.md").read_text(), re.S)
    source = f"""
import torch
import tsfuser

model, x = torch.nn.Sequential(torch.nn.GELU(), torch.nn.Softmax(1)).cuda(), torch.randn(8, 32).cuda()
expected = model(x)
{line}
torch.testing.assert_close(model(x), expected)
assert tsfuser.stats()["launches"] == 1, tsfuser.stats()
"""
    status, out, err = run_python(tmp_path, on(target, source), **environment)
    assert status == 0, err


def test_context_manager_example(target, environment, tmp_path):
    source = """
import torch
import tsfuser

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.rand(512))

    def forward(self, x):
        return torch.nn.functional.gelu(x + self.bias) * 2.0

model = Model().cuda()
inputs = torch.rand(64, 512).cuda()
jit_model = torch.jit.script(model)
with torch.jit.fuser("fuser2") :
    for _ in range(5) :
        outputs = jit_model(inputs)

torch.testing.assert_close(outputs, model(inputs))
print(jit_model.graph_for(inputs))
"""
    if target != "cuda":
        source = source.replace(".cuda()", "")
    status, out, err = run_python(tmp_path, source, **environment)
    assert status == 0, err
    assert "prim::CudaFusionGroup_" in out


def test_enabling_by_specific_functions(target, environment, tmp_path):
    switches = """
torch._C._jit_override_can_fuse_on_cpu(False)
torch._C._jit_override_can_fuse_on_gpu(False)
torch._C._jit_set_texpr_fuser_enabled(False)
torch._C._jit_set_nvfuser_enabled(True)
for k in range(4):
    o = t(input)
"""
    source = FORWARD[: FORWARD.index("with torch.jit.fuser")] + switches + CHECK
    status, out, err = run_python(tmp_path, on(target, source), **environment)
    assert status == 0, err
    assert "prim::CudaFusionGroup_" in out


def test_simple_knobs(target, environment, tmp_path):
    """Single-node mode makes a group of one op; with guard mode off, another shape of the same rank stays in
    the group."""
    source = FORWARD.replace("    o = o.relu()\n", "") + "print(t.graph_for(input))\n"
    knobs = "torch._C._jit_set_nvfuser_single_node_mode(True)\ntorch._C._jit_set_nvfuser_guard_mode(False)\n"
    source = on(target, source)
    status, out, err = run_python(tmp_path, source, **environment)
    assert status == 0 and "prim::CudaFusionGroup_" not in out, err
    source = source.replace("with torch.jit.fuser", knobs + "with torch.jit.fuser")
    source += (
        "x = input[:, :, :1].clone()\nassert torch.equal(t(x), forward(x))\nprint(dict(tsfuser.stats()))\n"
    )
    status, out, err = run_python(tmp_path, source, **environment)
    assert status == 0 and "prim::CudaFusionGroup_" in out, err
    assert "'plans_built': 2" in out
