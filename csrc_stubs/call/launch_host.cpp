// Launches of host kernels: a loop over blocks [0, grid), distributed over torch's own threads. One thread
// runs all blocks if they wait for each other, as fibers do.

#include "call/plan.h"

#include <ATen/Parallel.h>

#include <algorithm>

#if AT_PARALLEL_OPENMP
// Entry points of the OpenMP library that torch runs with: libgomp has them, and LLVM's library has them,
// too. They stand here because clang++ makes of `#pragma omp parallel` calls that only LLVM's library has.
extern "C" void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned flags);
extern "C" int omp_get_num_threads();
extern "C" int omp_get_thread_num();
#endif

namespace tsfuser {
namespace {

using HostKernel = void (*)(const void* args, int64_t grid, int64_t block_x, int64_t block_y, int64_t shared,
                            int64_t begin, int64_t end);

struct Blocks {
  const PreparedLaunch& launch;
  const char* args;
  int64_t grain;  // the fewest blocks that are worth a thread

  void run(int64_t begin, int64_t end) const {
    const auto kernel = reinterpret_cast<HostKernel>(launch.launch->function);
    kernel(args, launch.grid, launch.block_x, launch.block_y, launch.shared, begin, end);
  }
};

#if AT_PARALLEL_OPENMP
// The part of one thread: equal parts, as at::parallel_for makes them. Kernels throw nothing.
void run_part(void* data) {
  const auto& blocks = *static_cast<const Blocks*>(data);
  const int64_t grid = blocks.launch.grid;
  const int64_t threads = std::min<int64_t>(omp_get_num_threads(), at::divup(grid, blocks.grain));
  const int64_t part = at::divup(grid, threads), begin = omp_get_thread_num() * part;
  if (begin < grid) {
    at::internal::ThreadIdGuard id(omp_get_thread_num());
    c10::ParallelGuard parallel(true);
    blocks.run(begin, std::min(grid, begin + part));
  }
}

void run_parallel(Blocks& blocks) {
  at::internal::lazy_init_num_threads();
  if (at::in_parallel_region() || at::get_num_threads() == 1) {
    blocks.run(0, blocks.launch.grid);
  } else {
    GOMP_parallel(run_part, &blocks, 0, 0);
  }
}
#else
void run_parallel(Blocks& blocks) {
  at::parallel_for(0, blocks.launch.grid, blocks.grain,
                   [&](int64_t begin, int64_t end) { blocks.run(begin, end); });
}
#endif

}  // namespace

void launch_host(const PreparedLaunch& launch, const char* args) {
  Blocks blocks{launch, args, std::max<int64_t>(launch.grain, 1)};
  if (launch.grid <= blocks.grain || launch.launch->cleared >= 0 || launch.cluster > 1) {
    blocks.run(0, launch.grid);
  } else {
    run_parallel(blocks);
  }
}

}  // namespace tsfuser
