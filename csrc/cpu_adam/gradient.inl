// Accumulation and norms. Part of kernels.inl.

namespace infinity::cpu_adam {
namespace {

template <Dtype D, class L>
INFINITY_INLINE F accumulate(const GradientArrays& a, size_t i, L lanes) {
    F x = load_gradient<D>(a.grad, i, lanes);
    if (a.read_acc) x = Vec::add(Vec::load(a.acc + i, lanes), x);
    if (a.write_acc) Vec::store(a.acc + i, Vec::quiet(x), lanes);
    return x;
}

// Unrolled by recursion, so that every lane is kept in a register.
template <Dtype D, size_t kFrom = 0>
INFINITY_INLINE void add_group(const GradientArrays& a, F scale, size_t i, Vec::Squares& squares) {
    if constexpr (kFrom < kLanes) {
        squares.add(Vec::mul(accumulate<D>(a, i + kFrom, Full{}), scale), kFrom);
        add_group<D, kFrom + kWidth>(a, scale, i, squares);
    }
}

// The sum of squares of one block, see [Note: fixed lanes].
template <Dtype D>
double square_block(const GradientArrays& a, size_t begin, size_t count) {
    const F scale = Vec::set(a.scale);
    Vec::Squares squares;
    size_t i = begin;
    const size_t end = begin + count;
    for (; i + kLanes <= end; i += kLanes) add_group<D>(a, scale, i, squares);
    for (int position = 0; i < end; position += kWidth) {
        if (end - i >= kWidth) {
            squares.add(Vec::mul(accumulate<D>(a, i, Full{}), scale), position);
            i += kWidth;
        } else {
            squares.add(Vec::mul(accumulate<D>(a, i, Part(end - i)), scale), position);
            i = end;
        }
    }
    return squares.sum();
}

template <Dtype D>
void accumulate_block(const GradientArrays& a, size_t begin, size_t count) {
    const size_t end = begin + count;
    size_t i = begin;
    for (; i + kWidth <= end; i += kWidth) accumulate<D>(a, i, Full{});
    if (i < end) accumulate<D>(a, i, Part(end - i));
}

// Works block by block, so that a block's gradient stays in the nearest cache from one pass to the
// next.
template <Dtype D>
void gradient(const GradientArrays& a, size_t begin, size_t count, double* sums) {
    constexpr size_t kBytes = D == Dtype::kF32 ? 4 : 2;
    const size_t end = begin + count;
    for (size_t i = begin; i < end; i += kBlock) {
        const size_t block = end - i < kBlock ? end - i : kBlock;
        if (a.squares) {
            *sums++ = square_block<D>(a, i, block);
        } else if (a.write_acc) {
            accumulate_block<D>(a, i, block);
        }
        if (a.copy != nullptr) {
            __builtin_memcpy(static_cast<char*>(a.copy) + i * kBytes,
                             static_cast<const char*>(a.grad) + i * kBytes, block * kBytes);
        }
    }
}

}  // namespace
}  // namespace infinity::cpu_adam
