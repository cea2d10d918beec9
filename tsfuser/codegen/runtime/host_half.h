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

// Written as assembly outside of functions: g++ would compile functions that nothing else in a kernel calls,
// which took it a tenth of the time of a small kernel. The argument and the result are in register 0.
#define FUNCTION(NAME, BODY)                                                                            \
  ".globl " NAME "\n.hidden " NAME "\n.type " NAME ", @function\n" NAME ":\n" BODY "\nret\n.size " NAME \
  ", .-" NAME "\n"
// clang-format off
asm(".pushsection .text\n"
    FUNCTION("_ZGVbN4v_widen_half", "vpackusdw %xmm0, %xmm0, %xmm0\n vcvtph2ps %xmm0, %xmm0")
    FUNCTION("_ZGVbN4v_narrow_half", "vcvtps2ph $0, %xmm0, %xmm0\n vpmovzxwd %xmm0, %xmm0")
    FUNCTION("_ZGVcN4v_narrow_half", "vcvtps2ph $0, %xmm0, %xmm0\n vpmovzxwd %xmm0, %xmm0")
    FUNCTION("_ZGVdN8v_widen_half",
             "vextracti128 $1, %ymm0, %xmm1\n vpackusdw %xmm1, %xmm0, %xmm0\n vcvtph2ps %xmm0, %ymm0")
    FUNCTION("_ZGVdN8v_narrow_half", "vcvtps2ph $0, %ymm0, %xmm0\n vpmovzxwd %xmm0, %ymm0")
#if defined(__AVX512F__)
    FUNCTION("_ZGVeN16v_widen_half", "vpmovdw %zmm0, %ymm0\n vcvtph2ps %ymm0, %zmm0")
    FUNCTION("_ZGVeN16v_narrow_half", "vcvtps2ph $0, %zmm0, %ymm0\n vpmovzxwd %ymm0, %zmm0")
#endif
    // for loops that stay scalar: arguments are in %edi and lane 0, whose neighbours become 0
    FUNCTION("widen_half", "vmovd %edi, %xmm0\n vcvtph2ps %xmm0, %xmm0")
    FUNCTION("narrow_half",
             "vinsertps $14, %xmm0, %xmm0, %xmm0\n vcvtps2ph $0, %xmm0, %xmm0\n vmovd %xmm0, %eax")
    ".popsection");
// clang-format on

#undef FUNCTION
#undef HIDDEN
