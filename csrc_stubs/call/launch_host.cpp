// Launches of host kernels: a loop over blocks [0, grid), distributed over torch's own threads. One thread
// runs all blocks if they wait for each other, as fibers do.

#include "call/plan.h"

#include <ATen/Parallel.h>

namespace tsfuser {

using HostKernel = void (*)(const void* args, int64_t grid, int64_t block_x, int64_t block_y, int64_t shared,
                            int64_t begin, int64_t end);

void launch_host(const PreparedLaunch& launch, const char* args) {
  const auto kernel = reinterpret_cast<HostKernel>(launch.launch->function);
  const auto blocks = [&](int64_t begin, int64_t end) {
    kernel(args, launch.grid, launch.block_x, launch.block_y, launch.shared, begin, end);
  };
  const int64_t grain = std::max<int64_t>(launch.grain, 1);
  if (launch.grid <= grain || launch.launch->cleared >= 0 || launch.cluster > 1) {
    blocks(0, launch.grid);
  } else {
    at::parallel_for(0, launch.grid, grain, blocks);
  }
}

}  // namespace tsfuser
