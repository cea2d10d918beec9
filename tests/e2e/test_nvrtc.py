"""CUDA kernels are compiled without a GPU. The `device` fixture does so with a third of the kernels of the
e2e tests, for one of two architectures, or with --long with each for all; this file says whether it could,
and that a broken kernel would be noticed."""

import pytest
import torch

from kit import nvrtc as of_tests
from kit.support import fuse, no_fallback
from tsfuser.errors import CompileError
from tsfuser.target.disk_cache import DiskCache


@pytest.fixture
def compiler(nvrtc):
    if nvrtc is None:
        pytest.skip("no CuPy with NVRTC here, so no kernel is compiled for CUDA")
    return nvrtc


def test_each_architecture(compiler):
    source = '#include "tsfuser.h"\nstruct Args { float* out; };\n'
    source += "KERNEL(one, Args, 128) { args.out[threadIdx.x] = 1.0f; }\n"
    for architecture in of_tests.ARCHITECTURES:
        assert 0 < compiler.resources(source, "one", architecture).registers <= 32
        for way in (compiler.resources, compiler.ptx_for, of_tests.read):
            with pytest.raises(CompileError, match="two"):
                way(source.replace("1.0f", "two"), "one", architecture)


@pytest.mark.parametrize("target", ["cpu-fibers"])
def test_kernels_of_the_tests_go_through_nvrtc(target, device, compiler, request, monkeypatch, tmp_path):
    taken = []
    monkeypatch.setattr(type(compiler), "resources", lambda self, *what: taken.append(what))
    monkeypatch.setattr(of_tests, "read", lambda *what: taken.append(what))
    monkeypatch.setattr(of_tests, "TAKEN", DiskCache(tmp_path))
    monkeypatch.setattr(of_tests, "taken", lambda *_: True)

    def program(x):
        return (x * 0.123 + 4.0).relu()

    with no_fallback():
        fuse(program, torch.randn(8, 8))
    [source] = {source for source, *_ in taken}
    every = request.config.getoption("--long")
    assert taken == [(source, "fused_mul_add_relu", a) for a in of_tests.chosen(source, every)]


def test_a_sixth_of_the_kernels_is_compiled():
    sources = [f"source {k}" for k in range(600)]
    assert 60 < sum(of_tests.taken(s, every=False) for s in sources) < 140
    assert all(of_tests.taken(s, every=True) for s in sources)


def test_half_of_the_kernels_are_compiled_for_each_architecture():
    found = [of_tests.chosen(f"source {k}", every=False) for k in range(100)]
    assert all(20 < found.count((a,)) < 80 for a in of_tests.ARCHITECTURES_OF_EVERY_RUN)
    assert of_tests.chosen("source", every=True) == of_tests.ARCHITECTURES


def test_ptxas_sees_an_eighth_of_the_kernels_of_each_architecture():
    sources = [s for s in (f"source {k}" for k in range(2400)) if of_tests.taken(s, every=False)]
    for architecture in of_tests.ARCHITECTURES_OF_EVERY_RUN:
        own = [s for s in sources if of_tests.chosen(s, every=False) == (architecture,)]
        assert 10 < sum(of_tests.assembled(s, every=False) for s in own) < 45
    assert of_tests.assembled("source", every=True)
