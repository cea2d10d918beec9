// Functions of the C library in loops that g++ vectorises.
//
// glibc has vector versions of them on x86-64 (libmvec), which are 5 to 40 times faster, within 4 units in
// the last place, and exact in what matters besides: NaN, infinities, signed zeros, subnormals and arguments
// of any size (tests/headers/test_host_simd.py). The scalar functions and the versions for vectors of
// another length differ in the last bits. A loop may use all of them: the vectors that fit, a shorter one,
// and the rest one by one. So that a result does not depend on where its element stands, here are functions
// whose scalar and vector versions all call the version for 32 bytes. g++ calls them if the scalar function
// is declared so. Other systems, compilers and processors without AVX2 keep to scalar calls, everywhere.
//
// Example: `_ZGVdN8v_tsfuser_expf` is glibc's `_ZGVdN8v_expf`, and `tsfuser_expf(x)` is one lane of it.
// Names and assembly are explained in host_half.h.
#pragma once

#include "types.h"

#if defined(__has_include)
#if __has_include(<features.h>)
#include <features.h>
#endif
#endif

#if defined(__AVX2__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(TSFUSER_NO_SIMD)
#if __GLIBC_PREREQ(2, 22)
#define TSFUSER_SIMD_2_22
#endif
#if __GLIBC_PREREQ(2, 35)
#define TSFUSER_SIMD_2_35
#endif
#endif

#if defined(TSFUSER_SIMD_2_22)

// Each version is a section, so that the linker leaves out what a kernel does not call. Whatever an
// operand's register holds behind the lanes of a shorter version is replaced, since it could take long.
asm(R"(
.macro tsfuser_function name
.section .text.\name, "ax", @progbits
.globl \name
.hidden \name
.type \name, @function
\name:
.endm

.macro tsfuser_one_lane name, of, fill
tsfuser_function \name
  sub $8, %rsp
  \fill %xmm0, %ymm0
  \fill %xmm1, %ymm1
  call \of@PLT
  vzeroupper
  add $8, %rsp
  ret
.endm

.macro tsfuser_half name, of
tsfuser_function \name
  sub $8, %rsp
  vinsertf128 $1, %xmm0, %ymm0, %ymm0
  vinsertf128 $1, %xmm1, %ymm1, %ymm1
  call \of@PLT
  vzeroupper
  add $8, %rsp
  ret
.endm

.macro tsfuser_whole name, of
tsfuser_function \name
  jmp \of@PLT
.endm

.macro tsfuser_twice name, of
tsfuser_function \name
  push %rbp
  mov %rsp, %rbp
  and $-64, %rsp
  sub $192, %rsp
  vmovaps %zmm0, (%rsp)
  vmovaps %zmm1, 64(%rsp)
  call \of@PLT
  vmovaps %ymm0, 128(%rsp)
  vmovaps 32(%rsp), %ymm0
  vmovaps 96(%rsp), %ymm1
  call \of@PLT
  vmovaps 128(%rsp), %ymm1
  vinsertf64x4 $1, %ymm0, %zmm1, %zmm0
  leave
  ret
.endm

.macro tsfuser_versions name, v
tsfuser_one_lane tsfuser_\name, _ZGVdN4\v\()_\name, vbroadcastsd
tsfuser_one_lane tsfuser_\name\()f, _ZGVdN8\v\()_\name\()f, vbroadcastss
tsfuser_half _ZGVbN2\v\()_tsfuser_\name, _ZGVdN4\v\()_\name
tsfuser_half _ZGVbN4\v\()_tsfuser_\name\()f, _ZGVdN8\v\()_\name\()f
tsfuser_whole _ZGVdN4\v\()_tsfuser_\name, _ZGVdN4\v\()_\name
tsfuser_whole _ZGVdN8\v\()_tsfuser_\name\()f, _ZGVdN8\v\()_\name\()f
.ifdef tsfuser_avx512
tsfuser_twice _ZGVeN8\v\()_tsfuser_\name, _ZGVdN4\v\()_\name
tsfuser_twice _ZGVeN16\v\()_tsfuser_\name\()f, _ZGVdN8\v\()_\name\()f
.endif
.endm
)"
#if defined(__AVX512F__)
    ".set tsfuser_avx512, 1\n"
#endif
    R"(
.pushsection .text
.irp name, exp, log, sin, cos
tsfuser_versions \name, v
.endr
tsfuser_versions pow, vv
)"
#if defined(TSFUSER_SIMD_2_35)
    R"(
.irp name, exp2, expm1, log2, log10, log1p, tan, asin, acos, atan, sinh, cosh, tanh, asinh, acosh, atanh, erf, erfc
tsfuser_versions \name, v
.endr
.irp name, atan2, hypot
tsfuser_versions \name, vv
.endr
)"
#endif
    ".popsection\n");

#define HIDDEN_SIMD HIDDEN __attribute__((simd("notinbranch"), const))
#define SIMD_1(NAME)                                              \
  extern "C" HIDDEN_SIMD double tsfuser_##NAME(double) noexcept;  \
  extern "C" HIDDEN_SIMD float tsfuser_##NAME##f(float) noexcept; \
  DEVICE double NAME(double x) { return tsfuser_##NAME(x); }      \
  DEVICE float NAME(float x) { return tsfuser_##NAME##f(x); }
#define SIMD_2(NAME)                                                      \
  extern "C" HIDDEN_SIMD double tsfuser_##NAME(double, double) noexcept;  \
  extern "C" HIDDEN_SIMD float tsfuser_##NAME##f(float, float) noexcept;  \
  DEVICE double NAME(double x, double y) { return tsfuser_##NAME(x, y); } \
  DEVICE float NAME(float x, float y) { return tsfuser_##NAME##f(x, y); }
#define HIDDEN __attribute__((visibility("hidden")))

// clang-format off
SIMD_1(exp) SIMD_1(log) SIMD_1(sin) SIMD_1(cos) SIMD_2(pow)
#if defined(TSFUSER_SIMD_2_35)
SIMD_1(exp2) SIMD_1(expm1) SIMD_1(log2) SIMD_1(log10) SIMD_1(log1p) SIMD_1(tan)
SIMD_1(asin) SIMD_1(acos) SIMD_1(atan) SIMD_1(sinh) SIMD_1(cosh) SIMD_1(tanh)
SIMD_1(asinh) SIMD_1(acosh) SIMD_1(atanh) SIMD_1(erf) SIMD_1(erfc) SIMD_2(atan2) SIMD_2(hypot)
#endif
// clang-format on

#undef HIDDEN
#undef SIMD_1
#undef SIMD_2
#undef HIDDEN_SIMD

#endif
