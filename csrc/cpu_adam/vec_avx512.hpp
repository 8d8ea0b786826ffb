// Thirty-two elements at a time in two registers: AVX-512 F, BW, VL and DQ. A register of 16-bit
// elements is split into even and odd elements, which are the low and the high halves of its 32-bit
// lanes. This takes only cheap shifts and shuffles within a lane. Keeping the elements in a row
// would take permutations. They are needed only for loads and stores of fp32, a pair each, which
// are the less frequent case.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "scalar.hpp"

namespace infinity::cpu_adam {
namespace {

struct Vec {
    struct F {  // elements 0, 2, 4... and 1, 3, 5...
        __m512 even;
        __m512 odd;
    };
    struct U {  // uint32, likewise
        __m512i even;
        __m512i odd;
    };
    static constexpr int kWidth = 32;
    struct Full {};
    // All elements, in stores past the caches. The address must be a multiple of 64 bytes.
    struct Streamed {};
    // The first `count` elements. The lanes beyond the count are zero.
    struct Part {
        explicit Part(size_t count)
            : all((1U << count) - 1U),
              even(static_cast<__mmask16>((1U << (count + 1) / 2) - 1U)),
              odd(static_cast<__mmask16>((1U << count / 2) - 1U)) {}
        __mmask32 all;  // in the order of memory
        __mmask16 even;
        __mmask16 odd;
    };

    static F set(float x) { return {_mm512_set1_ps(x), _mm512_set1_ps(x)}; }
    static F add(F x, F y) { return {_mm512_add_ps(x.even, y.even), _mm512_add_ps(x.odd, y.odd)}; }
    static F sub(F x, F y) { return {_mm512_sub_ps(x.even, y.even), _mm512_sub_ps(x.odd, y.odd)}; }
    static F mul(F x, F y) { return {_mm512_mul_ps(x.even, y.even), _mm512_mul_ps(x.odd, y.odd)}; }
    static F div(F x, F y) { return {_mm512_div_ps(x.even, y.even), _mm512_div_ps(x.odd, y.odd)}; }
    static F fma(F x, F y, F z) {
        return {_mm512_fmadd_ps(x.even, y.even, z.even), _mm512_fmadd_ps(x.odd, y.odd, z.odd)};
    }
    static F sqrt(F x) { return {_mm512_sqrt_ps(x.even), _mm512_sqrt_ps(x.odd)}; }
    // The smaller of `bound` and x. NaN if x is NaN (minps returns its second operand then).
    static F at_most(F bound, F x) {
        return {_mm512_min_ps(bound.even, x.even), _mm512_min_ps(bound.odd, x.odd)};
    }
    static F quiet(F x) { return {quiet_half(x.even), quiet_half(x.odd)}; }
    // Notes whether all values seen were finite: 0 * x is NaN for any other x, and the NaN stays.
    struct Finite {
        __m512 x = _mm512_setzero_ps();
        void see(F y) {
            x = _mm512_fmadd_ps(y.even, _mm512_setzero_ps(), x);
            x = _mm512_fmadd_ps(y.odd, _mm512_setzero_ps(), x);
        }
        bool all() const { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) == 0; }
    };

    static F load(const float* p, Full) {
        return apart(_mm512_loadu_ps(p), _mm512_loadu_ps(p + 16));
    }
    static F load(const float* p, Part lanes) {
        return apart(_mm512_maskz_loadu_ps(low_half(lanes), p),
                     _mm512_maskz_loadu_ps(high_half(lanes), p + 16));
    }
    template <class L>
    static F load_bf16(const uint16_t* p, L lanes) {
        const __m512i words = load_words(p, lanes);
        const __m512i odd = _mm512_and_si512(words, _mm512_set1_epi32(-0x10000));
        return {_mm512_castsi512_ps(_mm512_slli_epi32(words, 16)), _mm512_castsi512_ps(odd)};
    }
    template <class L>
    static F load_f16(const uint16_t* p, L lanes) {
        const __m512i words = load_words(p, lanes);
        return apart(_mm512_cvtph_ps(_mm512_castsi512_si256(words)),
                     _mm512_cvtph_ps(_mm512_extracti64x4_epi64(words, 1)));
    }
    template <class L>
    static F load_split(const uint16_t* high, const int16_t* low, L lanes) {
        const __m512i lower = load_words(reinterpret_cast<const uint16_t*>(low), lanes);
        // A negative remainder means that the high half was rounded up, so the rounding is undone
        // here.
        const __m512i upper =
            _mm512_add_epi16(load_words(high, lanes), _mm512_srai_epi16(lower, 15));
        return {_mm512_castsi512_ps(low_words(lower, upper)),
                _mm512_castsi512_ps(high_words(lower, upper))};
    }

