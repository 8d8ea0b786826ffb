// The fused update: one pass over all arrays. Part of kernels.inl.

namespace infinity::cpu_adam {
namespace {

// The gradient that rules get: with the accumulated part added, and scaled.
template <Dtype D>
struct Gradient {
    explicit Gradient(const UpdateArrays& a, const Folded& h)
        : grad(static_cast<const GradientElement<D>*>(a.grad)),
          acc(a.acc),
          scale(Vec::set(h.scale)) {}
    template <class L>
    INFINITY_INLINE F load(size_t i, L lanes) const {
        F g = load_gradient<D>(grad, i, lanes);
        if (acc != nullptr) g = Vec::add(Vec::load(acc + i, lanes), g);
        return Vec::mul(g, scale);
    }
    const GradientElement<D>* grad;
    const float* acc;
    F scale;
};

// Returns whether the gradients of the whole range are finite.
template <Dtype D>
__attribute__((noinline)) bool finite(Gradient<D> gradient, const Range& range) {
    Vec::Finite seen;
    size_t i = range.begin;
    const size_t end = range.begin + range.count;
    for (; i + kWidth <= end; i += kWidth) seen.see(gradient.load(i, Full{}));
    if (i < end) seen.see(gradient.load(i, Part(end - i)));
    return seen.all();
}

// The way of one element from its gradient and parameter to the new parameter.
template <class R, Dtype D, ParameterFormat P, class M>
struct Pass {
    Pass(const UpdateArrays& a, const UpdateArrays& outputs, const Folded& h)
        : gradient(a, h), rule(h), parameters(a, outputs) {}

    // Returns the gradient as the rule has changed it, for new_parameter().
    template <class L>
    INFINITY_INLINE F new_moments(size_t i, F& m, F& v, L lanes) {
        F g = gradient.load(i, lanes);
        if constexpr (!M::kBlocks) finite_gradient.see(g);
        rule.template moments<M>(parameters.load(i, lanes), g, m, v);
        return g;
    }
    template <class L>
    INFINITY_INLINE F new_parameter(size_t i, F g, F m, F v, L lanes) {
        const F p = rule.parameter(parameters.load(i, lanes), g, m, v);
        finite_result.see(p);
        store_lanes(streaming, lanes, [&](auto stored) __attribute__((always_inline)) {
            parameters.store(i, p, stored);
        });
        return p;
    }
    INFINITY_INLINE void prefetch(size_t i) const {
        prefetch_group(gradient.grad, i);
        parameters.prefetch(i);
    }

