// Everything that a generated kernel uses. The mode is chosen by the compiler and its options: NVRTC
// compiles for the GPU, a C++ compiler with -DTSFUSER_HOST for CPU tensors, with -DTSFUSER_FIBERS for the
// GPU's launch shape on the CPU.
#pragma once

#include "types.h"
#include "kernel.h"
#include "batched.h"
#include "complex.h"
#include "vector.h"
#include "atomic.h"
#include "index.h"
#include "lookup.h"
#include "room.h"
#include "reduce.h"
#include "scan.h"
#include "cluster.h"
#include "cooperative.h"
#include "fetch.h"
#include "math.h"
#include "fast.h"
#include "shared_divisor.h"
#include "philox.h"
#include "eager_random.h"