    static void store(float* p, F x, Full) {
        _mm512_storeu_ps(p, first_half(x));
        _mm512_storeu_ps(p + 16, second_half(x));
    }
    static void store(float* p, F x, Streamed) {
        _mm512_stream_ps(p, first_half(x));
        _mm512_stream_ps(p + 16, second_half(x));
    }
    static void store(float* p, F x, Part lanes) {
        _mm512_mask_storeu_ps(p, low_half(lanes), first_half(x));
        _mm512_mask_storeu_ps(p + 16, high_half(lanes), second_half(x));
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
        const U u = as_u(x);
        const __m512i lower = low_words(u.even, u.odd);
        const __m512i rounded =
            _mm512_sub_epi16(high_words(u.even, u.odd), _mm512_srai_epi16(lower, 15));
        store_words(reinterpret_cast<uint16_t*>(low), lower, lanes);
        store_words(high, rounded, lanes);
    }
    static void fence() { _mm_sfence(); }

    static U set_u(uint32_t x) {
        const __m512i all = _mm512_set1_epi32(static_cast<int>(x));
        return {all, all};
    }
    static U as_u(F x) { return {_mm512_castps_si512(x.even), _mm512_castps_si512(x.odd)}; }
    static F as_f(U x) { return {_mm512_castsi512_ps(x.even), _mm512_castsi512_ps(x.odd)}; }
    static U add_u(U x, U y) {
        return {_mm512_add_epi32(x.even, y.even), _mm512_add_epi32(x.odd, y.odd)};
    }
    static U mul_u(U x, U y) {
        return {_mm512_mullo_epi32(x.even, y.even), _mm512_mullo_epi32(x.odd, y.odd)};
    }
    static U and_u(U x, U y) {
        return {_mm512_and_si512(x.even, y.even), _mm512_and_si512(x.odd, y.odd)};
    }
    static U xor_u(U x, U y) {
        return {_mm512_xor_si512(x.even, y.even), _mm512_xor_si512(x.odd, y.odd)};
    }
    static U max_u(U x, U y) {
        return {_mm512_max_epu32(x.even, y.even), _mm512_max_epu32(x.odd, y.odd)};
    }
    // (x and mask) or y.
    static U and_or(U x, U mask, U y) {
        constexpr int kTable = 0xF8;  // the truth table of a | (b & c)
        return {_mm512_ternarylogic_epi32(y.even, x.even, mask.even, kTable),
                _mm512_ternarylogic_epi32(y.odd, x.odd, mask.odd, kTable)};
    }
    // The larger of x and `bound` where `test` is not zero, and x elsewhere.
    static U at_least_if(U test, U bound, U x) {
        const __mmask16 even = _mm512_test_epi32_mask(test.even, test.even);
        const __mmask16 odd = _mm512_test_epi32_mask(test.odd, test.odd);
        return {_mm512_mask_max_epu32(x.even, even, x.even, bound.even),
                _mm512_mask_max_epu32(x.odd, odd, x.odd, bound.odd)};
    }
    template <int kBits>
    static U shl(U x) {
        return {_mm512_slli_epi32(x.even, kBits), _mm512_slli_epi32(x.odd, kBits)};
    }
    template <int kBits>
    static U shr(U x) {
        return {_mm512_srli_epi32(x.even, kBits), _mm512_srli_epi32(x.odd, kBits)};
    }
    // The number of each element times `step`.
    static U ramp(uint32_t step) {
        const __m512i even =
            _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
        return mul_u({even, _mm512_add_epi32(even, _mm512_set1_epi32(1))}, set_u(step));
    }
    // x in the given lanes, and zero beyond them.
    static U keep(U x, Full) { return x; }
    static U keep(U x, Part lanes) {
        return {_mm512_maskz_mov_epi32(lanes.even, x.even),
                _mm512_maskz_mov_epi32(lanes.odd, x.odd)};
    }
    static uint32_t largest(U x) {
        const __m512i both = _mm512_max_epu32(x.even, x.odd);
        const __m256i half =
            _mm256_max_epu32(_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1));
        __m128i most =
            _mm_max_epu32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
        most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0x4E));
        most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0xB1));
        return static_cast<uint32_t>(_mm_cvtsi128_si32(most));
    }
    // Codes of n elements, one byte each, of one block at most. Lane k has the elements 2k, 2k + 1,
    // 2k + 32 and 2k + 33.
    using Codes = __m512i;
    static Codes load_codes(const uint8_t* p, size_t n) {
        static_assert(kCodeBlock == 2 * kWidth);
        const __m512i bytes =
            n == kCodeBlock ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi8(first_bytes(n), p);
        const __m512i at =
            _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                             22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        return _mm512_permutexvar_epi16(at, bytes);
    }
    // The codes of the elements from k on, each shifted to bit kBit. Other bits may be anything.
    template <int kBit, class L>
    static U unpack(Codes codes, size_t k, L) {
        static_assert(kBit >= 16 && kBit <= 24);
        if (k == 0) return {_mm512_slli_epi32(codes, kBit), _mm512_slli_epi32(codes, kBit - 8)};
        return {_mm512_slli_epi32(codes, kBit - 16), _mm512_srli_epi32(codes, 24 - kBit)};
    }
    // Stores one byte for each element: the bits of `codes` from kBit on or, if kSigned, seven bits
    // from kBit on with bit 31 above them. Other bits may be anything. Returns whether any byte is
    // zero.
    template <int kBit, bool kSigned>
    static bool store_codes(uint8_t* p, const U* codes, size_t n) {
        static_assert(kBit >= 16 && kBit <= 24);
        const __m512i even = all_high_words(codes[0].even, codes[1].even);
        const __m512i odd = all_high_words(codes[0].odd, codes[1].odd);
        __m512i bytes =
            pairs(_mm512_srli_epi16(even, kBit - 16), _mm512_slli_epi16(odd, 24 - kBit));
        if constexpr (kSigned) {
            const __m512i signs = pairs(_mm512_srli_epi16(even, 8), odd);
            bytes = _mm512_ternarylogic_epi32(_mm512_set1_epi8(-0x80), signs, bytes, kSelect);
        }
        if (n == kCodeBlock) {
            _mm512_storeu_si512(p, bytes);
        } else {
            _mm512_mask_storeu_epi8(p, first_bytes(n), bytes);
        }
        return _mm512_cmpeq_epi8_mask(bytes, _mm512_setzero_si512()) != 0;
    }
    // Stores the high half of each 32-bit element.
    template <class L>
    static void store_high(uint16_t* p, U x, L lanes) {
        store_words(p, high_words(x.even, x.odd), lanes);
    }

    // See [Note: fixed lanes].
    struct Squares {
        static_assert(kLanes == kWidth);
        __m512d lane[4];  // of elements 0, 2... 14, of 16... 30, of 1... 15, of 17... 31
        Squares() {
            for (__m512d& each : lane) each = _mm512_setzero_pd();
        }
        void add(F x, int) {
            add_half(_mm512_castps512_ps256(x.even), 0);
            add_half(_mm512_extractf32x8_ps(x.even, 1), 1);
            add_half(_mm512_castps512_ps256(x.odd), 2);
            add_half(_mm512_extractf32x8_ps(x.odd, 1), 3);
        }
        void add_half(__m256 half, int at) {
            const __m512d d = _mm512_cvtps_pd(half);
            lane[at] = _mm512_fmadd_pd(d, d, lane[at]);
        }
        double sum() const {
            double apart[kLanes];
            double in_order[kLanes];
            for (size_t i = 0; i < 4; ++i) _mm512_storeu_pd(apart + 8 * i, lane[i]);
            for (size_t i = 0; i < kLanes; ++i) in_order[i] = apart[i / 2 + i % 2 * (kLanes / 2)];
            return Scalar::sum(in_order);
        }
    };

    // Bytes without a meaning, for the stream kernel.
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
    static constexpr int kSelect = 0xCA;  // the truth table of a ? b : c

    static __mmask16 low_half(Part lanes) { return static_cast<__mmask16>(lanes.all); }
    static __mmask16 high_half(Part lanes) { return static_cast<__mmask16>(lanes.all >> 16); }
    // Splits thirty-two elements in a row into even and odd elements, and the reverse.
    static F apart(__m512 first, __m512 second) {
        const __m512i even =
            _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
        const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
        return {_mm512_permutex2var_ps(first, even, second),
                _mm512_permutex2var_ps(first, odd, second)};
    }
    static __m512 first_half(F x) {
        const __m512i at = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        return _mm512_permutex2var_ps(x.even, at, x.odd);
    }
    static __m512 second_half(F x) {
        const __m512i at =
            _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8);
        return _mm512_permutex2var_ps(x.even, at, x.odd);
    }
    // Lanes of the low 16-bit words of both, and of the high words of both. Each function undoes
    // the other, and together they turn even and odd elements into words in a row.
    static __m512i low_words(__m512i x, __m512i y) {
        constexpr __mmask64 kOddWords = 0xCCCCCCCCCCCCCCCCU;
        const __m512i low_twice = _mm512_set4_epi32(0x0D0C0D0C, 0x09080908, 0x05040504, 0x01000100);
        return _mm512_mask_shuffle_epi8(x, kOddWords, y, low_twice);
    }
    static __m512i high_words(__m512i x, __m512i y) {
        constexpr __mmask64 kEvenWords = 0x3333333333333333U;
        const __m512i high_twice =
            _mm512_set4_epi32(0x0F0E0F0E, 0x0B0A0B0A, 0x07060706, 0x03020302);
        return _mm512_mask_shuffle_epi8(y, kEvenWords, x, high_twice);
    }
    // The low byte of every word of x, with the high byte of the word of y above it.
    static __m512i pairs(__m512i x, __m512i y) {
        return _mm512_ternarylogic_epi32(_mm512_set1_epi16(-0x100), y, x, kSelect);
    }
    // The high words of both registers, with x's words first.
    static __m512i all_high_words(__m512i x, __m512i y) {
        const __m512i at =
            _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29,
                             27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
        return _mm512_permutex2var_epi16(x, at, y);
    }
    static __mmask64 first_bytes(size_t n) { return (uint64_t{1} << n) - 1; }
    static __m512 quiet_half(__m512 x) {
        const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7FC00000));
        return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), nan);
    }
    static __m512i load_words(const uint16_t* p, Full) { return _mm512_loadu_si512(p); }
    static __m512i load_words(const uint16_t* p, Part lanes) {
        return _mm512_maskz_loadu_epi16(lanes.all, p);
    }
    static void store_words(uint16_t* p, __m512i x, Full) { _mm512_storeu_si512(p, x); }
    static void store_words(uint16_t* p, __m512i x, Part lanes) {
        _mm512_mask_storeu_epi16(p, lanes.all, x);
    }
    static void store_words(uint16_t* p, __m512i x, Streamed) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(p), x);
    }
    static __m512i round_bf16(F x) {
        const U up = add_u(as_u(x), set_u(0x8000U));
        return high_words(up.even, up.odd);
    }
    static __m512i round_f16(F x) {
        const __m256i first = _mm512_cvtps_ph(first_half(x), _MM_FROUND_TO_NEAREST_INT);
        const __m256i second = _mm512_cvtps_ph(second_half(x), _MM_FROUND_TO_NEAREST_INT);
        return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
    }
};

}  // namespace
}  // namespace infinity::cpu_adam
