// Four elements at a time: NEON, which every AArch64 CPU has.
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "scalar.hpp"

namespace infinity::cpu_adam {
namespace {

struct Vec {
    using F = float32x4_t;
    using U = uint32x4_t;
    static constexpr int kWidth = 4;
    struct Full {};
    using Streamed = Full;  // NEON has no streaming stores for one register
    // The first `count` elements. There are no masked accesses, so accesses go through a copy. The
    // lanes beyond the count are zero.
    struct Part {
        explicit Part(size_t n) : count(n) {}
        size_t count;
    };

    static F set(float x) { return vdupq_n_f32(x); }
    static F add(F a, F b) { return vaddq_f32(a, b); }
    static F sub(F a, F b) { return vsubq_f32(a, b); }
    static F mul(F a, F b) { return vmulq_f32(a, b); }
    static F div(F a, F b) { return vdivq_f32(a, b); }
    static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
    static F sqrt(F x) { return vsqrtq_f32(x); }
    // The smaller of `bound` and x. NaN if x is NaN.
    static F at_most(F bound, F x) { return vminq_f32(bound, x); }
    static F quiet(F x) {
        return vbslq_f32(vceqq_f32(x, x), x, vreinterpretq_f32_u32(vdupq_n_u32(0x7FC00000U)));
    }
    // Notes whether all values seen were finite: 0 * x is NaN for any other x, and the NaN stays.
    struct Finite {
        float32x4_t x = vdupq_n_f32(0);
        void see(F y) { x = vfmaq_f32(x, y, vdupq_n_f32(0)); }
        bool all() const { return vminvq_u32(vceqq_f32(x, x)) != 0; }
    };

    static F load(const float* p, Full) { return vld1q_f32(p); }
    static F load(const float* p, Part lanes) {
        float buffer[4] = {};
        for (size_t i = 0; i < lanes.count; ++i) buffer[i] = p[i];
        return vld1q_f32(buffer);
    }
    template <class L>
    static F load_bf16(const uint16_t* p, L lanes) {
        return vreinterpretq_f32_u32(vshll_n_u16(load_words(p, lanes), 16));
    }
    template <class L>
    static F load_f16(const uint16_t* p, L lanes) {
        return vcvt_f32_f16(vreinterpret_f16_u16(load_words(p, lanes)));
    }
    template <class L>
    static F load_split(const uint16_t* high, const int16_t* low, L lanes) {
        const uint32x4_t upper = vreinterpretq_u32_f32(load_bf16(high, lanes));
        const uint16x4_t words = load_words(reinterpret_cast<const uint16_t*>(low), lanes);
        const int32x4_t lower = vmovl_s16(vreinterpret_s16_u16(words));
        return vreinterpretq_f32_u32(vaddq_u32(upper, vreinterpretq_u32_s32(lower)));
    }

    static void store(float* p, F x, Full) { vst1q_f32(p, x); }
    static void store(float* p, F x, Part lanes) {
        float buffer[4];
        vst1q_f32(buffer, x);
        for (size_t i = 0; i < lanes.count; ++i) p[i] = buffer[i];
    }
    // Rounds half up. x must be quiet, since a NaN's payload would carry into the sign.
    template <class L>
    static void store_bf16(uint16_t* p, F x, L lanes) {
        const uint32x4_t up = vaddq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(0x8000U));
        store_words(p, vshrn_n_u32(up, 16), lanes);
    }
    template <class L>
    static void store_f16(uint16_t* p, F x, L lanes) {
        store_words(p, vreinterpret_u16_f16(vcvt_f16_f32(x)), lanes);
    }
    template <class L>
    static void store_split(uint16_t* high, int16_t* low, F x, L lanes) {
        const uint16x4_t lower = vmovn_u32(vreinterpretq_u32_f32(x));  // truncates
        store_words(reinterpret_cast<uint16_t*>(low), lower, lanes);
        store_bf16(high, x, lanes);
    }
    static void fence() {}

