// Sixteen elements at a time in two registers: AVX2 with FMA and F16C. There are two registers
// because sixteen 16-bit elements fill one, and packing and unpacking cost half as much that way.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "scalar.hpp"

namespace infinity::cpu_adam {
namespace {

struct Vec {
    struct F {  // elements 0 to 7, and 8 to 15
        __m256 a;
        __m256 b;
    };
    struct U {  // uint32, likewise
        __m256i a;
        __m256i b;
    };
    static constexpr int kWidth = 16;
    struct Full {};
    // All elements, in stores past the caches. The address must be a multiple of 32 bytes.
    struct Streamed {};
    // The first `count` elements. There are no masked 16-bit accesses before AVX-512, so such
    // accesses go through a copy. The lanes beyond the count are zero.
    struct Part {
        explicit Part(size_t n) : count(n) {
            const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            const int whole = static_cast<int>(n);
            a = _mm256_cmpgt_epi32(_mm256_set1_epi32(whole), index);
            b = _mm256_cmpgt_epi32(_mm256_set1_epi32(whole - 8), index);
        }
        size_t count;
        __m256i a;
        __m256i b;
    };

    static F set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
    static F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
    static F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
    static F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
    static F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
    static F fma(F x, F y, F z) {
        return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
    }
    static F sqrt(F x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
    // The smaller of `bound` and x. NaN if x is NaN (minps returns its second operand then).
    static F at_most(F bound, F x) {
        return {_mm256_min_ps(bound.a, x.a), _mm256_min_ps(bound.b, x.b)};
    }
    static F quiet(F x) { return {quiet_half(x.a), quiet_half(x.b)}; }
    // Notes whether all values seen were finite: 0 * x is NaN for any other x, and the NaN stays.
    struct Finite {
        __m256 x = _mm256_setzero_ps();
        void see(F y) {
            x = _mm256_fmadd_ps(y.a, _mm256_setzero_ps(), x);
            x = _mm256_fmadd_ps(y.b, _mm256_setzero_ps(), x);
        }
        bool all() const { return _mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)) == 0; }
    };

    static F load(const float* p, Full) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
    static F load(const float* p, Part lanes) {
        return {_mm256_maskload_ps(p, lanes.a), _mm256_maskload_ps(p + 8, lanes.b)};
    }
    template <class L>
    static F load_bf16(const uint16_t* p, L lanes) {
        return interleave(_mm256_setzero_si256(), load_words(p, lanes));
    }
    template <class L>
    static F load_f16(const uint16_t* p, L lanes) {
        const __m256i words = load_words(p, lanes);
        return {_mm256_cvtph_ps(_mm256_castsi256_si128(words)),
                _mm256_cvtph_ps(_mm256_extracti128_si256(words, 1))};
    }
    template <class L>
    static F load_split(const uint16_t* high, const int16_t* low, L lanes) {
        const __m256i lower = load_words(reinterpret_cast<const uint16_t*>(low), lanes);
        // A negative remainder means that the high half was rounded up, so the rounding is undone
        // here.
        const __m256i rounded_up = _mm256_srai_epi16(lower, 15);
        return interleave(lower, _mm256_add_epi16(load_words(high, lanes), rounded_up));
    }