    Gradient<D> gradient;
    R rule;
    Parameters<P> parameters;
    bool streaming = false;  // whether results beside the inputs, all aligned, go past the caches
    Vec::Finite finite_gradient;  // where moments have no blocks; else finite_moments
    bool finite_moments = true;
    Vec::Finite finite_result;
};

// Makes every NaN in the outputs the same NaN, see [Note: quiet last].
template <class R, ParameterFormat P, class M>
__attribute__((noinline)) void quiet(const UpdateArrays& outputs, const Range& range) {
    const Parameters<P> parameters(outputs, outputs);
    const M moments(outputs, outputs, range);
    const auto element = [&](size_t i, auto lanes) {
        if constexpr (!M::kBlocks) moments.template quiet<R>(i, lanes);
        const F p = Vec::quiet(parameters.load(i, lanes));
        parameters.store(i, p, lanes);
        parameters.store_copy(i, p, lanes);
    };
    size_t i = range.begin;
    const size_t end = range.begin + range.count;
    for (; i + kWidth <= end; i += kWidth) element(i, Full{});
    if (i < end) element(i, Part(end - i));
}

template <class R, class M, class Body>
INFINITY_INLINE void each_element(Body& pass, const M& moments, const Range& range) {
    const auto element = [&](size_t i, auto lanes) __attribute__((always_inline)) {
        F m = Vec::set(0.0F);
        F v = Vec::set(0.0F);
        if constexpr (R::kFirst) m = moments.load_first(i, lanes);
        if constexpr (R::kSecond) v = moments.load_second(i, lanes);
        const F g = pass.new_moments(i, m, v, lanes);
        const F p = pass.new_parameter(i, g, m, v, lanes);
        if constexpr (R::kFirst || R::kSecond) {
            store_lanes(pass.streaming, lanes, [&](auto stored) __attribute__((always_inline)) {
                moments.template store<R>(i, m, v, stored);
            });
        }
        return p;
    };
    // The copy is not read again soon. Streaming stores save the read of its cache lines.
    const auto whole = [&](size_t i) __attribute__((always_inline)) {
        pass.parameters.store_copy(i, element(i, Full{}), Vec::Streamed{});
    };
    const auto part = [&](size_t i, size_t n) {
        const Part lanes(n);
        pass.parameters.store_copy(i, element(i, lanes), lanes);
    };
    const auto prefetch = [&](size_t i) __attribute__((always_inline)) {
        pass.prefetch(i);
        if constexpr (R::kFirst) moments.prefetch_first(i);
        if constexpr (R::kSecond) moments.prefetch_second(i);
    };

    size_t i = range.begin;
    const size_t end = range.begin + range.count;
    if (size_t head = pass.parameters.until_aligned(i); head != 0) {
        if (head > range.count) head = range.count;
        part(i, head);
        i += head;
    }
    for (; i + kGroup <= end; i += kGroup) {
        if (prefetches(i, end)) prefetch(i);
        for (size_t k = 0; k < kGroup; k += kWidth) whole(i + k);
    }
    for (; i + kWidth <= end; i += kWidth) whole(i);
    if (i < end) part(i, end - i);
}

// Calls `body` for the elements 0 to n, a vector at a time.
template <class Body>
INFINITY_INLINE void each_vector(size_t n, Body body) {
    size_t k = 0;
    for (; k + kWidth <= n; k += kWidth) body(k, Full{});
    if (k < n) body(k, Part(n - k));
}

// Updates a block of n elements. Finding the largest of 64 values takes many cycles, in which the
// parameters are computed. The new moments wait until their exponents are known. Inlined with n =
// kCodeBlock, the loops unroll and the moments wait in registers. Where the moments depend on the
// parameter, the parameter is loaded twice rather than kept.
template <class R, class M, class Body>
INFINITY_INLINE void one_block(Body& pass, const M& moments, size_t i, size_t n, bool streaming) {
    F gradient[kCodeBlock / kWidth];
    F first[kCodeBlock / kWidth];
    F second[kCodeBlock / kWidth];
    typename M::Units units = moments.template units<R>(i, n);
    each_vector(n, [&](size_t k, auto lanes) __attribute__((always_inline)) {
        F m = Vec::set(0.0F);
        F v = Vec::set(0.0F);
        if constexpr (R::kFirst) m = moments.load_first(k, units, lanes);
        if constexpr (R::kSecond) v = moments.load_second(k, units, lanes);
        gradient[k / kWidth] = pass.new_moments(i + k, m, v, lanes);
        if constexpr (R::kFirst) units.see_first(first[k / kWidth] = m, k, lanes);
        if constexpr (R::kSecond) units.see_second(second[k / kWidth] = v, k, lanes);
    });
    const typename M::Exponents exponents(units);
    each_vector(n, [&](size_t k, auto lanes) __attribute__((always_inline)) {
        const size_t at = k / kWidth;
        const F p = pass.new_parameter(i + k, gradient[at], first[at], second[at], lanes);
        store_lanes(streaming, lanes, [&](auto stored) __attribute__((always_inline)) {
            pass.parameters.store_copy(i + k, p, stored);
        });
    });
    pass.finite_moments &= moments.template store<R>(i, n, first, second, exponents);
}

template <class R, class M, class Body>
INFINITY_INLINE void each_block(Body& pass, const M& moments, const Range& range) {
    const bool streaming =
        pass.parameters.until_aligned(range.begin) == 0;  // and stays aligned from block to block
    const size_t end = range.begin + range.count;
    size_t i = range.begin;
    for (; i + kCodeBlock <= end; i += kCodeBlock) {
        if (prefetches(i, end)) {
            for (size_t k = 0; k < kCodeBlock; k += kGroup) pass.prefetch(i + k);
            if constexpr (R::kFirst) moments.prefetch_first(i);
            if constexpr (R::kSecond) moments.prefetch_second(i);
        }
        one_block<R>(pass, moments, i, kCodeBlock, streaming);
    }
    if (i < end) one_block<R>(pass, moments, i, end - i, streaming);
}

template <class R, Dtype D, ParameterFormat P, class M>
bool update(const UpdateArrays& arrays, const UpdateArrays& results, const Folded& h,
            const Range& given) {
    const UpdateArrays a = arrays;  // by value, so that the compiler knows that no store changes it
    const UpdateArrays outputs = results;
    const Range range = given;
    Pass<R, D, P, M> pass(a, outputs, h);
    const M moments(a, outputs, range);
    // Lines that were read are in the caches, and are written there. Others would be read first.
    pass.streaming = outputs.param != a.param && pass.parameters.aligned(range.begin);
    if constexpr (M::kBlocks) {
        each_block<R>(pass, moments, range);
    } else {
        pass.streaming &= moments.template aligned<R>(range.begin);
        each_element<R>(pass, moments, range);
    }
    Vec::fence();
    if (!pass.finite_result.all()) quiet<R, P, M>(outputs, range);
    // A gradient that is not finite leaves moments that are not finite, whatever the rule is.
    if (M::kBlocks && !pass.finite_moments) return !finite(pass.gradient, range);
    return !pass.finite_gradient.all();
}

}  // namespace
}  // namespace infinity::cpu_adam
