// Thirty-two elements at a time in a GPU's warp, one in each lane. A register of the kernels is one
// register of each of the warp's threads, and all threads of a warp take the same decisions.
//
// [Note: one source] NVRTC compiles this file for the device. A C++ compiler compiles the same
// lines for the CPU, for tests, where a loop over the lanes replaces the warp. One thread holds
// `kHeld` lanes: its own lane on the device, all lanes on the CPU. Lanes exchange values only in
// the functions under "between lanes", which are the only functions written twice.
#pragma once

#include "scalar.hpp"

namespace infinity::cpu_adam {
namespace {

struct Vec {
    static constexpr int kWidth = 32;
    static_assert(kWidth == kLanes);  // a lane of [Note: fixed lanes] is a lane of the warp
#if defined(__CUDACC_RTC__)
    static constexpr int kHeld = 1;
    static size_t lane(int) { return threadIdx.x % kWidth; }
#else
    static constexpr int kHeld = kWidth;
    static size_t lane(int held) { return static_cast<size_t>(held); }
#endif
    struct F {
        float held[kHeld];
    };
    struct U {
        uint32_t held[kHeld];
    };
    struct Full {
        bool has(size_t) const { return true; }
    };
    using Streamed = Full;
    // The first `count` lanes.
    struct Part {
        explicit Part(size_t n) : count(n) {}
        bool has(size_t lane) const { return lane < count; }
        size_t count;
    };

    // ---- Between lanes ----

#if defined(__CUDACC_RTC__)
    static constexpr uint32_t kEveryone = 0xFFFFFFFFU;
    static bool everywhere(bool x) { return __all_sync(kEveryone, x) != 0; }
    static uint32_t largest(U x) {
#if __CUDA_ARCH__ >= 800
        return __reduce_max_sync(kEveryone, x.held[0]);
#else
        uint32_t most = x.held[0];
        for (int other = kWidth / 2; other > 0; other /= 2) {
            most = Scalar::larger(most, __shfl_xor_sync(kEveryone, most, other));
        }
        return most;
#endif
    }
    // Adds the lanes in a tree, see [Note: fixed lanes].
    static double sum(double* held) {
        double x = held[0];
        for (int half = kWidth / 2; half > 0; half /= 2) {
            x = Scalar::add(x, __shfl_down_sync(kEveryone, x, half));
        }
        return __shfl_sync(kEveryone, x, 0);
    }
    // Makes what any lane has stored visible to all lanes.
    static void fence() { __syncwarp(); }
#else
    static bool everywhere(bool x) { return x; }
    static uint32_t largest(U x) {
        uint32_t most = 0;
        for (const uint32_t each : x.held) most = Scalar::larger(most, each);
        return most;
    }
    static double sum(double* held) { return Scalar::sum(held); }
    static void fence() {}
#endif

    // ---- Each lane alone ----

    template <class Op>
    static F each(Op op) {
        F x;
        for (int h = 0; h < kHeld; ++h) x.held[h] = op(h);
        return x;
    }
    template <class Op>
    static U each_u(Op op) {
        U x;
        for (int h = 0; h < kHeld; ++h) x.held[h] = op(h);
        return x;
    }
    // Works on the lanes that exist. Lanes beyond them load zero and store nothing.
    template <class L, class Op>
    static F load_each(L lanes, Op op) {
        return each([&](int h) { return lanes.has(lane(h)) ? op(lane(h)) : 0.0F; });
    }
    template <class L, class Op>
    static void store_each(L lanes, Op op) {
        for (int h = 0; h < kHeld; ++h) {
            if (lanes.has(lane(h))) op(h, lane(h));
        }
    }

    static F set(float x) {
        return each([&](int) { return x; });
    }
    static F add(F a, F b) {
        return each([&](int h) { return Scalar::add(a.held[h], b.held[h]); });
    }
    static F sub(F a, F b) {
        return each([&](int h) { return Scalar::sub(a.held[h], b.held[h]); });
    }
    static F mul(F a, F b) {
        return each([&](int h) { return Scalar::mul(a.held[h], b.held[h]); });
    }
    static F div(F a, F b) {
        return each([&](int h) { return Scalar::div(a.held[h], b.held[h]); });
    }
    static F fma(F a, F b, F c) {
        return each([&](int h) { return Scalar::fma(a.held[h], b.held[h], c.held[h]); });
    }
    static F sqrt(F x) {
        return each([&](int h) { return Scalar::sqrt(x.held[h]); });
    }
    static F at_most(F bound, F x) {
        return each([&](int h) { return Scalar::at_most(bound.held[h], x.held[h]); });
    }
    static F quiet(F x) {
        return each([&](int h) { return Scalar::quiet(x.held[h]); });
    }
    // Notes whether all values seen were finite: 0 * x is NaN for any other x, and the NaN stays.
    struct Finite {
        F x = set(0.0F);
        void see(F y) { x = add(x, mul(y, set(0.0F))); }
        bool all() const {
            bool finite = true;
            for (const float each : x.held) finite &= each == each;
            return everywhere(finite);
        }
    };

