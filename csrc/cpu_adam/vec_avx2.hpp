// Eight elements at a time: AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace infinity::cpu_adam {
namespace {

struct Vec {
    using F = __m256;
    static constexpr int kWidth = 8;
    struct Full {};
    // The first `count` elements. There are no masked 16-bit accesses before AVX-512, so those go
    // through a copy; the lanes beyond the count are zero.
    struct Part {
        explicit Part(size_t n) : count(n) {
            const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), index);
        }
        size_t count;
        __m256i mask;
    };

    static F set(float x) { return _mm256_set1_ps(x); }
    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F div(F a, F b) { return _mm256_div_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static F sqrt(F x) { return _mm256_sqrt_ps(x); }
    // Smaller of a constant and x; NaN if x is (minps returns its second operand then).
    static F at_most(F bound, F x) { return _mm256_min_ps(bound, x); }
    static F quiet(F x) {
        const F nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000));
        return _mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    }
    static bool any_nan(F x) { return _mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)) != 0; }

    static F load(const float* p, Full) { return _mm256_loadu_ps(p); }
    static F load(const float* p, Part lanes) { return _mm256_maskload_ps(p, lanes.mask); }
    template <class L>
    static F load_bf16(const uint16_t* p, L lanes) {
        return widen_bf16(load_words(p, lanes));
    }
    template <class L>
    static F load_f16(const uint16_t* p, L lanes) {
        return _mm256_cvtph_ps(load_words(p, lanes));
    }
    template <class L>
    static F load_split(const uint16_t* high, const int16_t* low, L lanes) {
        const __m256i upper = _mm256_castps_si256(load_bf16(high, lanes));
        const __m128i words = load_words(reinterpret_cast<const uint16_t*>(low), lanes);
        return _mm256_castsi256_ps(_mm256_add_epi32(upper, _mm256_cvtepi16_epi32(words)));
    }

    static void store(float* p, F x, Full) { _mm256_storeu_ps(p, x); }
    static void store(float* p, F x, Part lanes) { _mm256_maskstore_ps(p, lanes.mask, x); }
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
        const __m256i bits = _mm256_castps_si256(x);
        const __m256i lower = _mm256_and_si256(bits, _mm256_set1_epi32(0xFFFF));
        store_words(reinterpret_cast<uint16_t*>(low), narrow(lower), lanes);
        store_words(high, round_bf16(x), lanes);
    }
    // Past the caches; the address must be a multiple of the access.
    static void stream(float* p, F x) { _mm256_stream_ps(p, x); }
    static void stream_bf16(uint16_t* p, F x) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(p), round_bf16(x));
    }
    static void stream_f16(uint16_t* p, F x) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(p), round_f16(x));
    }
    static void fence() { _mm_sfence(); }

    // See [Note: fixed lanes].
    struct Squares {
        __m256d lane[kLanes / 4];
        Squares() {
            for (__m256d& each : lane) each = _mm256_setzero_pd();
        }
        void add(F x, int position) {
            add_half(_mm256_castps256_ps128(x), position / 4);
            add_half(_mm256_extractf128_ps(x, 1), position / 4 + 1);
        }
        void add_half(__m128 half, int at) {
            const __m256d d = _mm256_cvtps_pd(half);
            lane[at] = _mm256_fmadd_pd(d, d, lane[at]);
        }
        void read(double* out) const {
            for (size_t i = 0; i < kLanes / 4; ++i) _mm256_storeu_pd(out + 4 * i, lane[i]);
        }
    };

    // Opaque bytes, for the stream kernel.
    struct Bytes {
        __m256i x;
        static constexpr size_t kSize = 32;
        static Bytes set(uint64_t v) { return {_mm256_set1_epi64x(static_cast<int64_t>(v))}; }
        static Bytes load(const unsigned char* p) {
            return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
        }
        void store(unsigned char* p) const {
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x);
        }
        void stream(unsigned char* p) const {
            _mm256_stream_si256(reinterpret_cast<__m256i*>(p), x);
        }
        Bytes exclusive_or(Bytes o) const { return {_mm256_xor_si256(x, o.x)}; }
        uint64_t digest() const {
            uint64_t word[4];
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(word), x);
            return word[0] ^ word[1] ^ word[2] ^ word[3];
        }
    };

  private:
    static __m128i load_words(const uint16_t* p, Full) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    }
    static __m128i load_words(const uint16_t* p, Part lanes) {
        alignas(16) uint16_t buffer[8] = {};
        for (size_t i = 0; i < lanes.count; ++i) buffer[i] = p[i];
        return _mm_load_si128(reinterpret_cast<const __m128i*>(buffer));
    }
    static void store_words(uint16_t* p, __m128i x, Full) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), x);
    }
    static void store_words(uint16_t* p, __m128i x, Part lanes) {
        alignas(16) uint16_t buffer[8];
        _mm_store_si128(reinterpret_cast<__m128i*>(buffer), x);
        for (size_t i = 0; i < lanes.count; ++i) p[i] = buffer[i];
    }
    static F widen_bf16(__m128i words) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
    }
    // The low words of eight dwords whose high words are zero.
    static __m128i narrow(__m256i x) {
        return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    }
    static __m128i round_bf16(F x) {
        const __m256i up = _mm256_add_epi32(_mm256_castps_si256(x), _mm256_set1_epi32(0x8000));
        return narrow(_mm256_srli_epi32(up, 16));
    }
    static __m128i round_f16(F x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }
};

}  // namespace
}  // namespace infinity::cpu_adam
