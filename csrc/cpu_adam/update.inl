// The fused pass. Part of kernels.inl.

namespace infinity::cpu_adam {
namespace {

// Makes every NaN of the outputs the same NaN, see [Note: quiet last].
template <class R, ParameterFormat P>
__attribute__((noinline)) void quiet(const UpdateArrays& a, size_t begin, size_t count) {
    const Parameters<P> parameters(a);
    const MomentsF32 moments(a);
    const auto element = [&](size_t i, auto lanes) {
        if constexpr (R::kFirst) {
            moments.store_first(i, Vec::quiet(moments.load_first(i, lanes)), lanes);
        }
        if constexpr (R::kSecond) {
            moments.store_second(i, Vec::quiet(moments.load_second(i, lanes)), lanes);
        }
        const F p = Vec::quiet(parameters.load(i, lanes));
        parameters.store(i, p, lanes);
        parameters.store_copy(i, p, lanes);
    };
    size_t i = begin;
    const size_t end = begin + count;
    for (; i + kWidth <= end; i += kWidth) element(i, Full{});
    if (i < end) element(i, Part(end - i));
}

template <class R, Dtype D, ParameterFormat P>
bool update(const UpdateArrays& arrays, const Folded& h, size_t begin, size_t count) {
    const UpdateArrays a = arrays;  // by value: no store can be thought to change it
    const R rule(h);
    const Parameters<P> parameters(a);
    const MomentsF32 moments(a);
    const F scale = Vec::set(h.scale);
    const F zero = Vec::set(0.0F);
    Vec::Finite finite_gradient;
    Vec::Finite finite_result;

    const auto element = [&](size_t i, auto lanes) __attribute__((always_inline)) {
        F g = load_gradient<D>(a.grad, i, lanes);
        if (a.acc != nullptr) g = Vec::add(Vec::load(a.acc + i, lanes), g);
        g = Vec::mul(g, scale);
        finite_gradient.see(g);
        F m = zero;
        F v = zero;
        if constexpr (R::kFirst) m = moments.load_first(i, lanes);
        if constexpr (R::kSecond) v = moments.load_second(i, lanes);
        const F p = rule.step(parameters.load(i, lanes), g, m, v);
        finite_result.see(p);
        if constexpr (R::kFirst) moments.store_first(i, m, lanes);
        if constexpr (R::kSecond) moments.store_second(i, v, lanes);
        parameters.store(i, p, lanes);
        return p;
    };

    // The copy is not read back soon: streaming it saves the read of its lines.
    const auto whole = [&](size_t i) __attribute__((always_inline)) {
        parameters.stream_copy(i, element(i, Full{}));
    };
    const auto part = [&](size_t i, size_t n) {
        const Part lanes(n);
        parameters.store_copy(i, element(i, lanes), lanes);
    };
    const auto prefetch = [&](size_t i) __attribute__((always_inline)) {
        prefetch_group(static_cast<const GradientElement<D>*>(a.grad), i);
        parameters.prefetch(i);
        if constexpr (R::kFirst) moments.prefetch_first(i);
        if constexpr (R::kSecond) moments.prefetch_second(i);
    };

    size_t i = begin;
    const size_t end = begin + count;
    if (size_t head = parameters.until_aligned(i); head != 0) {
        if (head > count) head = count;
        part(i, head);
        i += head;
    }
    for (; i + kGroup <= end; i += kGroup) {
        prefetch(i);
        for (size_t k = 0; k < kGroup; k += kWidth) whole(i + k);
    }
    for (; i + kWidth <= end; i += kWidth) whole(i);
    if (i < end) part(i, end - i);
    Vec::fence();
    if (!finite_result.all()) quiet<R, P>(a, begin, count);
    return !finite_gradient.all();
}

}  // namespace
}  // namespace infinity::cpu_adam