    static void store(float* p, F x, Full) {
        _mm256_storeu_ps(p, x.a);
        _mm256_storeu_ps(p + 8, x.b);
    }
    static void store(float* p, F x, Streamed) {
        _mm256_stream_ps(p, x.a);
        _mm256_stream_ps(p + 8, x.b);
    }
    static void store(float* p, F x, Part lanes) {
        _mm256_maskstore_ps(p, lanes.a, x.a);
        _mm256_maskstore_ps(p + 8, lanes.b, x.b);
    }
    // Rounds half up. x must be quiet, since a NaN's payload would carry into the sign.
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
        const __m256i zero = _mm256_setzero_si256();
        const __m256i a = _mm256_castps_si256(x.a);
        const __m256i b = _mm256_castps_si256(x.b);
        // The words are still in the order of packing, and the rounding needs no other order.
        const __m256i lower = _mm256_packus_epi32(_mm256_blend_epi16(a, zero, 0xAA),
                                                  _mm256_blend_epi16(b, zero, 0xAA));
        const __m256i upper =
            _mm256_packus_epi32(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16));
        const __m256i rounded = _mm256_sub_epi16(upper, _mm256_srai_epi16(lower, 15));
        store_words(reinterpret_cast<uint16_t*>(low), in_order(lower), lanes);
        store_words(high, in_order(rounded), lanes);
    }
    static void fence() { _mm_sfence(); }

    static U set_u(uint32_t x) {
        const __m256i all = _mm256_set1_epi32(static_cast<int>(x));
        return {all, all};
    }
    static U as_u(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
    static F as_f(U x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
    static U add_u(U x, U y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
    static U mul_u(U x, U y) {
        return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)};
    }
    static U and_u(U x, U y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
    static U xor_u(U x, U y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
    static U max_u(U x, U y) { return {_mm256_max_epu32(x.a, y.a), _mm256_max_epu32(x.b, y.b)}; }
    // (x and mask) or y.
    static U and_or(U x, U mask, U y) {
        x = and_u(x, mask);
        return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)};
    }
    // The larger of x and `bound` where `test` is not zero, and x elsewhere.
    static U at_least_if(U test, U bound, U x) {
        const __m256i zero = _mm256_setzero_si256();
        return max_u(x, {_mm256_andnot_si256(_mm256_cmpeq_epi32(test.a, zero), bound.a),
                         _mm256_andnot_si256(_mm256_cmpeq_epi32(test.b, zero), bound.b)});
    }
    template <int kBits>
    static U shl(U x) {
        return {_mm256_slli_epi32(x.a, kBits), _mm256_slli_epi32(x.b, kBits)};
    }
    template <int kBits>
    static U shr(U x) {
        return {_mm256_srli_epi32(x.a, kBits), _mm256_srli_epi32(x.b, kBits)};
    }
    // The number of each lane times `step`.
    static U ramp(uint32_t step) {
        return mul_u({_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                      _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)},
                     set_u(step));
    }
    // x in the given lanes, and zero beyond them.
    static U keep(U x, Full) { return x; }
    static U keep(U x, Part lanes) { return and_u(x, {lanes.a, lanes.b}); }
    static uint32_t largest(U x) {
        const __m256i half = _mm256_max_epu32(x.a, x.b);
        __m128i most =
            _mm_max_epu32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
        most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0x4E));
        most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0xB1));
        return static_cast<uint32_t>(_mm_cvtsi128_si32(most));
    }
    // Codes of n elements, one byte each, of one block at most.
    using Codes = const uint8_t*;
    static Codes load_codes(const uint8_t* p, size_t) { return p; }
    // The codes of the elements from k on, each shifted to bit kBit. Other bits may be anything.
    template <int kBit, class L>
    static U unpack(Codes codes, size_t k, L lanes) {
        return shl<kBit>(load_bytes(codes + k, lanes));
    }
    // Stores one byte for each element: the bits of `codes` from kBit on or, if kSigned, seven bits
    // from kBit on with bit 31 above them. Other bits may be anything. Returns whether any byte is
    // zero.
    template <int kBit, bool kSigned>
    static bool store_codes(uint8_t* p, const U* codes, size_t n) {
        __m128i zeros = _mm_setzero_si128();
        for (size_t k = 0; k < n; k += kWidth) {
            U x = shr<kBit>(codes[k / kWidth]);
            if constexpr (kSigned) {
                x = and_or(shr<24>(codes[k / kWidth]), set_u(0x80), and_u(x, set_u(0x7F)));
            } else {
                x = and_u(x, set_u(0xFF));
            }
            const __m128i bytes = narrow(x);
            zeros = _mm_or_si128(zeros, _mm_cmpeq_epi8(bytes, _mm_setzero_si128()));
            store_bytes(p + k, bytes, n - k);
        }
        return _mm_movemask_epi8(zeros) != 0;
    }
    // Stores the high half of each 32-bit element.
    template <class L>
    static void store_high(uint16_t* p, U x, L lanes) {
        x = shr<16>(x);
        store_words(p, in_order(_mm256_packus_epi32(x.a, x.b)), lanes);
    }

    // See [Note: fixed lanes].
    struct Squares {
        __m256d lane[kLanes / 4];
        Squares() {
            for (__m256d& each : lane) each = _mm256_setzero_pd();
        }
        void add(F x, int position) {
            const int at = position / 4;
            add_quarter(_mm256_castps256_ps128(x.a), at);
            add_quarter(_mm256_extractf128_ps(x.a, 1), at + 1);
            add_quarter(_mm256_castps256_ps128(x.b), at + 2);
            add_quarter(_mm256_extractf128_ps(x.b, 1), at + 3);
        }
        void add_quarter(__m128 x, int at) {
            const __m256d d = _mm256_cvtps_pd(x);
            lane[at] = _mm256_fmadd_pd(d, d, lane[at]);
        }
        double sum() const {
            double apart[kLanes];
            for (size_t i = 0; i < kLanes / 4; ++i) _mm256_storeu_pd(apart + 4 * i, lane[i]);
            return Scalar::sum(apart);
        }
    };

    // Bytes without a meaning, for the stream kernel.
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
    static U load_bytes(const uint8_t* p, Full) {
        return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static U load_bytes(const uint8_t* p, Part lanes) {
        alignas(16) uint8_t buffer[16] = {};
        for (size_t i = 0; i < lanes.count; ++i) buffer[i] = p[i];
        return widen(_mm_load_si128(reinterpret_cast<const __m128i*>(buffer)));
    }
    // Stores at most n bytes.
    static void store_bytes(uint8_t* p, __m128i bytes, size_t n) {
        if (n >= kWidth) {
            _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
            return;
        }
        alignas(16) uint8_t buffer[16];
        _mm_store_si128(reinterpret_cast<__m128i*>(buffer), bytes);
        for (size_t i = 0; i < n; ++i) p[i] = buffer[i];
    }
    static __m256 quiet_half(__m256 x) {
        const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000));
        return _mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    }
    static U widen(__m128i bytes) {
        return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
    }
    static __m128i narrow(U x) {
        const __m256i words = in_order(_mm256_packus_epi32(x.a, x.b));
        return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    }
    static __m256i load_words(const uint16_t* p, Full) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    }
    static __m256i load_words(const uint16_t* p, Part lanes) {
        alignas(32) uint16_t buffer[16] = {};
        for (size_t i = 0; i < lanes.count; ++i) buffer[i] = p[i];
        return _mm256_load_si256(reinterpret_cast<const __m256i*>(buffer));
    }
    static void store_words(uint16_t* p, __m256i x, Full) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x);
    }
    static void store_words(uint16_t* p, __m256i x, Part lanes) {
        alignas(32) uint16_t buffer[16];
        _mm256_store_si256(reinterpret_cast<__m256i*>(buffer), x);
        for (size_t i = 0; i < lanes.count; ++i) p[i] = buffer[i];
    }
    static void store_words(uint16_t* p, __m256i x, Streamed) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(p), x);
    }
    // AVX2 packs and unpacks within 128-bit halves, which leaves the two middle quarters exchanged.
    static __m256i in_order(__m256i x) { return _mm256_permute4x64_epi64(x, 0xD8); }
    // Sixteen 32-bit words from their 16-bit halves, in order.
    static F interleave(__m256i low, __m256i high) {
        low = in_order(low);
        high = in_order(high);
        return {_mm256_castsi256_ps(_mm256_unpacklo_epi16(low, high)),
                _mm256_castsi256_ps(_mm256_unpackhi_epi16(low, high))};
    }
    static __m256i round_bf16(F x) {
        const __m256i half = _mm256_set1_epi32(0x8000);
        const __m256i a = _mm256_add_epi32(_mm256_castps_si256(x.a), half);
        const __m256i b = _mm256_add_epi32(_mm256_castps_si256(x.b), half);
        return in_order(_mm256_packus_epi32(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16)));
    }
    static __m256i round_f16(F x) {
        const __m128i a = _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT);
        const __m128i b = _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT);
        return _mm256_set_m128i(b, a);
    }
};

}  // namespace
}  // namespace infinity::cpu_adam
