// The AVX-512 kernels on a CPU without AVX-512: the same source over SIMDe's emulation of the
// intrinsics, compared with the scalar kernels.
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

// What SIMDe 0.7.4 lacks of the intrinsics in vec_avx512.hpp, made of their AVX2 halves.
namespace emulated {

template <class Wide, class Half>
Wide join(Half low, Half high) {
    static_assert(sizeof(Wide) == 2 * sizeof(Half));
    Wide wide;
    std::memcpy(&wide, &low, sizeof(Half));
    std::memcpy(reinterpret_cast<char*>(&wide) + sizeof(Half), &high, sizeof(Half));
    return wide;
}

template <class Half, class Wide>
Half half(const Wide& wide, int index) {
    Half part;
    std::memcpy(&part, reinterpret_cast<const char*>(&wide) + index * sizeof(Half), sizeof(Half));
    return part;
}

// Touches the masked elements only, as the hardware does; sanitizers see the rest.
template <class Register, class Element>
Register masked_load(uint64_t mask, const void* p) {
    Element lane[sizeof(Register) / sizeof(Element)] = {};
    for (size_t i = 0; i < sizeof(Register) / sizeof(Element); ++i) {
        if ((mask >> i & 1U) != 0) lane[i] = static_cast<const Element*>(p)[i];
    }
    Register all;
    std::memcpy(&all, lane, sizeof(all));
    return all;
}

template <class Element, class Register>
void masked_store(void* p, uint64_t mask, const Register& all) {
    Element lane[sizeof(Register) / sizeof(Element)];
    std::memcpy(lane, &all, sizeof(all));
    for (size_t i = 0; i < sizeof(Register) / sizeof(Element); ++i) {
        if ((mask >> i & 1U) != 0) static_cast<Element*>(p)[i] = lane[i];
    }
}

template <class Register>
void store_all(void* p, const Register& all) {
    std::memcpy(p, &all, sizeof(all));
}

inline __m512 from_halves(__m256i x) {
    return join<__m512>(_mm256_cvtph_ps(half<__m128i>(x, 0)), _mm256_cvtph_ps(half<__m128i>(x, 1)));
}

inline __m256i to_halves(__m512 x) {
    return join<__m256i>(_mm256_cvtps_ph(half<__m256>(x, 0), _MM_FROUND_TO_NEAREST_INT),
                         _mm256_cvtps_ph(half<__m256>(x, 1), _MM_FROUND_TO_NEAREST_INT));
}

inline __m512d to_double(__m256 x) {
    return join<__m512d>(_mm256_cvtps_pd(half<__m128>(x, 0)), _mm256_cvtps_pd(half<__m128>(x, 1)));
}

}  // namespace emulated

#define _mm512_maskz_loadu_ps(mask, p) emulated::masked_load<__m512, float>(mask, p)
#define _mm512_maskz_loadu_epi16(mask, p) emulated::masked_load<__m512i, uint16_t>(mask, p)
#define _mm512_mask_storeu_ps(p, mask, x) emulated::masked_store<float>(p, mask, x)
#define _mm512_mask_storeu_epi16(p, mask, x) emulated::masked_store<uint16_t>(p, mask, x)
#define _mm512_maskz_loadu_epi8(mask, p) emulated::masked_load<__m512i, uint8_t>(mask, p)
#define _mm512_mask_storeu_epi8(p, mask, x) emulated::masked_store<uint8_t>(p, mask, x)
#define _mm512_cvtph_ps(x) emulated::from_halves(x)
#define _mm512_cvtps_ph(x, mode) emulated::to_halves(x)
#define _mm512_cvtps_pd(x) emulated::to_double(x)
#define _mm512_extractf32x8_ps(x, index) emulated::half<__m256>(x, index)
#define _mm512_stream_ps(p, x) emulated::store_all(p, x)
#define _mm512_stream_si512(p, x) emulated::store_all(p, x)

#define kAvx512Kernels kEmulatedAvx512Kernels
#include "kernels_avx512.cpp"
#undef kAvx512Kernels

#include "cpu_adam_compare.hpp"

int main() {
    using namespace infinity::cpu_adam;
    compare_tables(kEmulatedAvx512Kernels, kScalarKernels);
    return 0;
}
