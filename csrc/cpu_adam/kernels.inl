// The kernels, written once over the type Vec and compiled once per ISA: a kernels_<isa>.cpp
// includes its Vec, then this file, and exports one table. So does device.inl, for GPUs.
//
// [Note: equal bits] Every operation is elementwise, correctly rounded and written out (fma where
// fused, -ffp-contract=off where not), and every NaN that is stored is the same NaN. So a result
// depends on its element's inputs alone: not on the ISA, the position in a register, the tail, the
// chunk or the thread. Only the squares add across elements; see [Note: fixed lanes].
//
// [Note: quiet last] Payloads of NaNs do depend on the ISA, and a payload would break the rounding
// to bf16. A NaN in any state of an element makes its new parameter NaN, whatever the rule; so one
// sticky test of the parameters tells at the end whether there is any, and only then a second pass
// replaces them all. (A split master loses no bit, hence no payload, on the way.)
//
// [Note: no shared inline code] These files are compiled for CPUs that the running one may not be.
// Everything here has internal linkage, and nothing from the standard library that the linker
// could merge with another file's copy is called.

namespace infinity::cpu_adam {
namespace {

using F = Vec::F;
using Full = Vec::Full;
using Part = Vec::Part;
constexpr size_t kWidth = Vec::kWidth;

#if defined(__CUDACC_RTC__)
#define INFINITY_INLINE __forceinline__
#elif defined(INFINITY_HOST_KERNELS)  // for tests: small rather than fast
#define INFINITY_INLINE inline
#else
#define INFINITY_INLINE __attribute__((always_inline)) inline
#endif

template <Dtype D>
struct Element {
    using Type = uint16_t;
};
template <>
struct Element<Dtype::kF32> {
    using Type = float;
};
template <Dtype D>
using GradientElement = typename Element<D>::Type;

template <Dtype D, class L>
INFINITY_INLINE F load_gradient(const void* base, size_t i, L lanes) {
    if constexpr (D == Dtype::kF32) {
        return Vec::load(static_cast<const float*>(base) + i, lanes);
    } else if constexpr (D == Dtype::kBf16) {
        return Vec::load_bf16(static_cast<const uint16_t*>(base) + i, lanes);
    } else {
        return Vec::load_f16(static_cast<const uint16_t*>(base) + i, lanes);
    }
}

// One cache line of a 16-bit array, two of an fp32 one: what is prefetched at a time, and how far
// ahead (in elements). Six streams are more than the hardware follows across page boundaries.
constexpr size_t kGroup = 32;
#if defined(__CUDACC_RTC__)
constexpr size_t kAhead = 128;  // times all warps, this is to stay in the second-level cache

// Whether what lies so far ahead of i is of the range: a device may have nothing beyond it.
INFINITY_INLINE bool prefetches(size_t i, size_t end) { return i + kAhead + kCodeBlock <= end; }

// kElements for each lane.
template <size_t kElements, class T>
INFINITY_INLINE void prefetch_lanes(const T* base, size_t i) {
    asm volatile("prefetch.global.L2 [%0];" : : "l"(base + i + kAhead + kElements * Vec::lane(0)));
}

template <class T>
INFINITY_INLINE void prefetch_group(const T* base, size_t i) {
    prefetch_lanes<1>(base, i);
}

INFINITY_INLINE void prefetch_codes(const uint8_t* base, size_t i) {
    prefetch_lanes<kCodeBlock / kWidth>(base, i);
}
#else
constexpr size_t kAhead = 256;

// What may point past the array, where a prefetch does nothing; hence integers, not pointers.
INFINITY_INLINE bool prefetches(size_t, size_t) { return true; }

template <class T>
INFINITY_INLINE void prefetch_group(const T* base, size_t i) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(base) + (i + kAhead) * sizeof(T);
    for (size_t byte = 0; byte < kGroup * sizeof(T); byte += 64) {
        __builtin_prefetch(reinterpret_cast<const void*>(at + byte));
    }
}

INFINITY_INLINE void prefetch_codes(const uint8_t* base, size_t i) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(base) + i + kAhead;
    __builtin_prefetch(reinterpret_cast<const void*>(at));
}
#endif

}  // namespace
}  // namespace infinity::cpu_adam

// In this order: each uses the ones before.
// clang-format off
#include "formats.inl"
#include "moments.inl"
#include "rules.inl"
#include "update.inl"
#include "gradient.inl"
// clang-format on
