// Indices that come from tensors, checked before anything is read through them.
//
//     index_check in_range(args.flag);
//     const float x = in_range(index, count) ? table[index] : 0;
//
// An index out of range is an error, which is told at the end of the kernel: so reads need not wait for one
// another, and loops of the host become vectors. On the GPU it is a device-side assertion, as in eager. On
// the host the kernel sets the flag of the call, which then goes to eager's ops for their exception.
#pragma once

#include "types.h"

#if defined(TSFUSER_CUDA)
extern "C" __device__ void __assertfail(const char* message, const char* file, unsigned line,
                                        const char* function, size_t char_bytes);
#endif

class index_check {
 public:
  DEVICE_MEMBER explicit index_check(int32_t* flag) : flag_(flag) {}
  DEVICE_MEMBER bool operator()(int64_t index, int64_t extent) {
    const bool holds = static_cast<uint64_t>(index) < static_cast<uint64_t>(extent);
    failed_ |= !holds;
    return holds;
  }
  DEVICE_MEMBER ~index_check() {
    if (!failed_) return;
#if defined(TSFUSER_CUDA)
    __assertfail("index out of bounds", "a kernel of tsfuser", 0, "a lookup", sizeof(char));
#else
    __atomic_store_n(flag_, 1, __ATOMIC_RELAXED);  // other threads may do the same
#endif
  }

 private:
  int32_t* flag_;
  bool failed_ = false;
};
