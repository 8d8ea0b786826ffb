// The operations on one element, by which the wider types are defined. They are correctly rounded,
// keep denormals, and are fused only where the name says so. They work on any CPU, and on a GPU as
// compiled by NVRTC, which has no standard library.
#pragma once

#include "formats.hpp"

#if !defined(__CUDACC_RTC__)
#include <cmath>
#include <cstring>
#endif

namespace infinity::cpu_adam {
namespace {

struct Scalar {
#if defined(__CUDACC_RTC__)
    static uint32_t bits(float x) { return __float_as_uint(x); }
    static float from_bits(uint32_t u) { return __uint_as_float(u); }
    static float add(float a, float b) { return __fadd_rn(a, b); }
    static float sub(float a, float b) { return __fsub_rn(a, b); }
    static float mul(float a, float b) { return __fmul_rn(a, b); }
    static float div(float a, float b) { return __fdiv_rn(a, b); }
    static float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
    static float sqrt(float x) { return __fsqrt_rn(x); }
    static double add(double a, double b) { return __dadd_rn(a, b); }
    static double mul(double a, double b) { return __dmul_rn(a, b); }
#else
    static uint32_t bits(float x) {
        uint32_t u;
        std::memcpy(&u, &x, 4);
        return u;
    }
    static float from_bits(uint32_t u) {
        float x;
        std::memcpy(&x, &u, 4);
        return x;
    }
    static float add(float a, float b) { return a + b; }
    static float sub(float a, float b) { return a - b; }
    static float mul(float a, float b) { return a * b; }
    static float div(float a, float b) { return a / b; }
    static float fma(float a, float b, float c) { return std::fma(a, b, c); }
    static float sqrt(float x) { return std::sqrt(x); }
    static double add(double a, double b) { return a + b; }
    static double mul(double a, double b) { return a * b; }
#endif
    // The smaller of `bound` and x. NaN if x is NaN.
    static float at_most(float bound, float x) { return bound < x ? bound : x; }
    static float quiet(float x) { return x != x ? from_bits(0x7FC00000U) : x; }
    // Adds the square of x, which is exact in fp64.
    static double add_square(double sum, float x) {
        const double d = x;
        return add(sum, mul(d, d));
    }

    // Adds the lanes of squares in one fixed tree, see [Note: fixed lanes]. The lanes are
    // overwritten.
    static double sum(double* lane) {
        for (size_t half = kLanes / 2; half > 0; half /= 2) {
            for (size_t l = 0; l < half; ++l) lane[l] = add(lane[l], lane[l + half]);
        }
        return lane[0];
    }

    static float from_bf16(uint16_t x) { return from_bits(static_cast<uint32_t>(x) << 16); }
    static float from_f16(uint16_t x) {
        const uint32_t sign = static_cast<uint32_t>(x & 0x8000U) << 16;
        const uint32_t magnitude = x & 0x7FFFU;
        if (magnitude >= 0x7C00U) return from_bits(sign | 0x7F800000U | (magnitude << 13));
        if (magnitude >= 0x0400U) return from_bits(sign | ((magnitude << 13) + 0x38000000U));
        const float subnormal = mul(static_cast<float>(magnitude), 0x1p-24F);
        return from_bits(sign | bits(subnormal));
    }
    static float from_split(uint16_t high, int16_t low) {
        return from_bits((static_cast<uint32_t>(high) << 16) + static_cast<uint32_t>(low));
    }
    // Rounds half up. x must be quiet, since a NaN's payload would carry into the sign.
    static uint16_t to_bf16(float x) { return static_cast<uint16_t>((bits(x) + 0x8000U) >> 16); }
    // Rounds to nearest, ties to even.
    static uint16_t to_f16(float x) {
        const uint32_t sign = (bits(x) >> 16) & 0x8000U;
        uint32_t u = bits(x) & 0x7FFFFFFFU;
        if (u > 0x7F800000U) {
            u = 0x7E00U;
        } else if (u >= 0x47800000U) {  // 65536
            u = 0x7C00U;
        } else if (u < 0x38800000U) {  // below the smallest normal half: an fp32 addition rounds it
            u = bits(add(from_bits(u), 0.5F)) - bits(0.5F);
        } else {
            u = (u + 0x0FFFU + ((u >> 13) & 1U) - 0x38000000U) >> 13;
        }
        return static_cast<uint16_t>(sign | u);
    }
    // The low half of a master weight whose high half is to_bf16 of the weight.
    static int16_t to_remainder(float x) { return static_cast<int16_t>(bits(x) & 0xFFFFU); }

    static uint32_t larger(uint32_t a, uint32_t b) { return a < b ? b : a; }
    // The larger of x and `bound` where `test` is not zero, and x elsewhere.
    static uint32_t at_least_if(uint32_t test, uint32_t bound, uint32_t x) {
        return test != 0 && x < bound ? bound : x;
    }
    // The byte from bit kBit on. If kSigned, seven bits from there with bit 31 above them.
    template <int kBit, bool kSigned>
    static uint8_t code(uint32_t x) {
        uint32_t byte = x >> kBit & 0xFFU;
        if (kSigned) byte = (byte & 0x7FU) | (x >> 24 & 0x80U);
        return static_cast<uint8_t>(byte);
    }
};

}  // namespace
}  // namespace infinity::cpu_adam
