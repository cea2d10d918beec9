// Indices that come from tensors, checked before anything is read through them.
//
//     index_check in_range(args.flag);
//     const float x = in_range(index, count) ? table[index] : 0;
//
// An index out of range is an error. On the GPU it is a device-side assertion, as in eager, at the end of
// the kernel, so that reads need not wait for one another. On the host the kernel sets the flag of the call,
// which then goes to eager's ops for their exception.
#pragma once

#include "types.h"

#if defined(TSFUSER_CUDA)

extern "C" __device__ void __assertfail(const char* message, const char* file, unsigned line,
                                        const char* function, size_t char_bytes);

class index_check {
 public:
  DEVICE_MEMBER explicit index_check(int32_t*) {}
  DEVICE_MEMBER bool operator()(int64_t index, int64_t extent) {
    const bool holds = static_cast<uint64_t>(index) < static_cast<uint64_t>(extent);
    failed_ |= !holds;
    return holds;
  }
  DEVICE_MEMBER ~index_check() {
    if (failed_)
      __assertfail("index out of bounds", "a kernel of tsfuser", 0, "gather or index_select", sizeof(char));
  }

 private:
  bool failed_ = false;
};

#else

class index_check {
 public:
  explicit index_check(int32_t* flag) : flag_(flag) {}
  DEVICE_MEMBER bool operator()(int64_t index, int64_t extent) const {
    if (static_cast<uint64_t>(index) < static_cast<uint64_t>(extent)) return true;
    __atomic_store_n(flag_, 1, __ATOMIC_RELAXED);  // other threads may do the same
    return false;
  }

 private:
  int32_t* flag_;
};

#endif
