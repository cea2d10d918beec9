"""The import: harmless, quick, possible without CuPy and GPU, twice, in a thread and in a fork. Each in a
process of its own."""

import shutil
import sys

from kit.support import ROOT, run_python

PROGRAM = """
def program(x):
    return (x + 1.0).relu()

x = torch.randn(8)

def run():
    scripted = torch.jit.script(program)
    for _ in range(4):
        out = scripted(x)
    assert torch.equal(out, program(x))
    return str(torch.jit.last_executed_optimized_graph())
"""


def run(tmp_path, source, **environment):
    status, out, err = run_python(tmp_path, source, whole_end=True, **environment)
    assert status == 0, err
    return out, err


def test_the_import_alone_changes_no_program(tmp_path):
    """The optimised graph is the same with and without the import."""
    show = PROGRAM + "print(run())"
    plain, _ = run(tmp_path, "import torch" + show)
    mine, err = run(tmp_path, "import torch, tsfuser" + show)
    assert mine == plain and "aten::relu" in plain
    assert "nvfuser" not in err.lower()


def test_the_variable_switches_fusion_on(tmp_path):
    show = PROGRAM + "print(run())"
    out, _ = run(tmp_path, "import torch, tsfuser" + show, PYTORCH_JIT_ENABLE_NVFUSER="1")
    assert "CudaFusionGroup" in out
    out, _ = run(
        tmp_path,
        "import torch, tsfuser" + show,
        PYTORCH_JIT_ENABLE_NVFUSER="1",
        PYTORCH_JIT_USE_NNC_NOT_NVFUSER="1",
    )
    assert "CudaFusionGroup" not in out


def test_importing_twice_and_in_a_thread(tmp_path):
    source = f"""
import sys, threading
thread = threading.Thread(target=lambda: __import__("tsfuser"))
thread.start()
thread.join()
import torch, tsfuser
first = tsfuser
for name in [n for n in sys.modules if n.startswith("tsfuser") and n != "tsfuser._C"]:
    del sys.modules[name]
import tsfuser
assert tsfuser is not first
{PROGRAM}
with tsfuser.fuser():
    assert "CudaFusionGroup" in run()
"""
    run(tmp_path, source)


def test_works_in_a_forked_child(tmp_path):
    """Plans and kernels made before the fork serve the child, which also makes new ones."""
    source = f"""
import os, torch, tsfuser
torch.set_num_threads(1)
{PROGRAM}
def other(x):
    return (x * 2.0).tanh() - 1.0

with tsfuser.fuser():
    run()
    child = os.fork()
    if child == 0:
        try:
            before = dict(tsfuser.stats())
            torch.jit.script(program)(x)
            assert tsfuser.stats()["exact_hits"] == before["exact_hits"] + 1, dict(tsfuser.stats())
            scripted, y = torch.jit.script(other), torch.randn(5, 3)
            for _ in range(4):
                out = scripted(y)
            torch.testing.assert_close(out, other(y))
            assert tsfuser.stats()["plans_built"] == before["plans_built"] + 1
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
    run(tmp_path, source)


def test_works_without_cupy(tmp_path):
    source = (
        "import sys\nsys.modules['cupy'] = None\nimport torch, tsfuser"
        + PROGRAM
        + "with tsfuser.fuser():\n    print(run())"
    )
    out, err = run(tmp_path, source, PYTORCH_NVFUSER_DISABLE_FALLBACK="1")
    assert "CudaFusionGroup" in out and "Warning" not in err


def test_the_import_loads_neither_cupy_nor_a_compiler(tmp_path):
    source = "import sys, torch\nbefore = set(sys.modules)\nimport tsfuser\n"
    source += "print(sorted(set(sys.modules) - before))"
    out, _ = run(tmp_path, source)
    assert "cupy" not in out and "numpy" not in out


def test_an_unknown_log_is_an_error_at_the_import(tmp_path):
    status, out, err = run_python(tmp_path, "import tsfuser", PYTORCH_JIT_LOG_LEVEL="partitions")
    assert status != 0 and "unknown log 'partitions'" in err and "partition," in err


FIRST_GRAPH = """
import os, torch, tsfuser

@torch.jit.script
def biased(x, weight, bias):
    if x.size(0) > 3:
        x = x * 2.0
    return torch.nn.functional.linear(x + 1.0, weight, bias).relu()

@torch.jit.script
def later(x):
    return (x * 2.0).tanh() - 1.0

