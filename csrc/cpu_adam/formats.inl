// How parameters are loaded and stored. Part of kernels.inl.

namespace infinity::cpu_adam {
namespace {

template <ParameterFormat P>
struct Parameters {
    static constexpr bool kSplit = P == ParameterFormat::kSplit;
    static constexpr bool kF32 = P == ParameterFormat::kPlainF32;
    static constexpr bool kBf16 = P == ParameterFormat::kPlainBf16;
    static constexpr bool kF16 = P == ParameterFormat::kPlainF16;
    static constexpr size_t kCopyBytes = kF32 ? 4 : (kBf16 || kF16 ? 2 : 0);

    explicit Parameters(const UpdateArrays& a)
        : master(static_cast<float*>(a.param)),
          high(static_cast<uint16_t*>(a.param)),
          low(a.remainder),
          wide_copy(static_cast<float*>(a.copy)),
          narrow_copy(static_cast<uint16_t*>(a.copy)) {}

    template <class L>
    INFINITY_INLINE F load(size_t i, L lanes) const {
        if constexpr (kSplit) return Vec::load_split(high + i, low + i, lanes);
        return Vec::load(master + i, lanes);
    }
    template <class L>
    INFINITY_INLINE void store(size_t i, F x, L lanes) const {
        if constexpr (kSplit) {
            Vec::store_split(high + i, low + i, x, lanes);
        } else {
            Vec::store(master + i, x, lanes);
        }
    }
    template <class L>
    INFINITY_INLINE void store_copy(size_t i, F x, L lanes) const {
        if constexpr (kF32) Vec::store(wide_copy + i, x, lanes);
        if constexpr (kBf16) Vec::store_bf16(narrow_copy + i, x, lanes);
        if constexpr (kF16) Vec::store_f16(narrow_copy + i, x, lanes);
    }
    INFINITY_INLINE void stream_copy(size_t i, F x) const {
        if constexpr (kF32) Vec::stream(wide_copy + i, x);
        if constexpr (kBf16) Vec::stream_bf16(narrow_copy + i, x);
        if constexpr (kF16) Vec::stream_f16(narrow_copy + i, x);
    }
    // streaming: whether the copy at i is aligned for streaming stores.
    INFINITY_INLINE void write_copy(size_t i, F x, bool streaming, Full lanes) const {
        if (streaming) {
            stream_copy(i, x);
        } else {
            store_copy(i, x, lanes);
        }
    }
    INFINITY_INLINE void write_copy(size_t i, F x, bool, Part lanes) const {
        store_copy(i, x, lanes);
    }
    INFINITY_INLINE void prefetch(size_t i) const {
        if constexpr (kSplit) {
            prefetch_group(high, i);
            prefetch_group(low, i);
        } else {
            prefetch_group(master, i);
        }
    }
    // The number of elements from i until the copy is aligned for streaming stores.
    size_t until_aligned(size_t i) const {
        if constexpr (kCopyBytes != 0) {
            constexpr uintptr_t kLine = 64;  // no store is longer
            const uintptr_t step = kWidth * kCopyBytes < kLine ? kWidth * kCopyBytes : kLine;
            const uintptr_t at = reinterpret_cast<uintptr_t>(narrow_copy) + i * kCopyBytes;
            return (step - at % step) % step / kCopyBytes;
        }
        return 0;
    }

    float* master;
    uint16_t* high;
    int16_t* low;
    float* wide_copy;
    uint16_t* narrow_copy;
};

}  // namespace
}  // namespace infinity::cpu_adam
