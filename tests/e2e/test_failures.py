"""What can fail leaves a right result, one warning with the reason, and is remembered; with the fallback
disabled it raises."""

import warnings

import pytest
import torch

import tsfuser
from kit.support import assert_matches, counted, fuse, groups, no_fallback, run_python
from tsfuser import _C

pytestmark = pytest.mark.graphs

HINT = "PYTORCH_NVFUSER_DISABLE=fallback"


def program(x, y):
    return (x + y).sigmoid() * x


@pytest.fixture
def broken(device, monkeypatch):
    """A compiler that fails: every plan for a class not seen before ends in a CompileError."""
    from tsfuser.errors import CompileError
    from tsfuser.target import cuda, host

    def fail(self, source, name, *rest, **stop):
        raise CompileError(f"the compiler failed on kernel {name}")

    for target in (host.HostTarget, cuda.CudaTarget):
        monkeypatch.setattr(target, "find", lambda self, *rest: None)
        monkeypatch.setattr(target, "compile", fail)
    tsfuser.reset()
    yield
    tsfuser.reset()


def caught(function, *inputs):
    """The result, and the texts of the TsfuserWarnings."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = function(*inputs)
    return result, [str(w.message) for w in seen if issubclass(w.category, tsfuser.TsfuserWarning)]


def fused_without_a_plan(device):
    """A scripted function whose group exists but whose plans are forgotten."""
    x, y = torch.randn(16, 64, device=device), torch.randn(64, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = fuse(program, x, y)
    assert len(groups(scripted)) == 1
    tsfuser.reset()
    return scripted, x, y


def test_a_failed_compile_runs_unfused_and_warns_once(device, broken):
    scripted, x, y = fused_without_a_plan(device)
    result, texts = caught(scripted, x, y)
    assert_matches(result, program(x, y), ops=3)
    (text,) = texts
    assert "the compiler failed on kernel" in text and HINT in text and "aten::sigmoid" in text
    with counted() as rise:
        result, texts = caught(scripted, x, y)
    assert texts == [] and rise["plans_built"] == 0 and rise["launches"] == 0
    assert list(rise["fallbacks"].values()) == [1]
    assert_matches(result, program(x, y), ops=3)


def test_a_failed_compile_raises_with_the_fallback_disabled(device, broken):
    scripted, x, y = fused_without_a_plan(device)
    with no_fallback(), pytest.raises(RuntimeError) as error:
        scripted(x, y)
    assert "the compiler failed on kernel" in str(error.value)
    assert "aten::sigmoid" in str(error.value) and "graph(" in str(error.value)


def test_fallback_disabled_is_silent_where_all_is_well(device):
    x, y = torch.randn(16, 64, device=device), torch.randn(64, device=device)
    with no_fallback():
        assert_matches(fuse(program, x, y)(x, y), program(x, y), ops=3)


def test_an_unsupported_tensor_runs_unfused(device):
    """With the guard off a group may get what no kernel takes: another dtype, a conjugated or a sparse
    tensor."""
    x, y = torch.randn(16, 64, device=device), torch.randn(64, device=device)
    scripted = fuse(program, x, y)
    before = torch._C._jit_set_nvfuser_guard_mode(False)
    try:
        z = torch.randn(4, 4, device=device, dtype=torch.complex64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for a, b in ((z.conj(), z), (z.imag, z.real), (torch._neg_view(x), y)):
                assert_matches(scripted(a, b), program(a, b), ops=5, strides=False)
    finally:
        torch._C._jit_set_nvfuser_guard_mode(before)


@pytest.mark.passes_fail
def test_an_error_in_the_pass_leaves_the_program_as_it_was(device, monkeypatch):
    from tsfuser.frontends.torchscript import passes
    from tsfuser.planning import failures

    def broken_pass(work):
        for node in list(work.graph.nodes())[::-1]:
            if node.outputsSize() == 1:
                node.output().replaceAllUsesWith(next(work.graph.inputs()))
        raise KeyError(f"a pass went wrong on {device}")

    monkeypatch.setattr(passes, "PASSES", (*passes.PASSES[:-1], passes.Pass("broken", broken_pass)))
    failures.forget_warnings()
    x, y = torch.randn(16, 64, device=device), torch.randn(64, device=device)
    seen = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught_here:
            warnings.simplefilter("always")
            scripted = fuse(program, x, y)
        seen += [str(w.message) for w in caught_here]
        assert groups(scripted) == []
        assert_matches(scripted(x, y), program(x, y), ops=3)
    assert len([text for text in seen if "a pass went wrong" in text]) == 1


def test_an_error_in_the_planner_runs_unfused(device):
    from tsfuser.planning import planner

    def broken_planner(group_id, args, varies):
        raise KeyError("a plan went wrong")

    scripted, x, y = fused_without_a_plan(device)
    _C.set_planner(broken_planner)
    try:
        result, texts = caught(scripted, x, y)
        assert_matches(result, program(x, y), ops=3)
        assert len(texts) == 1 and "a plan went wrong" in texts[0]
        assert caught(scripted, x, y)[1] == []
    finally:
        _C.set_planner(planner.plan)
        tsfuser.reset()


SOURCE = """
import torch, tsfuser
def program(x, y):
    return (x + y).sigmoid() * x
x, y = torch.randn(16, 64), torch.randn(64)
scripted = torch.jit.script(program)
with tsfuser.fuser():
    for _ in range(4):
        out = scripted(x, y)
torch.testing.assert_close(out, program(x, y))
print(dict(tsfuser.stats()))
"""


def test_without_a_compiler_the_warning_says_what_to_install(tmp_path):
    status, out, err = run_python(tmp_path, SOURCE, PATH="/nowhere", CXX="", TSFUSER_CACHE_DIR=str(tmp_path))
    assert status == 0, err
    assert err.count("install g++ or clang++") == 1 and HINT in err
    assert "'kernels_compiled': 0" in out and "install g++" in out


def test_without_a_compiler_and_fallback_the_error_says_it(tmp_path):
    environment = dict(
        PATH="/nowhere", CXX="", TSFUSER_CACHE_DIR=str(tmp_path), PYTORCH_NVFUSER_DISABLE="fallback"
    )
    status, out, err = run_python(tmp_path, SOURCE, **environment)
    assert status != 0
    assert "RuntimeError" in err and "install g++ or clang++" in err and "aten::sigmoid" in err


def test_an_unwritable_cache_folder_does_not_stop_fusion(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    status, out, err = run_python(tmp_path, SOURCE, TSFUSER_CACHE_DIR=str(tmp_path / "file" / "cache"))
    assert status == 0, err
