// The kernels, written once over the type Vec and compiled once per ISA: a kernels_<isa>.cpp
// includes its Vec, then this file, and exports one table.
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

#define INFINITY_INLINE __attribute__((always_inline)) inline

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
constexpr size_t kAhead = 256;

template <class T>
INFINITY_INLINE void prefetch_group(const T* base, size_t i) {
    // May point past the array, where a prefetch does nothing; hence integers, not pointers.
    const uintptr_t at = reinterpret_cast<uintptr_t>(base) + (i + kAhead) * sizeof(T);
    for (size_t byte = 0; byte < kGroup * sizeof(T); byte += 64) {
        __builtin_prefetch(reinterpret_cast<const void*>(at + byte));
    }
}

// ---- Formats: how parameters and moments are loaded and stored. ----

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
    INFINITY_INLINE void prefetch(size_t i) const {
        if constexpr (kSplit) {
            prefetch_group(high, i);
            prefetch_group(low, i);
        } else {
            prefetch_group(master, i);
        }
    }
    // Elements from i until the copy is aligned for streaming stores.
    size_t until_aligned(size_t i) const {
        if constexpr (kCopyBytes == 0) return 0;
        const uintptr_t step = kWidth * kCopyBytes;
        const uintptr_t at = reinterpret_cast<uintptr_t>(narrow_copy) + i * kCopyBytes;
        return (step - at % step) % step / kCopyBytes;
    }

    float* master;
    uint16_t* high;
    int16_t* low;
    float* wide_copy;
    uint16_t* narrow_copy;
};

// Another format of the moments is another struct with these four members; work is cut at
// multiples of kBlock, so one that quantises block-wise sees whole blocks.
struct MomentsF32 {
    explicit MomentsF32(const UpdateArrays& a) : first(a.first_moment), second(a.second_moment) {}
    template <class L>
    INFINITY_INLINE F load_first(size_t i, L lanes) const {
        return Vec::load(first + i, lanes);
    }
    template <class L>
    INFINITY_INLINE F load_second(size_t i, L lanes) const {
        return Vec::load(second + i, lanes);
    }
    template <class L>
    INFINITY_INLINE void store_first(size_t i, F x, L lanes) const {
        Vec::store(first + i, x, lanes);
    }
    template <class L>
    INFINITY_INLINE void store_second(size_t i, F x, L lanes) const {
        Vec::store(second + i, x, lanes);
    }
    INFINITY_INLINE void prefetch_first(size_t i) const { prefetch_group(first, i); }
    INFINITY_INLINE void prefetch_second(size_t i) const { prefetch_group(second, i); }
    float* first;
    float* second;
};

// ---- Rules: one element's arithmetic. step() returns the new parameter. ----

// kSmallBeta: for betas of at most one half the other form of each average is the accurate one.
template <bool kDecoupled, bool kSmallBeta>
struct Adam {
    static constexpr bool kFirst = true;
    static constexpr bool kSecond = true;
    explicit Adam(const Folded& h)
        : lerp_from_grad(h.lerp_from_grad),
          decay_from_one(h.decay_from_one),
          weight_decay(Vec::set(h.weight_decay)),
          step_size(Vec::set(kDecoupled ? h.step_size : -h.step_size)),
          lerp(Vec::set(h.lerp)),
          grad_weight(Vec::set(h.grad_weight)),
          keep_weight(Vec::set(h.keep_weight)),
          root_scale(Vec::set(h.root_scale)),
          eps(Vec::set(h.eps)),
          largest(Vec::set(3.402823466e+38F)) {}

    INFINITY_INLINE F step(F p, F g, F& m, F& v) const {
        if constexpr (!kDecoupled) g = Vec::fma(weight_decay, p, g);
        m = mean(g, m);
        v = Vec::fma(Vec::mul(grad_weight, g), g, kept(v));
        const F ratio = Vec::div(m, Vec::fma(Vec::sqrt(v), root_scale, eps));
        // The whole change is formed first: one rounding at the size of p.
        if constexpr (kDecoupled) {
            return Vec::sub(p, Vec::fma(weight_decay, p, Vec::mul(step_size, ratio)));
        }
        return Vec::fma(step_size, ratio, p);
    }
    // The difference has the smaller of the two weights: one rounding at the size of m.
    INFINITY_INLINE F mean(F g, F m) const {
        const F difference = Vec::sub(g, m);
        if constexpr (kSmallBeta) {
            if (lerp_from_grad) return Vec::fma(lerp, difference, g);
        }
        return Vec::fma(lerp, difference, m);
    }
    // v - w v keeps the bits of w that beta2 as an fp32 would lose. The bound keeps an infinite v
    // infinite (inf - inf would be NaN).
    INFINITY_INLINE F kept(F v) const {
        if constexpr (kSmallBeta) {
            if (!decay_from_one) return Vec::mul(keep_weight, v);
        }
        return Vec::fma(keep_weight, Vec::at_most(largest, v), v);
    }

    bool lerp_from_grad, decay_from_one;
    F weight_decay, step_size, lerp, grad_weight, keep_weight, root_scale, eps, largest;
};

