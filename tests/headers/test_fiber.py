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
    "too_many_threads": ("", "launched with 8 threads a block, allows 1 to 4"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_abort_with_a_message(mistake):
    body, message = MISTAKES[mistake]
    most = 4 if mistake == "too_many_threads" else 8
    kernel = f"struct Args {{ int64_t n; }};\nKERNEL({mistake}, Args, {most}) {{ {body} }}"
    source = f'#include "tsfuser.h"\n{kernel}'
    launch = f"harness.Kernel({source!r}, {mistake!r}, 'fibers')(0, grid=1, block=(8, 1), shared=32)"
    program = f"import conftest\nfrom kit import harness\n{launch}"
    folders = Path(__file__).resolve().parents  # of conftest, kit and tsfuser
    environment = {**os.environ, "PYTHONPATH": ":".join(map(str, folders[:3]))}
    done = prefork.run(["-c", program], env=environment)
    assert done.returncode < 0 and message in done.stderr and mistake in done.stderr, done.stderr