x, weight, bias = torch.randn(5, 2, 3, 4), torch.randn(3, 4), torch.randn(3)
os.environ["PYTORCH_NVFUSER_DUMP"] = "fusion_ir,cuda_kernal,halo"
os.environ["PYTORCH_NVFUSER_ENABLE"] = "linear_decomposition"
os.environ["PYTORCH_NVFUSER_DISABLE"] = "settled_branches"
os.environ["PYTORCH_NVFUSER_MAX_REG_COUNT"] = "many"
with tsfuser.fuser(), torch.no_grad():
    for _ in range(3):
        biased(x, weight, bias)
    print(torch.jit.last_executed_optimized_graph())
    os.environ["PYTORCH_NVFUSER_DUMP"] = "cuda_kernel"  # too late
    for _ in range(3):
        later(x)
assert tsfuser.stats()["launches"] == 4, tsfuser.stats()
"""


def test_nvfusers_variables_are_read_when_the_first_graph_comes(tmp_path):
    """As nvFuser read them: test suites set them after their imports. Python and C++ see them; a mistake is a
    warning, and what else a variable holds counts."""
    out, err = run(tmp_path, FIRST_GRAPH)
    assert "fusion_ir: fusion" in out and "tanh_1 = tensor(" in out and "KERNEL(" not in out
    assert "aten::linear(" not in out
    assert "aten::gt(" in out  # the branch on the size stayed
    assert "ignored: PYTORCH_NVFUSER_DUMP: unknown option 'cuda_kernal'; did you mean 'cuda_kernel'?" in err
    assert "ignored: PYTORCH_NVFUSER_MAX_REG_COUNT: 'many' is not an integer" in err
    assert "PYTORCH_NVFUSER_DUMP=halo" in err and err.count("TsfuserWarning") == 3


FIRST_COMPILED_GRAPH = """
import os, torch, tsfuser
os.environ["PATH"], os.environ["CXX"] = "/nowhere", ""
os.environ["PYTORCH_NVFUSER_DISABLE"] = "fallback"
compiled = torch.compile(lambda x: torch.tanh(x * 2.0) - 1.0, backend="tsfuser")
try:
    compiled(torch.randn(5, 4))
except Exception as error:
    print("raised:", error)
"""


def test_they_are_read_so_for_torch_compile(tmp_path):
    """`fallback` is a word that C++ has to know: the group that finds no compiler raises."""
    out, err = run(tmp_path, FIRST_COMPILED_GRAPH, TSFUSER_CACHE_DIR=str(tmp_path / "cache"))
    assert "raised:" in out and "install g++ or clang++" in out, err


def test_cuda_in_use_does_not_read_them(tmp_path):
    """The compiler for CUDA starts before a graph comes."""
    source = """
import os, torch, tsfuser
from tsfuser import options
from tsfuser.planning import compile
tsfuser.enable()
compile.start_cuda_compiler()
os.environ["PYTORCH_NVFUSER_DISABLE"] = "fma"
print(options.disabled("fma"))
"""
    out, _ = run(tmp_path, source, TSFUSER_CACHE_DIR=str(tmp_path / "cache"))
    assert out == "True\n"


def test_the_executor_for_thunder_says_why_there_is_none(tmp_path):
    asked = """
import sys
sys.modules["thunder"] = None
import tsfuser
try:
    tsfuser.thunder_executor()
except ImportError as error:
    print(error)
"""
    out, _ = run(tmp_path, asked)
    assert (
        out.startswith("lightning-thunder does not load (ModuleNotFoundError: ") and "tsfuser[thunder]" in out
    )


def test_an_extension_of_other_sources_is_one_sentence(tmp_path):
    """As after `git pull` without a build: a copy of the package, whose C++ sources have another binding."""
    shutil.copytree(ROOT / "tsfuser", tmp_path / "tsfuser", ignore=shutil.ignore_patterns("__pycache__"))
    sources = tmp_path / "csrc_stubs" / "bindings"
    sources.mkdir(parents=True)
    text = 'PYBIND11_MODULE(_C, m) {\n  m.def("other", &other, py::arg("x"));\n}\n'
    (sources / "bindings.cpp").write_text(text)
    status, _, err = run_python(tmp_path, "import tsfuser", PYTHONPATH=str(tmp_path))
    assert status != 0
    assert err.splitlines()[-1] == (
        "ImportError: tsfuser's extension was built from other sources than its Python files: build it "
        f"again, by `python setup.py build_ext --inplace` in {tmp_path}"
    )


def test_a_checkout_that_is_not_built_says_so(tmp_path):
    """As for somebody who installs tsfuser from a clone, and starts Python in that clone."""
    left_out = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "tsfuser", tmp_path / "tsfuser", ignore=left_out)
    (tmp_path / "csrc_stubs").mkdir()
    status, _, err = run_python(tmp_path, "import tsfuser", PYTHONPATH=str(tmp_path))
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert status != 0
    assert err.splitlines()[-1] == (
        f"ImportError: {tmp_path / 'tsfuser'} is a checkout, whose extension is not built for Python "
        f"{python}: build it, by `python setup.py build_ext --inplace` in {tmp_path}; or, if tsfuser is "
        "installed, start Python in another folder"
    )
