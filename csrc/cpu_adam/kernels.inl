// The kernels, written once over the type Vec and compiled once per instruction set (ISA). A
// kernels_<isa>.cpp includes its Vec, then this file, and exports one table. device.inl does the
// same for GPUs.
//
// [Note: equal bits] Every operation is elementwise, correctly rounded and written out (fma where
// fused, -ffp-contract=off where not), and every NaN that is stored is the same NaN. So a result
// depends on its element's inputs alone. It does not depend on the ISA, the position in a register,
// the tail, the chunk or the thread. Only the sums of squares add across elements,
// see [Note: fixed lanes].
//
// [Note: quiet last] The payload of a NaN does depend on the ISA, and a payload would break the
// rounding to bf16. A NaN in any state of an element makes its new parameter NaN, whatever the rule
// is. So one sticky test of the parameters tells at the end whether there is any NaN, and only then
// a second pass replaces them all. (A split master loses no bit on the way, hence no payload.)
//
// [Note: no shared inline code] These files are compiled for CPUs that the running one may not be.
// Everything here has internal linkage. Nothing from the standard library is called that the linker
// could merge with another file's copy.

namespace infinity::cpu_adam {
namespace {

using F = Vec::F;
using Full = Vec::Full;
using Part = Vec::Part;
constexpr size_t kWidth = Vec::kWidth;

#if defined(__CUDACC_RTC__)
#define INFINITY_INLINE __forceinline__
#elif defined(INFINITY_HOST_KERNELS)  // for tests: small code rather than fast code
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

// The number of elements prefetched at a time (one cache line of a 16-bit array, two of an fp32
// array), and the distance ahead in elements. Six streams are more than the hardware prefetcher
// follows across page boundaries.
constexpr size_t kGroup = 32;
#if defined(__CUDACC_RTC__)
constexpr size_t kAhead = 128;  // for all warps together, this must fit the second-level cache

// Whether the elements to prefetch for i are in the range. A device may have no memory beyond it.
INFINITY_INLINE bool prefetches(size_t i, size_t end) { return i + kAhead + kCodeBlock <= end; }

// Prefetches for each lane, kElements apart.
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

// A prefetch may point past the array, where it does nothing. So addresses are computed as
// integers, not as pointers.
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

// The order matters: each file uses the ones before.
// clang-format off
#include "formats.inl"
#include "moments.inl"
#include "rules.inl"
#include "update.inl"
#include "average.inl"
#include "gradient.inl"
// clang-format on
