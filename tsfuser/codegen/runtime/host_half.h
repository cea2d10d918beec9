// Conversion of half_t by the processor's F16C instructions, in loops that g++ vectorises.
//
// g++ 12 vectorises no loop with such a conversion. So here are two scalar functions that are declared to
// have vector versions, and these versions, named by the x86 vector function ABI: `_ZGVdN8v_f` is f for 8
// lanes with AVX2 (b: SSE, c: AVX, e: AVX-512). They take half the time of the integer arithmetic in
// types.h. The bits of a half travel in a 32-bit lane, so that a vector has as many of them as of floats.
#pragma once

#define HIDDEN __attribute__((visibility("hidden")))

extern "C" HIDDEN __attribute__((simd("notinbranch"), const)) float widen_half(uint32_t bits) noexcept;
extern "C" HIDDEN __attribute__((simd("notinbranch"), const)) uint32_t narrow_half(float x) noexcept;

typedef float float_x4 __attribute__((vector_size(16)));
typedef float float_x8 __attribute__((vector_size(32)));
typedef uint32_t bits_x4 __attribute__((vector_size(16)));
typedef uint32_t bits_x8 __attribute__((vector_size(32)));

extern "C" HIDDEN float_x4 _ZGVbN4v_widen_half(bits_x4 bits) {
  float_x4 result;
  asm("vpackusdw %1, %1, %0\n\tvcvtph2ps %0, %0" : "=x"(result) : "x"(bits));
  return result;
}
extern "C" HIDDEN bits_x4 _ZGVbN4v_narrow_half(float_x4 x) {
  bits_x4 result;
  asm("vcvtps2ph $0, %1, %0\n\tvpmovzxwd %0, %0" : "=x"(result) : "x"(x));
  return result;
}
extern "C" HIDDEN bits_x4 _ZGVcN4v_narrow_half(float_x4 x) __attribute__((alias("_ZGVbN4v_narrow_half")));

extern "C" HIDDEN float_x8 _ZGVdN8v_widen_half(bits_x8 bits) {
  float_x8 result;
  asm("vextracti128 $1, %t1, %x0\n\tvpackusdw %x0, %x1, %x0\n\tvcvtph2ps %x0, %t0"
      : "=&x"(result)
      : "x"(bits));
  return result;
}
extern "C" HIDDEN bits_x8 _ZGVdN8v_narrow_half(float_x8 x) {
  bits_x8 result;
  asm("vcvtps2ph $0, %t1, %x0\n\tvpmovzxwd %x0, %t0" : "=x"(result) : "x"(x));
  return result;
}

#if defined(__AVX512F__)
typedef float float_x16 __attribute__((vector_size(64)));
typedef uint32_t bits_x16 __attribute__((vector_size(64)));

extern "C" HIDDEN float_x16 _ZGVeN16v_widen_half(bits_x16 bits) {
  float_x16 result;
  asm("vpmovdw %g1, %t0\n\tvcvtph2ps %t0, %g0" : "=v"(result) : "v"(bits));
  return result;
}
extern "C" HIDDEN bits_x16 _ZGVeN16v_narrow_half(float_x16 x) {
  bits_x16 result;
  asm("vcvtps2ph $0, %g1, %t0\n\tvpmovzxwd %t0, %g0" : "=v"(result) : "v"(x));
  return result;
}
#endif

// The scalar functions, for loops that stay scalar. Defined under other names, since a function that is seen
// is inlined, and its vector versions are made from its own body.
extern "C" HIDDEN float widen_one_half(uint32_t bits) noexcept __asm__("widen_half");
extern "C" HIDDEN float widen_one_half(uint32_t bits) noexcept {
  return _ZGVbN4v_widen_half(bits_x4{bits})[0];
}
extern "C" HIDDEN uint32_t narrow_one_half(float x) noexcept __asm__("narrow_half");
extern "C" HIDDEN uint32_t narrow_one_half(float x) noexcept { return _ZGVbN4v_narrow_half(float_x4{x})[0]; }

#undef HIDDEN