template <bool kMomentum>
struct Sgd {
    static constexpr bool kFirst = kMomentum;
    static constexpr bool kSecond = false;
    explicit Sgd(const Folded& h)
        : first_step(h.first_step),
          nesterov(h.nesterov),
          weight_decay(Vec::set(h.weight_decay)),
          minus_step(Vec::set(-h.step_size)),
          grad_share(Vec::set(h.lerp)),
          momentum(Vec::set(h.momentum)) {}

    INFINITY_INLINE F step(F p, F g, F& m, F&) const {
        g = Vec::fma(weight_decay, p, g);
        if constexpr (kMomentum) {
            if (first_step) {
                m = g;
            } else {
                m = Vec::fma(momentum, m, Vec::mul(grad_share, g));
            }
            if (nesterov) {
                g = Vec::fma(momentum, m, g);
            } else {
                g = m;
            }
        }
        return Vec::fma(minus_step, g, p);
    }

    bool first_step, nesterov;
    F weight_decay, minus_step, grad_share, momentum;
};

struct Adagrad {
    static constexpr bool kFirst = false;
    static constexpr bool kSecond = true;
    explicit Adagrad(const Folded& h)
        : weight_decay(Vec::set(h.weight_decay)),
          minus_step(Vec::set(-h.step_size)),
          eps(Vec::set(h.eps)) {}

    INFINITY_INLINE F step(F p, F g, F&, F& v) const {
        g = Vec::fma(weight_decay, p, g);
        v = Vec::fma(g, g, v);
        return Vec::fma(minus_step, Vec::div(g, Vec::add(Vec::sqrt(v), eps)), p);
    }

    F weight_decay, minus_step, eps;
};

// ---- The fused pass. ----

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

// ---- The gradient pass: accumulation and norms. ----

template <Dtype D, class L>
INFINITY_INLINE F accumulate(const GradientArrays& a, size_t i, L lanes) {
    F x = load_gradient<D>(a.grad, i, lanes);
    if (a.read_acc) x = Vec::add(Vec::load(a.acc + i, lanes), x);
    if (a.write_acc) Vec::store(a.acc + i, Vec::quiet(x), lanes);
    return x;
}

// Unrolled by recursion, so that every lane is a register.
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
    double lane[kLanes];
    squares.read(lane);
    for (size_t half = kLanes / 2; half > 0; half /= 2) {
        for (size_t l = 0; l < half; ++l) lane[l] += lane[l + half];
    }
    return lane[0];
}

template <Dtype D>
void gradient(const GradientArrays& a, size_t begin, size_t count, double* sums) {
    const size_t end = begin + count;
    if (a.squares) {
        for (size_t i = begin; i < end; i += kBlock) {
            *sums++ = square_block<D>(a, i, end - i < kBlock ? end - i : kBlock);
        }
        return;
    }
    size_t i = begin;
    for (; i + kWidth <= end; i += kWidth) accumulate<D>(a, i, Full{});
    if (i < end) accumulate<D>(a, i, Part(end - i));
}

// ---- The stream: bytes moved, nothing computed. ----

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

// All arrays advance together, `granule` elements of one after the other.
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

// ---- The table. ----

template <class R, Dtype D>
constexpr void fill_formats(UpdateKernel (&row)[kParameterFormats]) {
    row[0] = update<R, D, ParameterFormat::kPlain>;
    row[1] = update<R, D, ParameterFormat::kPlainF32>;
    row[2] = update<R, D, ParameterFormat::kPlainBf16>;
    row[3] = update<R, D, ParameterFormat::kPlainF16>;
    row[4] = update<R, D, ParameterFormat::kSplit>;
}

template <class R>
constexpr void fill_dtypes(UpdateKernel (&rows)[kDtypes][kParameterFormats]) {
    fill_formats<R, Dtype::kF32>(rows[0]);
    fill_formats<R, Dtype::kBf16>(rows[1]);
    fill_formats<R, Dtype::kF16>(rows[2]);
}

constexpr KernelTable make_table(const char* name) {
    KernelTable table{};
    table.name = name;
    fill_dtypes<Adam<true, false>>(table.update[static_cast<int>(Rule::kAdamW)]);
    fill_dtypes<Adam<true, true>>(table.update[static_cast<int>(Rule::kAdamWSmallBeta)]);
    fill_dtypes<Adam<false, false>>(table.update[static_cast<int>(Rule::kAdam)]);
    fill_dtypes<Adam<false, true>>(table.update[static_cast<int>(Rule::kAdamSmallBeta)]);
    fill_dtypes<Sgd<false>>(table.update[static_cast<int>(Rule::kSgd)]);
    fill_dtypes<Sgd<true>>(table.update[static_cast<int>(Rule::kSgdMomentum)]);
    fill_dtypes<Adagrad>(table.update[static_cast<int>(Rule::kAdagrad)]);
    table.gradient[0] = gradient<Dtype::kF32>;
    table.gradient[1] = gradient<Dtype::kBf16>;
    table.gradient[2] = gradient<Dtype::kF16>;
    table.stream = stream;
    return table;
}

}  // namespace
}  // namespace infinity::cpu_adam
