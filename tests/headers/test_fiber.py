"""The GPU's launch shape on the host: barriers, shuffles, shared memory, and the mistakes it reports."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kit import harness, prefork

WITH_THREADS = [mode for mode in harness.HERE if mode != "host"]

TRANSPOSE = """#include "tsfuser.h"
struct Args { const float* x; float* y; int64_t rows; int64_t columns; };
// One block moves a tile of 32 x 32 elements; a block has any shape.
KERNEL(transpose, Args, 256) {
  SHARED_MEMORY(memory);
  float* tile = reinterpret_cast<float*>(memory);
  const int64_t across = (args.columns + 31) / 32;
  const int64_t row = blockIdx.x / across * 32, column = blockIdx.x % across * 32;
  for (int r = threadIdx.y; r < 32; r += blockDim.y)
    for (int c = threadIdx.x; c < 32; c += blockDim.x)
      if (row + r < args.rows && column + c < args.columns)
        tile[r * 33 + c] = args.x[(row + r) * args.columns + column + c];
  __syncthreads();
  for (int c = threadIdx.y; c < 32; c += blockDim.y)
    for (int r = threadIdx.x; r < 32; r += blockDim.x)
      if (row + r < args.rows && column + c < args.columns)
        args.y[(column + c) * args.rows + row + r] = tile[r * 33 + c];
}"""


def transpose(source, mode, rows, columns, block=(32, 8), shared=32 * 33 * 4):
    x = torch.randn(rows, columns, device=harness.device(mode))
    y = torch.full((columns, rows), float("nan"), device=x.device)
    kernel = harness.Kernel(source, "transpose", mode)
    kernel(x, y, rows, columns, grid=-(-rows // 32) * -(-columns // 32), block=block, shared=shared)
    return x, y


@pytest.mark.parametrize("mode", harness.HERE)
@pytest.mark.parametrize("rows, columns", [(1, 1), (32, 32), (33, 65), (100, 7)])
@pytest.mark.parametrize("block", [(32, 8), (16, 16), (7, 3), (1, 1)])
def test_tile_transpose(rows, columns, block, mode):
    x, y = transpose(TRANSPOSE, mode, rows, columns, block)
    assert torch.equal(x.t(), y)


@pytest.mark.parametrize("arch", harness.ARCHS)
def test_tile_transpose_compiles_for(arch):
    harness.compile_for(TRANSPOSE, "transpose", arch)


def test_a_missing_barrier_gives_wrong_results():
    """Uninitialised shared memory is NaN, and threads run one after the other until a barrier."""
    x, y = transpose(TRANSPOSE.replace("__syncthreads();", ""), "fibers", 32, 64)
    assert not torch.equal(x.t(), y)


def test_blocks_run_in_several_threads_at_once():
    with ThreadPoolExecutor(4) as pool:
        for x, y in pool.map(lambda i: transpose(TRANSPOSE, "fibers", 100 + i, 90), range(16)):
            assert torch.equal(x.t(), y)


SHUFFLES = """#include "tsfuser.h"
struct Args { const int32_t* x; int32_t* y; int64_t width; };
KERNEL(shuffles, Args, 128) {
  const int i = threadIdx.x;
  const int width = static_cast<int>(args.width);
  const int32_t x = args.x[i];
  int32_t* y = args.y + 6 * i;
  y[0] = __shfl_xor_sync(0xffffffffu, x, 5, width);
  y[1] = __shfl_down_sync(0xffffffffu, x, 3, width);
  y[2] = __shfl_up_sync(0xffffffffu, x, 3, width);
  y[3] = __shfl_sync(0xffffffffu, x, 9, width);
  double total = x;
  for (int lanes = 16; lanes > 0; lanes /= 2) total += __shfl_xor_sync(0xffffffffu, total, lanes);
  y[4] = convert<int32_t>(total);
  if (i % 32 < 16) y[5] = __shfl_xor_sync(0xffffu, x, 1);
  __syncwarp();
}"""


@pytest.mark.parametrize("mode", WITH_THREADS)
@pytest.mark.parametrize("width", [32, 16, 8])
def test_shuffles(width, mode):
    lane = torch.arange(128) % 32
    warp = torch.arange(128) - lane
    first = lane // width * width
    x = torch.randint(-1000, 1000, (128,), dtype=torch.int32)
    y = torch.zeros(128, 6, dtype=torch.int32, device=harness.device(mode))
    harness.Kernel(SHUFFLES, "shuffles", mode)(x.to(y.device), y, width, grid=1, block=(128, 1))

    def inside(source):
        return torch.where((source >= first) & (source < first + width), source, lane)

    sources = [inside(lane ^ 5), inside(lane + 3), inside(lane - 3), first + 9 % width]
    expected = [x[warp + source] for source in sources]
    expected.append(x.view(4, 32).sum(1, dtype=torch.int32).repeat_interleave(32))
    expected.append(torch.where(lane < 16, x[warp + (lane ^ 1)], 0))
    assert torch.equal(y.cpu(), torch.stack(expected, 1).int())


@pytest.mark.parametrize("arch", harness.ARCHS)
def test_shuffles_compile_for(arch):
    harness.compile_for(SHUFFLES, "shuffles", arch)


def test_a_warp_may_be_incomplete():
    source = """#include "tsfuser.h"