    template <class L>
    static F load(const float* p, L lanes) {
        return load_each(lanes, [&](size_t l) { return p[l]; });
    }
    template <class L>
    static F load_bf16(const uint16_t* p, L lanes) {
        return load_each(lanes, [&](size_t l) { return Scalar::from_bf16(p[l]); });
    }
    template <class L>
    static F load_f16(const uint16_t* p, L lanes) {
        return load_each(lanes, [&](size_t l) { return Scalar::from_f16(p[l]); });
    }
    template <class L>
    static F load_split(const uint16_t* high, const int16_t* low, L lanes) {
        return load_each(lanes, [&](size_t l) { return Scalar::from_split(high[l], low[l]); });
    }

    template <class L>
    static void store(float* p, F x, L lanes) {
        store_each(lanes, [&](int h, size_t l) { p[l] = x.held[h]; });
    }
    template <class L>
    static void store_bf16(uint16_t* p, F x, L lanes) {
        store_each(lanes, [&](int h, size_t l) { p[l] = Scalar::to_bf16(x.held[h]); });
    }
    template <class L>
    static void store_f16(uint16_t* p, F x, L lanes) {
        store_each(lanes, [&](int h, size_t l) { p[l] = Scalar::to_f16(x.held[h]); });
    }
    template <class L>
    static void store_split(uint16_t* high, int16_t* low, F x, L lanes) {
        store_each(lanes, [&](int h, size_t l) {
            low[l] = Scalar::to_remainder(x.held[h]);
            high[l] = Scalar::to_bf16(x.held[h]);
        });
    }

    static U set_u(uint32_t x) {
        return each_u([&](int) { return x; });
    }
    static U as_u(F x) {
        return each_u([&](int h) { return Scalar::bits(x.held[h]); });
    }
    static F as_f(U x) {
        return each([&](int h) { return Scalar::from_bits(x.held[h]); });
    }
    static U add_u(U a, U b) {
        return each_u([&](int h) { return a.held[h] + b.held[h]; });
    }
    static U mul_u(U a, U b) {
        return each_u([&](int h) { return a.held[h] * b.held[h]; });
    }
    static U and_u(U a, U b) {
        return each_u([&](int h) { return a.held[h] & b.held[h]; });
    }
    static U xor_u(U a, U b) {
        return each_u([&](int h) { return a.held[h] ^ b.held[h]; });
    }
    static U max_u(U a, U b) {
        return each_u([&](int h) { return Scalar::larger(a.held[h], b.held[h]); });
    }
    static U and_or(U x, U mask, U y) {
        return each_u([&](int h) { return (x.held[h] & mask.held[h]) | y.held[h]; });
    }
    static U at_least_if(U test, U bound, U x) {
        return each_u(
            [&](int h) { return Scalar::at_least_if(test.held[h], bound.held[h], x.held[h]); });
    }
    template <int kBits>
    static U shl(U x) {
        return each_u([&](int h) { return x.held[h] << kBits; });
    }
    template <int kBits>
    static U shr(U x) {
        return each_u([&](int h) { return x.held[h] >> kBits; });
    }
    // The number of each lane times `step`.
    static U ramp(uint32_t step) {
        return each_u([&](int h) { return static_cast<uint32_t>(lane(h)) * step; });
    }
    // x in the given lanes, and zero beyond them.
    template <class L>
    static U keep(U x, L lanes) {
        return each_u([&](int h) { return lanes.has(lane(h)) ? x.held[h] : 0U; });
    }
    // Codes of n elements, one byte each, of one block at most.
    using Codes = const uint8_t*;
    static Codes load_codes(const uint8_t* p, size_t) { return p; }
    template <int kBit, class L>
    static U unpack(Codes codes, size_t k, L lanes) {
        return each_u([&](int h) {
            return lanes.has(lane(h)) ? static_cast<uint32_t>(codes[k + lane(h)]) << kBit : 0U;
        });
    }
    template <int kBit, bool kSigned>
    static bool store_codes(uint8_t* p, const U* codes, size_t n) {
        bool none = true;
        for (size_t k = 0; k < n; k += kWidth) {
            store_each(Part(n - k), [&](int h, size_t l) {
                const uint8_t byte = Scalar::code<kBit, kSigned>(codes[k / kWidth].held[h]);
                p[k + l] = byte;
                none &= byte != 0;
            });
        }
        return !everywhere(none);
    }
    template <class L>
    static void store_high(uint16_t* p, U x, L lanes) {
        store_each(lanes, [&](int h, size_t l) { p[l] = static_cast<uint16_t>(x.held[h] >> 16); });
    }

    struct Squares {
        double held[kHeld] = {};
        void add(F x, int) {
            for (int h = 0; h < kHeld; ++h) held[h] = Scalar::add_square(held[h], x.held[h]);
        }
        double sum() { return Vec::sum(held); }
    };
};

}  // namespace
}  // namespace infinity::cpu_adam
