// The few declarations of the CUDA driver's C interface that a launch needs, so that the extension builds
// without CUDA headers. Names and values are those of cuda.h. The library is opened at run time.
#pragma once

#include <cstddef>

namespace tsfuser::cuda {

using Result = int;
using Device = int;
using Context = struct ContextRecord*;
using Function = struct FunctionRecord*;
using Stream = struct StreamRecord*;

constexpr Result success = 0;
constexpr int function_static_shared_bytes = 1;       // CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
constexpr int function_max_dynamic_shared_bytes = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int device_max_shared_bytes_optin = 97;  // CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
constexpr int capture_mode_relaxed = 2;            // CU_STREAM_CAPTURE_MODE_RELAXED
constexpr long long shared_bytes_without_optin = 48 << 10;

constexpr int attribute_cluster = 4;              // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
constexpr int attribute_overlap = 6;              // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
constexpr int launch_with_version = 11080;        // the first driver that has cuLaunchKernelEx
constexpr int overlap_in_graphs_version = 12030;  // the first driver that captures such launches

struct LaunchAttribute {
  int id;
  char padding[4];
  union {
    char bytes[64];
    int allowed;
    struct {
      unsigned x, y, z;
    } cluster;
  } value;
};

struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

struct Driver {
  Result (*launch_kernel)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                          Stream, void** parameters, void** extra);
  Result (*launch_with)(const LaunchConfig*, Function, void** parameters,
                        void** extra);  // null before CUDA 11.8
  bool overlaps_in_graphs;
  Result (*launch_cooperative)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                               unsigned, Stream, void** parameters);
  Result (*fill_bytes)(unsigned long long memory, unsigned char value, size_t count, Stream);
  Result (*function_get_attribute)(int* value, int attribute, Function);
  Result (*function_set_attribute)(Function, int attribute, int value);
  Result (*device_get_attribute)(int* value, int attribute, Device);
  Result (*device_get)(Device*, int ordinal);
  Result (*context_get_current)(Context*);
  Result (*context_set_current)(Context);
  Result (*primary_context_retain)(Context*, Device);
  Result (*exchange_capture_mode)(int* mode);
  Result (*stream_is_capturing)(Stream, int* status);
  Result (*error_name)(Result, const char**);
  Result (*error_string)(Result, const char**);
};

}  // namespace tsfuser::cuda