struct Args { int32_t* y; };
KERNEL(partial_warp, Args, 64) {
  args.y[threadIdx.x] = __shfl_xor_sync(0xffffffffu, static_cast<int32_t>(threadIdx.x), 1);
}"""
    y = torch.zeros(6, dtype=torch.int32)
    harness.Kernel(source, "partial_warp", "fibers")(y, grid=1, block=(6, 1))
    assert y.tolist() == [1, 0, 3, 2, 5, 4]


MISTAKES = {
    "divergent_return": ("if (threadIdx.x == 3) return; __syncthreads();", "returned while others wait"),
    "divergent_barriers": (
        "if (threadIdx.x < 4) { __syncthreads(); } else {\n __syncthreads(); }",
        "waits at another barrier than thread (0, 0)",
    ),
    "absent_lanes": (
        "if (threadIdx.x < 4) { __syncwarp(); } else { __syncthreads(); }",
        "waits for threads that never come",
    ),
    "overflow": ("SHARED_MEMORY(m); m[blockDim.x * 4 + threadIdx.x] = 0;", "past the end of shared memory"),
    "not_begun": (
        "SHARED_MEMORY(m); send_in_cluster(m, 1 - block_in_cluster(), 1u, m + 16);",
        "writes to a block that has not begun or has returned",
    ),
    "returned_before_its_mail": (
        "SHARED_MEMORY(m); begin_cluster(m + 16); await_cluster();"
        " if (block_in_cluster() == 0) { if (threadIdx.x < 2) send_in_cluster(m, 1, 1u, m + 16); return; }"
        " await_mail<4>(m + 16, 0); send_in_cluster(m, 0, 1u, m + 16);",
        "writes to a block that has not begun or has returned",
    ),
    "too_much_mail": (
        "SHARED_MEMORY(m); begin_cluster(m + 16); await_cluster();"
        " if (threadIdx.x < 3) send_in_cluster(m, block_in_cluster(), 1u, m + 16); __syncthreads();"
        " await_mail<4>(m + 16, 0);",
        "got more mail than it waits for",
    ),
    "too_little_mail": (
        "SHARED_MEMORY(m); begin_cluster(m + 16); await_cluster();"
        " if (threadIdx.x == 0) send_in_cluster(m, block_in_cluster(), 1u, m + 16);"
        " await_mail<4>(m + 16, 0);",
        "waits for blocks that never come",
    ),
    "never_arrived": ("await_cluster();", "waits for its cluster without having arrived"),
    "one_block_only": (
        "if (block_in_cluster()) return; begin_cluster(); await_cluster();",
        "waits for blocks that never come",
    ),
    "half_a_cluster": ("", "launched with blocks 0 to 2, in clusters of 4"),
    "too_many_threads": ("", "launched with 8 threads a block, allows 1 to 4"),
}

CLUSTERS = (
    "not_begun", "returned_before_its_mail", "too_much_mail", "too_little_mail", "never_arrived",
    "one_block_only", "half_a_cluster",
)  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_abort_with_a_message(mistake):
    body, message = MISTAKES[mistake]
    most = 4 if mistake == "too_many_threads" else 8
    blocks = 4 if mistake == "half_a_cluster" else 2
    frame = f"CLUSTER_KERNEL({mistake}, Args, {blocks}, {most})"
    grid = 2 if mistake in CLUSTERS else 1
    frame = frame if grid == 2 else f"KERNEL({mistake}, Args, {most})"
    source = f'#include "tsfuser.h"\nstruct Args {{ int64_t n; }};\n{frame} {{ {body} }}'
    launch = f"harness.Kernel({source!r}, {mistake!r}, 'fibers')(0, grid={grid}, block=(8, 1), shared=32)"
    program = f"import conftest\nfrom kit import harness\n{launch}"
    folders = Path(__file__).resolve().parents  # of conftest, kit and tsfuser
    environment = {**os.environ, "PYTHONPATH": ":".join(map(str, folders[:3]))}
    done = prefork.run(["-c", program], env=environment)
    assert done.returncode < 0 and message in done.stderr and mistake in done.stderr, done.stderr


CLUSTER_SUMS = """#include "tsfuser.h"
struct Args { const double* x; double* y; int64_t blocks; int64_t rounds; };
// The sum of each cluster's elements, one a block, in each round; every thread of every block stores it.
CLUSTER_KERNEL(cluster_sums, Args, args.blocks, 64) {
  SHARED_MEMORY(memory);
  const int half = room_in_cluster<double> + 16;
  begin_cluster(memory + half - 16, memory + 2 * half - 16);
  await_cluster();
  for (int64_t round = 0; round < args.rounds; ++round) {
    double total[1] = {args.x[blockIdx.x] * (round + 1)};
    char *const place = memory + round % 2 * half, *const mailbox = place + half - 16;
    store_partial_cluster<1>(total, place, mailbox);
    await_mail<8>(mailbox, round / 2);
    load_partial_cluster<Sum>(total, place, 0.0);
    args.y[(round * gridDim.x + blockIdx.x) * 64 + threadIdx.x] = total[0];
  }
}"""


def cluster_sums(source, blocks, rounds=5):
    x = torch.randint(-99, 99, (3, blocks), dtype=torch.float64)
    y = torch.zeros(rounds, 3, blocks, 64, dtype=torch.float64)
    kernel = harness.Kernel(source, "cluster_sums", "fibers")
    kernel(x, y, blocks, rounds, grid=3 * blocks, block=(64, 1), shared=2 * (128 + 16))
    factors = torch.arange(1, rounds + 1, dtype=torch.float64)
    return y, (factors[:, None] * x.sum(1)).view(rounds, 3, 1, 1).expand_as(y)


@pytest.mark.parametrize("blocks", [1, 2, 3, 7, 8, 16])
def test_blocks_of_a_cluster_combine(blocks):
    y, expected = cluster_sums(CLUSTER_SUMS, blocks)
    assert torch.equal(y, expected)


@pytest.mark.parametrize("arch", harness.ARCHS)
def test_cluster_sums_compile_for(arch):
    harness.compile_for(CLUSTER_SUMS, "cluster_sums", arch)
