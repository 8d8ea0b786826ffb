// Moves bytes without computing anything. Part of kernels.inl.

namespace infinity::cpu_adam {
namespace {

using Bytes = Vec::Bytes;

INFINITY_INLINE Bytes stream_range(const StreamArray& array, size_t first, size_t last,
                                   Bytes digest) {
    const Bytes pattern = Bytes::set(0x0101010101010101U);
    unsigned char* p = array.data + first;
    unsigned char* const end = array.data + last;
    const bool aligned = reinterpret_cast<uintptr_t>(p) % Bytes::kSize == 0;
    if (array.access == Access::kRead) {
        for (; p + Bytes::kSize <= end; p += Bytes::kSize) {
            digest = digest.exclusive_or(Bytes::load(p));
        }
    } else if (array.access == Access::kReadWrite) {
        for (; p + Bytes::kSize <= end; p += Bytes::kSize) {
            Bytes::load(p).exclusive_or(pattern).store(p);
        }
    } else if (aligned) {
        for (; p + Bytes::kSize <= end; p += Bytes::kSize) pattern.stream(p);
    } else {
        for (; p + Bytes::kSize <= end; p += Bytes::kSize) pattern.store(p);
    }
    for (; p < end; ++p) {
        if (array.access == Access::kWrite) *p = 1;
        if (array.access == Access::kReadWrite) *p ^= 1;
    }
    return digest;
}

// Goes through all arrays together, `granule` elements of one array after the other.
uint64_t stream(const StreamArray* array, int arrays, size_t granule, size_t begin, size_t count) {
    Bytes digest = Bytes::set(0);
    const size_t end = begin + count;
    for (size_t i = begin; i < end; i += granule) {
        const size_t last = end - i < granule ? end : i + granule;
        for (int n = 0; n < arrays; ++n) {
            const size_t bytes = array[n].bytes_per_element;
            digest = stream_range(array[n], i * bytes, last * bytes, digest);
        }
    }
    Vec::fence();
    return digest.digest();
}

}  // namespace
}  // namespace infinity::cpu_adam
