// The AVX-512 kernels on a CPU without AVX-512: the same source over SIMDe's emulation of the
// intrinsics, compared with the scalar kernels.
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

// What SIMDe 0.7.4 lacks, out of what AVX2 and F16C have.
namespace {
#ifndef _mm512_cvtph_ps
inline simde__m512 emulated_cvtph_ps(__m256i words) {
    return simde_mm512_insertf32x8(
        simde_mm512_castps256_ps512(_mm256_cvtph_ps(_mm256_castsi256_si128(words))),
        _mm256_cvtph_ps(_mm256_extracti128_si256(words, 1)), 1);
}
#define _mm512_cvtph_ps(x) emulated_cvtph_ps(x)
#endif
#ifndef _mm512_cvtps_ph
inline __m256i emulated_cvtps_ph(simde__m512 x) {
    return _mm256_set_m128i(_mm256_cvtps_ph(simde_mm512_extractf32x8_ps(x, 1), 0),
                            _mm256_cvtps_ph(simde_mm512_castps512_ps256(x), 0));
}
#define _mm512_cvtps_ph(x, mode) emulated_cvtps_ph(x)
#endif
}  // namespace

#define kAvx512Kernels kEmulatedAvx512Kernels
#include "kernels_avx512.cpp"
#undef kAvx512Kernels

#include "cpu_adam_compare.hpp"

int main() {
    using namespace infinity::cpu_adam;
    compare_tables(kEmulatedAvx512Kernels, kScalarKernels);
    return 0;
}
