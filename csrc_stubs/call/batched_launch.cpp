#include "call/batched_launch.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>
#include <vector>

namespace tsfuser {
namespace {

constexpr size_t structs_alignment = 16;
constexpr int64_t most_blocks = std::numeric_limits<int32_t>::max();

size_t begin_of_structs(const Launch& launch) {
  const size_t ends = launch.batch_capacity * sizeof(int32_t);
  return (ends + structs_alignment - 1) / structs_alignment * structs_alignment;
}

}  // namespace

bool can_batch(const PreparedLaunch& a, const PreparedLaunch& b) {
  return a.launch->function == b.launch->function && a.launch->batch_capacity == b.launch->batch_capacity &&
         a.launch->args_bytes == b.launch->args_bytes && a.block_x == b.block_x && a.block_y == b.block_y &&
         a.shared == b.shared;
}

size_t launch_batch(c10::ArrayRef<BatchPart> parts, void* stream, c10::Device device) {
  static thread_local std::vector<std::max_align_t> memory;
  PreparedLaunch whole = *parts.front().launch;
  const Launch& launch = *whole.launch;
  const size_t begin = begin_of_structs(launch), most = static_cast<size_t>(launch.batch_capacity);
  memory.resize((begin + most * launch.args_bytes) / sizeof(std::max_align_t) + 1);
  char* const table = reinterpret_cast<char*>(memory.data());
  size_t count = 0;
  int64_t blocks = 0;
  while (count < parts.size() && count < most) {
    const BatchPart& part = parts[count];
    if (count && blocks + part.launch->grid > most_blocks) {
      break;
    }
    blocks += part.launch->grid;
    const auto end = static_cast<int32_t>(std::min(blocks, most_blocks));
    std::memcpy(table + count * sizeof(end), &end, sizeof(end));
    std::memcpy(table + begin + count * launch.args_bytes, part.args, launch.args_bytes);
    ++count;
  }
  const auto none = static_cast<int32_t>(most_blocks);
  for (size_t k = count; k < most; ++k) {
    std::memcpy(table + k * sizeof(none), &none, sizeof(none));
  }
  whole.grid = blocks;
  if (launch.cuda) {
    launch_cuda(whole, table, stream, device.index());
  } else {
    launch_host(whole, table);
  }
  return count;
}

void launch_one(const PreparedLaunch& launch, char* args, void* stream, c10::Device device) {
  if (launch.launch->batch_capacity) {
    launch_batch(BatchPart{&launch, args}, stream, device);
  } else if (launch.launch->cuda) {
    launch_cuda(launch, args, stream, device.index());
  } else {
    launch_host(launch, args);
  }
}

}  // namespace tsfuser
