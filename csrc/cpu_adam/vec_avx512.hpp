// Sixteen elements at a time: AVX-512 F, BW, VL and DQ.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace infinity::cpu_adam {
namespace {

struct Vec {
    using F = __m512;
    using U = __m512i;  // uint32
    static constexpr int kWidth = 16;
    struct Full {};
    // The first `count` elements; the lanes beyond are zero.
    struct Part {
        explicit Part(size_t count) : mask(static_cast<__mmask16>((1U << count) - 1U)) {}
        __mmask16 mask;
    };

    static F set(float x) { return _mm512_set1_ps(x); }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F div(F a, F b) { return _mm512_div_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F sqrt(F x) { return _mm512_sqrt_ps(x); }
    // Smaller of a constant and x; NaN if x is (minps returns its second operand then).
    static F at_most(F bound, F x) { return _mm512_min_ps(bound, x); }
    static F quiet(F x) {
        const F nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7FC00000));
        return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), nan);
    }
    // Whether everything seen was finite: 0 * x is NaN for all else, and NaN stays.
    struct Finite {
        __m512 x = _mm512_setzero_ps();
        void see(F y) { x = _mm512_fmadd_ps(y, _mm512_setzero_ps(), x); }
        bool all() const { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) == 0; }
    };

    static F load(const float* p, Full) { return _mm512_loadu_ps(p); }
    static F load(const float* p, Part lanes) { return _mm512_maskz_loadu_ps(lanes.mask, p); }
    template <class L>
    static F load_bf16(const uint16_t* p, L lanes) {
        const __m512i words = _mm512_cvtepu16_epi32(load_words(p, lanes));
        return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
    }
    template <class L>
    static F load_f16(const uint16_t* p, L lanes) {
        return _mm512_cvtph_ps(load_words(p, lanes));
    }
    template <class L>
    static F load_split(const uint16_t* high, const int16_t* low, L lanes) {
        const __m512i upper = _mm512_castps_si512(load_bf16(high, lanes));
        const __m256i words = load_words(reinterpret_cast<const uint16_t*>(low), lanes);
        return _mm512_castsi512_ps(_mm512_add_epi32(upper, _mm512_cvtepi16_epi32(words)));
    }

    static void store(float* p, F x, Full) { _mm512_storeu_ps(p, x); }
    static void store(float* p, F x, Part lanes) { _mm512_mask_storeu_ps(p, lanes.mask, x); }
    // Rounds half up. x must be quiet: a NaN's payload would carry into the sign.
    template <class L>
    static void store_bf16(uint16_t* p, F x, L lanes) {
        store_words(p, round_bf16(x), lanes);
    }
    template <class L>
    static void store_f16(uint16_t* p, F x, L lanes) {
        store_words(p, round_f16(x), lanes);
    }
    template <class L>
    static void store_split(uint16_t* high, int16_t* low, F x, L lanes) {
        const __m256i lower = _mm512_cvtepi32_epi16(_mm512_castps_si512(x));  // truncates
        store_words(reinterpret_cast<uint16_t*>(low), lower, lanes);
        store_words(high, round_bf16(x), lanes);
    }
    // Past the caches; the address must be a multiple of the access.
    static void stream(float* p, F x) { _mm512_stream_ps(p, x); }
    static void stream_bf16(uint16_t* p, F x) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(p), round_bf16(x));
    }
    static void stream_f16(uint16_t* p, F x) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(p), round_f16(x));
    }
    static void fence() { _mm_sfence(); }

    static U set_u(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
    static U as_u(F x) { return _mm512_castps_si512(x); }
    static F as_f(U x) { return _mm512_castsi512_ps(x); }
    static U add_u(U a, U b) { return _mm512_add_epi32(a, b); }
    static U mul_u(U a, U b) { return _mm512_mullo_epi32(a, b); }
    static U and_u(U a, U b) { return _mm512_and_si512(a, b); }
    static U or_u(U a, U b) { return _mm512_or_si512(a, b); }
    static U xor_u(U a, U b) { return _mm512_xor_si512(a, b); }
    static U min_u(U a, U b) { return _mm512_min_epu32(a, b); }
    static U max_u(U a, U b) { return _mm512_max_epu32(a, b); }
    template <int kBits>
    static U shl(U x) {
        return _mm512_slli_epi32(x, kBits);
    }
    template <int kBits>
    static U shr(U x) {
        return _mm512_srli_epi32(x, kBits);
    }
    // Lane times step.
    static U ramp(uint32_t step) {
        return mul_u(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                     set_u(step));
    }
    // Zero beyond the lanes.
    static U keep(U x, Full) { return x; }
    static U keep(U x, Part lanes) { return _mm512_maskz_mov_epi32(lanes.mask, x); }
    static uint32_t largest(U x) {
        const __m256i half =
            _mm256_max_epu32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
        __m128i most =
            _mm_max_epu32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
        most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0x4E));
        most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0xB1));
        return static_cast<uint32_t>(_mm_cvtsi128_si32(most));
    }
    static U load_bytes(const uint8_t* p, Full) {
        return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static U load_bytes(const uint8_t* p, Part lanes) {
        return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(lanes.mask, p));
    }
    // The low byte of each.
    static void store_bytes(uint8_t* p, U x, Full) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
    }
    static void store_bytes(uint8_t* p, U x, Part lanes) {
        _mm_mask_storeu_epi8(p, lanes.mask, _mm512_cvtepi32_epi8(x));
    }
    // The high half of each.
    template <class L>
    static void store_high(uint16_t* p, U x, L lanes) {
        store_words(p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(x, 16)), lanes);
    }

    // See [Note: fixed lanes].
    struct Squares {
        __m512d lane[kLanes / 8];
        Squares() {
            for (__m512d& each : lane) each = _mm512_setzero_pd();
        }
        void add(F x, int position) {
            add_half(_mm512_castps512_ps256(x), position / 8);
            add_half(_mm512_extractf32x8_ps(x, 1), position / 8 + 1);
        }
        void add_half(__m256 half, int at) {
            const __m512d d = _mm512_cvtps_pd(half);
            lane[at] = _mm512_fmadd_pd(d, d, lane[at]);
        }
        void read(double* out) const {
            for (size_t i = 0; i < kLanes / 8; ++i) _mm512_storeu_pd(out + 8 * i, lane[i]);
        }
    };

    // Opaque bytes, for the stream kernel.
    struct Bytes {
        __m512i x;
        static constexpr size_t kSize = 64;
        static Bytes set(uint64_t v) { return {_mm512_set1_epi64(static_cast<int64_t>(v))}; }
        static Bytes load(const unsigned char* p) { return {_mm512_loadu_si512(p)}; }
        void store(unsigned char* p) const { _mm512_storeu_si512(p, x); }
        void stream(unsigned char* p) const {
            _mm512_stream_si512(reinterpret_cast<__m512i*>(p), x);
        }
        Bytes exclusive_or(Bytes o) const { return {_mm512_xor_si512(x, o.x)}; }
        uint64_t digest() const {
            uint64_t word[8];
            _mm512_storeu_si512(word, x);
            uint64_t all = 0;
            for (const uint64_t each : word) all ^= each;
            return all;
        }
    };

  private:
    static __m256i load_words(const uint16_t* p, Full) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    }
    static __m256i load_words(const uint16_t* p, Part lanes) {
        return _mm256_maskz_loadu_epi16(lanes.mask, p);
    }
    static void store_words(uint16_t* p, __m256i x, Full) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x);
    }
    static void store_words(uint16_t* p, __m256i x, Part lanes) {
        _mm256_mask_storeu_epi16(p, lanes.mask, x);
    }
    static __m256i round_bf16(F x) {
        const __m512i up = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
        return _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
    }
    static __m256i round_f16(F x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }
};

}  // namespace
}  // namespace infinity::cpu_adam