    static U set_u(uint32_t x) { return vdupq_n_u32(x); }
    static U as_u(F x) { return vreinterpretq_u32_f32(x); }
    static F as_f(U x) { return vreinterpretq_f32_u32(x); }
    static U add_u(U a, U b) { return vaddq_u32(a, b); }
    static U mul_u(U a, U b) { return vmulq_u32(a, b); }
    static U and_u(U a, U b) { return vandq_u32(a, b); }
    static U xor_u(U a, U b) { return veorq_u32(a, b); }
    static U max_u(U a, U b) { return vmaxq_u32(a, b); }
    // (x and mask) or y.
    static U and_or(U x, U mask, U y) { return vorrq_u32(vandq_u32(x, mask), y); }
    // The larger of x and `bound` where `test` is not zero, and x elsewhere.
    static U at_least_if(U test, U bound, U x) {
        return vmaxq_u32(x, vandq_u32(vtstq_u32(test, test), bound));
    }
    template <int kBits>
    static U shl(U x) {
        return vshlq_n_u32(x, kBits);
    }
    template <int kBits>
    static U shr(U x) {
        return vshrq_n_u32(x, kBits);
    }
    // The number of each lane times `step`.
    static U ramp(uint32_t step) {
        const uint32_t lane[4] = {0, step, 2 * step, 3 * step};
        return vld1q_u32(lane);
    }
    // x in the given lanes, and zero beyond them.
    static U keep(U x, Full) { return x; }
    static U keep(U x, Part lanes) {
        const uint32_t lane[4] = {0, 1, 2, 3};
        const U inside =
            vcltq_u32(vld1q_u32(lane), vdupq_n_u32(static_cast<uint32_t>(lanes.count)));
        return vandq_u32(x, inside);
    }
    static uint32_t largest(U x) { return vmaxvq_u32(x); }
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
        U least = vdupq_n_u32(0xFFU);
        for (size_t k = 0; k < n; k += kWidth) {
            U bytes = vandq_u32(vshrq_n_u32(codes[k / kWidth], kBit), vdupq_n_u32(0xFFU));
            if constexpr (kSigned) {
                const U signs = vshrq_n_u32(codes[k / kWidth], 24);
                bytes = vbslq_u32(vdupq_n_u32(0x80U), signs, bytes);
            }
            least = vminq_u32(least, bytes);
            const uint32_t four = narrow(bytes);
            std::memcpy(p + k, &four, n - k < kWidth ? n - k : kWidth);
        }
        return vminvq_u32(least) == 0;
    }
    // Stores the high half of each 32-bit element.
    template <class L>
    static void store_high(uint16_t* p, U x, L lanes) {
        store_words(p, vshrn_n_u32(x, 16), lanes);
    }

    // See [Note: fixed lanes].
    struct Squares {
        float64x2_t lane[kLanes / 2];
        Squares() {
            for (float64x2_t& each : lane) each = vdupq_n_f64(0);
        }
        void add(F x, int position) {
            add_half(vcvt_f64_f32(vget_low_f32(x)), position / 2);
            add_half(vcvt_high_f64_f32(x), position / 2 + 1);
        }
        void add_half(float64x2_t d, int at) { lane[at] = vfmaq_f64(lane[at], d, d); }
        double sum() const {
            double apart[kLanes];
            for (size_t i = 0; i < kLanes / 2; ++i) vst1q_f64(apart + 2 * i, lane[i]);
            return Scalar::sum(apart);
        }
    };

    // Bytes without a meaning, for the stream kernel.
    struct Bytes {
        uint8x16_t x;
        static constexpr size_t kSize = 16;
        static Bytes set(uint64_t v) { return {vreinterpretq_u8_u64(vdupq_n_u64(v))}; }
        static Bytes load(const unsigned char* p) { return {vld1q_u8(p)}; }
        void store(unsigned char* p) const { vst1q_u8(p, x); }
        void stream(unsigned char* p) const { store(p); }
        Bytes exclusive_or(Bytes o) const { return {veorq_u8(x, o.x)}; }
        uint64_t digest() const {
            const uint64x2_t word = vreinterpretq_u64_u8(x);
            return vgetq_lane_u64(word, 0) ^ vgetq_lane_u64(word, 1);
        }
    };

  private:
    static U load_bytes(const uint8_t* p, Full) {
        uint32_t four;
        std::memcpy(&four, p, 4);
        return widen(four);
    }
    static U load_bytes(const uint8_t* p, Part lanes) {
        uint32_t four = 0;
        std::memcpy(&four, p, lanes.count);
        return widen(four);
    }
    static U widen(uint32_t four) { return vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four)))); }
    static uint32_t narrow(U x) {
        const uint16x4_t words = vmovn_u32(x);
        return vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(words, words))), 0);
    }
    static uint16x4_t load_words(const uint16_t* p, Full) { return vld1_u16(p); }
    static uint16x4_t load_words(const uint16_t* p, Part lanes) {
        uint16_t buffer[4] = {};
        for (size_t i = 0; i < lanes.count; ++i) buffer[i] = p[i];
        return vld1_u16(buffer);
    }
    static void store_words(uint16_t* p, uint16x4_t x, Full) { vst1_u16(p, x); }
    static void store_words(uint16_t* p, uint16x4_t x, Part lanes) {
        uint16_t buffer[4];
        vst1_u16(buffer, x);
        for (size_t i = 0; i < lanes.count; ++i) p[i] = buffer[i];
    }
};

}  // namespace
}  // namespace infinity::cpu_adam
