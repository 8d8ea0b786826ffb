// One element at a time, for any CPU. This type defines what the wider types must compute.
#pragma once

#include <cstdint>
#include <cstring>

#include "scalar.hpp"

namespace infinity::cpu_adam {
namespace {

struct Vec {
    using F = float;
    using U = uint32_t;
    static constexpr int kWidth = 1;
    struct Full {};
    using Streamed = Full;  // there are no stores past the caches
    struct Part {           // never made, since a width of one leaves no tail
        explicit Part(size_t) {}
    };

    static F set(float x) { return x; }
    static F add(F a, F b) { return Scalar::add(a, b); }
    static F sub(F a, F b) { return Scalar::sub(a, b); }
    static F mul(F a, F b) { return Scalar::mul(a, b); }
    static F div(F a, F b) { return Scalar::div(a, b); }
    static F fma(F a, F b, F c) { return Scalar::fma(a, b, c); }
    static F sqrt(F x) { return Scalar::sqrt(x); }
    // The smaller of `bound` and x. NaN if x is NaN.
    static F at_most(F bound, F x) { return Scalar::at_most(bound, x); }
    static F quiet(F x) { return Scalar::quiet(x); }
    // Notes whether all values seen were finite: 0 * x is NaN for any other x, and the NaN stays.
    struct Finite {
        float x = 0;
        void see(F y) { x += y * 0.0F; }
        bool all() const { return x == x; }
    };

    template <class L>
    static F load(const float* p, L) {
        return *p;
    }
    template <class L>
    static F load_bf16(const uint16_t* p, L) {
        return Scalar::from_bf16(*p);
    }
    template <class L>
    static F load_f16(const uint16_t* p, L) {
        return Scalar::from_f16(*p);
    }
    template <class L>
    static F load_split(const uint16_t* high, const int16_t* low, L) {
        return Scalar::from_split(*high, *low);
    }

    template <class L>
    static void store(float* p, F x, L) {
        *p = x;
    }
    // Rounds half up. x must be quiet, since a NaN's payload would carry into the sign.
    template <class L>
    static void store_bf16(uint16_t* p, F x, L) {
        *p = Scalar::to_bf16(x);
    }
    template <class L>
    static void store_f16(uint16_t* p, F x, L) {
        *p = Scalar::to_f16(x);
    }
    template <class L>
    static void store_split(uint16_t* high, int16_t* low, F x, L lanes) {
        *low = Scalar::to_remainder(x);
        store_bf16(high, x, lanes);
    }
    static void fence() {}

    static U set_u(uint32_t x) { return x; }
    static U as_u(F x) { return Scalar::bits(x); }
    static F as_f(U x) { return Scalar::from_bits(x); }
    static U add_u(U a, U b) { return a + b; }
    static U mul_u(U a, U b) { return a * b; }
    static U and_u(U a, U b) { return a & b; }
    static U xor_u(U a, U b) { return a ^ b; }
    static U max_u(U a, U b) { return Scalar::larger(a, b); }
    static U and_or(U x, U mask, U y) { return (x & mask) | y; }
    // The larger of x and `bound` where `test` is not zero, and x elsewhere.
    static U at_least_if(U test, U bound, U x) { return Scalar::at_least_if(test, bound, x); }
    template <int kBits>
    static U shl(U x) {
        return x << kBits;
    }
    template <int kBits>
    static U shr(U x) {
        return x >> kBits;
    }
    // The number of each lane times `step`.
    static U ramp(uint32_t) { return 0; }
    // x in the given lanes, and zero beyond them.
    template <class L>
    static U keep(U x, L) {
        return x;
    }
    static uint32_t largest(U x) { return x; }
    // Codes of n elements, one byte each, of one block at most.
    using Codes = const uint8_t*;
    static Codes load_codes(const uint8_t* p, size_t) { return p; }
    // The codes of the elements from k on, each shifted to bit kBit. Other bits may be anything.
    template <int kBit, class L>
    static U unpack(Codes codes, size_t k, L) {
        return static_cast<U>(codes[k]) << kBit;
    }
    // Stores one byte for each element: the bits of `codes` from kBit on or, if kSigned, seven bits
    // from kBit on with bit 31 above them. Other bits may be anything. Returns whether any byte is
    // zero.
    template <int kBit, bool kSigned>
    static bool store_codes(uint8_t* p, const U* codes, size_t n) {
        bool zero = false;
        for (size_t k = 0; k < n; ++k) {
            const uint8_t byte = Scalar::code<kBit, kSigned>(codes[k]);
            p[k] = byte;
            zero |= byte == 0;
        }
        return zero;
    }
    // Stores the high half of each 32-bit element.
    template <class L>
    static void store_high(uint16_t* p, U x, L) {
        *p = static_cast<uint16_t>(x >> 16);
    }

    // See [Note: fixed lanes].
    struct Squares {
        double lane[kLanes] = {};
        void add(F x, int position) { lane[position] = Scalar::add_square(lane[position], x); }
        double sum() { return Scalar::sum(lane); }
    };

    // Bytes without a meaning, for the stream kernel.
    struct Bytes {
        uint64_t x;
        static constexpr size_t kSize = 8;
        static Bytes set(uint64_t v) { return {v}; }
        static Bytes load(const unsigned char* p) {
            Bytes b;
            std::memcpy(&b.x, p, 8);
            return b;
        }
        void store(unsigned char* p) const { std::memcpy(p, &x, 8); }
        void stream(unsigned char* p) const { store(p); }
        Bytes exclusive_or(Bytes o) const { return {x ^ o.x}; }
        uint64_t digest() const { return x; }
    };
};

}  // namespace
}  // namespace infinity::cpu_adam
