"""Fibers that check themselves: races between threads, found whatever they do to the results, and, under
AddressSanitizer, what lies outside of all tensors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kit import harness, prefork
from tsfuser import options
from tsfuser.planning import targets
from tsfuser.target.cxx import find_compiler, is_gcc

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not is_gcc(find_compiler()), reason="what g++ instruments"
)

ARGS = "struct Args { float* x; int64_t n; };"
#: Body of a kernel of 64 threads, two blocks of which are a cluster where it says so; what is said of it.
RACES = {
    "write_write": (
        "SHARED_MEMORY(m); m[threadIdx.x / 2] = 1;",
        "writes what thread 0 of block 0 has written, byte 0 of shared memory",
    ),
    "write_read": (
        "SHARED_MEMORY(m); m[threadIdx.x] = 1; args.x[threadIdx.x] = m[63 - threadIdx.x];",
        "of shared memory",
    ),
    "read_write": (
        "SHARED_MEMORY(m); args.x[threadIdx.x] = m[threadIdx.x / 32]; if (threadIdx.x == 63) m[0] = 1;",
        "writes what thread 31 of block 0 has read",
    ),
    "only_a_barrier_of_the_warp": (
        "SHARED_MEMORY(m); m[threadIdx.x] = 1; __syncwarp(); args.x[threadIdx.x] = m[63 - threadIdx.x];",
        "of shared memory",
    ),
    "only_a_shuffle": (
        "SHARED_MEMORY(m); m[threadIdx.x] = 1; __shfl_xor_sync(0xffffffffu, 1, 1);"
        " args.x[threadIdx.x] = m[threadIdx.x ^ 1];",
        "of shared memory",
    ),
    "twelve_bytes": (
        "SHARED_MEMORY(m); char own[12] = {}; copy_bytes(m + threadIdx.x, own, sizeof(own));",
        "of shared memory",
    ),
    "a_number_of_bytes": (
        "SHARED_MEMORY(m); char own[16] = {}; copy_bytes(m + threadIdx.x, own, args.n + 5);",
        "of shared memory",
    ),
    "between_blocks": ("args.x[threadIdx.x] = blockIdx.x;", "of global memory"),
    "read_by_another_block": (
        "const float seen = args.x[threadIdx.x]; if (blockIdx.x) args.x[64 + threadIdx.x] = seen;"
        " else args.x[threadIdx.x] = 2.0f;",
        "reads what thread 63 of block 0 has written",
    ),
    "before_the_cluster_has_come": (
        "SHARED_MEMORY(m); begin_cluster(m + 32); await_cluster(); m[threadIdx.x % 32] = 1;"
        " if (threadIdx.x == 0) send_in_cluster(m, 1 - block_in_cluster(), 1u, m + 32);",
        "of shared memory",
    ),
}
#: What is in order, and what is let pass.
QUIET = {
    "barrier": "SHARED_MEMORY(m); m[threadIdx.x] = 1; __syncthreads();"
    " args.x[64 * blockIdx.x + threadIdx.x] = m[63 - threadIdx.x]; __syncthreads(); m[63 - threadIdx.x] = 2;",
    "barrier_of_the_warp": "SHARED_MEMORY(m); m[threadIdx.x] = 1; __syncwarp();"
    " args.x[64 * blockIdx.x + threadIdx.x] = m[threadIdx.x ^ 1];",
    "mail": "SHARED_MEMORY(m); begin_cluster(m + 32); await_cluster();"
    " if (threadIdx.x < 2) send_in_cluster(m + 4 * block_in_cluster(), threadIdx.x, 1u, m + 32);"
    " await_mail<4>(m + 32, 0);"
    " args.x[64 * blockIdx.x + threadIdx.x] = m[threadIdx.x % 4];",
    "one_thread": "SHARED_MEMORY(m); m[threadIdx.x] = 1; m[threadIdx.x] += 1;"
    " args.x[64 * blockIdx.x + threadIdx.x] = m[threadIdx.x];",
    "update": "const float seen = args.x[0]; if (blockIdx.x == 1 && threadIdx.x == 0) args.x[0] = seen + 1;",
    "reads": "args.x[64 * (blockIdx.x + 1) + threadIdx.x] = args.x[0] + args.x[1];",
}


def source_of(name, body):
    frame = "CLUSTER_KERNEL({}, Args, 2, 64)" if "cluster" in body else "KERNEL({}, Args, 64)"
    return f'#include "tsfuser.h"\n{ARGS}\n{frame.format(name)} {{ {body} }}'


@pytest.mark.parametrize("race", RACES)
def test_a_race_aborts_with_a_message(race):
    body, message = RACES[race]
    program = (
        "import conftest, torch\nfrom kit import harness\n"
        f"kernel = harness.Kernel({source_of(race, body)!r}, {race!r}, 'fibers_races')\n"
        "kernel(torch.zeros(256), 0, grid=2, block=(64, 1), shared=64)"
    )
    folders = Path(__file__).resolve().parents  # of conftest, kit and tsfuser
    environment = {**os.environ, "PYTHONPATH": ":".join(map(str, folders[:3]))}
    done = prefork.run(["-c", program], env=environment)
    assert done.returncode < 0 and f"kernel {race}, block" in done.stderr, done.stderr
    assert "race: " in done.stderr and message in done.stderr, done.stderr


@pytest.mark.parametrize("case", QUIET)
def test_what_is_no_race_is_let_pass(case):
    kernel = harness.Kernel(source_of(case, QUIET[case]), case, "fibers_races")
    kernel(torch.zeros(256), 0, grid=2, block=(64, 1), shared=64)


OVERRUN = """
import conftest, torch
from kit import harness
from tsfuser.planning import targets
harness.TARGETS["fibers_memory"] = targets.chosen("cpu", "fibers_memory").compiler(harness.CACHE)
kernel = harness.Kernel({source!r}, "overrun", "fibers_memory")
kernel(torch.zeros(64), {n}, grid=1, block=(64, 1), shared=0)
print("done")
"""


@pytest.mark.parametrize("n", [0, 1])
def test_an_overrun_aborts_with_a_message(n):
    """A thread reads one element behind the tensor."""
    source = source_of("overrun", "args.x[threadIdx.x] = args.x[threadIdx.x + args.n] + 1;")
    compiler = find_compiler()
    libraries = [
        subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    if not all(map(os.path.isabs, libraries)):
        pytest.skip("this compiler has no libasan.so")
    folders = Path(__file__).resolve().parents
    environment = {
        **os.environ,
        "PYTHONPATH": ":".join(map(str, folders[:3])),
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",
        "TSFUSER_PROGRESS": "0",
    }
    program = OVERRUN.format(source=source, n=n)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ("done" in done.stdout) is (n == 0), done.stderr
    assert n == 0 or "heap-buffer-overflow" in done.stderr, done.stderr


def test_each_word_of_the_launch_has_a_target():
    words = next(option for option in options.TABLE if option.name == "host_launch")
    for word in targets.TARGETS.keys() - {"cuda"}:
        assert words.parse(word) == word
