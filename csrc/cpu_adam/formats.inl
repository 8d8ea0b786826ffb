// How parameters are loaded and stored. Part of kernels.inl.

namespace infinity::cpu_adam {
namespace {

constexpr uintptr_t kLine = 64;  // no store is longer

inline bool aligned_at(const void* p) { return reinterpret_cast<uintptr_t>(p) % kLine == 0; }

// Calls `store` for all lanes, with stores past the caches if `streaming`.
template <class Store>
INFINITY_INLINE void store_lanes(bool streaming, Full lanes, Store store) {
    if (streaming) {
        store(Vec::Streamed{});
    } else {
        store(lanes);
    }
}
template <class Store>
INFINITY_INLINE void store_lanes(bool, Part lanes, Store store) {
    store(lanes);
}

template <ParameterFormat P>
struct Parameters {
    static constexpr bool kSplit = P == ParameterFormat::kSplit;
    static constexpr bool kF32 = P == ParameterFormat::kPlainF32;
    static constexpr bool kBf16 = P == ParameterFormat::kPlainBf16;
    static constexpr bool kF16 = P == ParameterFormat::kPlainF16;
    static constexpr size_t kCopyBytes = kF32 ? 4 : (kBf16 || kF16 ? 2 : 0);

    Parameters(const UpdateArrays& a, const UpdateArrays& outputs)
        : master(static_cast<const float*>(a.param)),
          high(static_cast<const uint16_t*>(a.param)),
          low(a.remainder),
          new_master(static_cast<float*>(outputs.param)),
          new_high(static_cast<uint16_t*>(outputs.param)),
          new_low(outputs.remainder),
          wide_copy(static_cast<float*>(outputs.copy)),
          narrow_copy(static_cast<uint16_t*>(outputs.copy)) {}

    template <class L>
    INFINITY_INLINE F load(size_t i, L lanes) const {
        if constexpr (kSplit) return Vec::load_split(high + i, low + i, lanes);
        return Vec::load(master + i, lanes);
    }
    template <class L>
    INFINITY_INLINE void store(size_t i, F x, L lanes) const {
        if constexpr (kSplit) {
            Vec::store_split(new_high + i, new_low + i, x, lanes);
        } else {
            Vec::store(new_master + i, x, lanes);
        }
    }
    template <class L>
    INFINITY_INLINE void store_copy(size_t i, F x, L lanes) const {
        if constexpr (kF32) Vec::store(wide_copy + i, x, lanes);
        if constexpr (kBf16) Vec::store_bf16(narrow_copy + i, x, lanes);
        if constexpr (kF16) Vec::store_f16(narrow_copy + i, x, lanes);
    }
    INFINITY_INLINE void prefetch(size_t i) const {
        if constexpr (kSplit) {
            prefetch_group(high, i);
            prefetch_group(low, i);
        } else {
            prefetch_group(master, i);
        }
    }
    // Whether all outputs at i are aligned for streaming stores.
    bool aligned(size_t i) const {
        if constexpr (kSplit) return aligned_at(new_high + i) && aligned_at(new_low + i);
        return aligned_at(new_master + i) && until_aligned(i) == 0;
    }
    // The number of elements from i until the copy is aligned for streaming stores.
    size_t until_aligned(size_t i) const {
        if constexpr (kCopyBytes != 0) {
            const uintptr_t step = kWidth * kCopyBytes < kLine ? kWidth * kCopyBytes : kLine;
            const uintptr_t at = reinterpret_cast<uintptr_t>(narrow_copy) + i * kCopyBytes;
            return (step - at % step) % step / kCopyBytes;
        }
        return 0;
    }

    const float* master;
    const uint16_t* high;
    const int16_t* low;
    float* new_master;
    uint16_t* new_high;
    int16_t* new_low;
    float* wide_copy;
    uint16_t* narrow_copy;
};

}  // namespace
}  // namespace infinity::cpu_adam
