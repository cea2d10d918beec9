"""CUDA kernels are compiled without a GPU. The `device` fixture does so with each kernel of the e2e tests,
for two architectures or with --long for all; this file says whether it could, and that a broken
kernel would be noticed."""

import pytest
import torch

from kit.support import ARCHITECTURES, fuse, no_fallback
from tsfuser.errors import CompileError


@pytest.fixture
def compiler(nvrtc):
    if nvrtc is None:
        pytest.skip("no CuPy with NVRTC here, so no kernel is compiled for CUDA")
    return nvrtc


def test_each_architecture(compiler):
    source = '#include "tsfuser.h"\nstruct Args { float* out; };\n'
    source += "KERNEL(one, Args, 128) { args.out[threadIdx.x] = 1.0f; }\n"
    for architecture in ARCHITECTURES:
        assert 0 < compiler.resources(source, "one", architecture).registers <= 32
        with pytest.raises(CompileError, match="two"):
            compiler.resources(source.replace("1.0f", "two"), "one", architecture)


@pytest.mark.parametrize("target", ["cpu-fibers"])
def test_kernels_of_the_tests_go_through_nvrtc(target, device, compiler, architectures, monkeypatch):
    taken = []
    monkeypatch.setattr(
        type(compiler),
        "resources",
        lambda self, source, name, architecture: taken.append((name, architecture)),
    )

    def program(x):
        return (x * 0.123 + 4.0).relu()

    with no_fallback():
        fuse(program, torch.randn(8, 8))
    assert taken == [("fused_mul_add_relu", architecture) for architecture in architectures]
