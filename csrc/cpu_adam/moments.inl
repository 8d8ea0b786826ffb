// How moments are loaded and stored, and the random bits that round them. Part of kernels.inl.
//
// [Note: unbiased moments] A mean that moves by a thousandth a step stands still once half a unit
// of its last place is more than that: rounded to nearest, a second moment in bf16 ends 24% from
// where it should be. Rounded up with a probability equal to the part that is cut off, every mean
// is right on average. The random bits are a hash of a key, the same for all of a parameter's
// elements in one step, and of the element's index in its parameter: they follow neither chunk nor
// thread nor page. In bf16 the low half of a hash rounds the first moment, the high half the
// second. In int8 the elements k and k + 32 of a block share a hash, of k's index: of the one, the
// low 20 bits round the first moment and the high 20 bits the second, of the other the low ones
// round the second and the high ones the first. The eight bits that both have are the highest of
// the low ones and the lowest of the high ones, which hardly ever decide.
//
// [Note: int8 codes] A block of kCodeBlock elements has an exponent e, that of its largest
// magnitude; the unit s is 2^(e - kSpan). A magnitude x is kept as y = x / s + 1, a float of kSpan
// + 1 binades whose three upper bits of mantissa, with the exponent above them, are the code: the
// mu-law of telephony (ITU-T G.711) in more segments. Code 0 is 0; the steps are s / 8 at first and
// double from each binade of y to the next, so that what is not tiny is off by one part in eight at
// most, and rounding the bits of y is unbiased, for within a segment they are linear. The first
// moment has a sign and 2^15 s, the second 2^31 s: its square root is as far-reaching. A second
// moment that is not 0 is never stored as 0, or m / sqrt(v) would have no bound (the zero-point
// problem, Li, Chen and Zhu, arXiv:2309.01507). A block with an element that is not finite, or
// above 3.19e38, becomes NaN throughout: it says so rather than hide.

namespace infinity::cpu_adam {
namespace {

using U = Vec::U;

// 2^32 / phi, and half of MurmurHash3's finaliser: enough to scatter a Weyl sequence.
constexpr uint32_t kWeyl = 0x9E3779B1U;
constexpr uint32_t kMix = 0x85EBCA6BU;

// A constant that the compiler does not recognise as one: it is kept in a register or read as an
// operand, rather than broadcast anew in every block.
inline uint32_t kept_constant(uint32_t x) {
#if !defined(__CUDACC_RTC__)  // whose instructions have constants in them
    __asm__("" : "+r"(x));
#endif
    return x;
}

// 32 random bits for each index. See [Note: unbiased moments].
struct Noise {
    explicit Noise(const Range& range)
        : ramp(Vec::ramp(kWeyl)),
          mix(Vec::set_u(kept_constant(kMix))),
          start(key(range.seed) + (range.index - static_cast<uint32_t>(range.begin)) * kWeyl) {}
    INFINITY_INLINE U at(size_t i) const {
        U x = Vec::add_u(ramp, Vec::set_u(start + static_cast<uint32_t>(i) * kWeyl));
        x = Vec::xor_u(x, Vec::template shr<16>(x));
        x = Vec::mul_u(x, mix);
        return Vec::xor_u(x, Vec::template shr<13>(x));
    }
    // Seeds may be consecutive, keys may not. (The 32-bit mixer of C. Wellons' hash-prospector.)
    static uint32_t key(uint32_t x) {
        x = (x ^ (x >> 16)) * 0x7FEB352DU;
        x = (x ^ (x >> 15)) * 0x846CA68BU;
        return x ^ (x >> 16);
    }
    U ramp;
    U mix;
    uint32_t start;
};

// Formats whose elements do not depend on each other.
struct MomentsF32 {
    static constexpr bool kBlocks = false;
    static constexpr bool kInfinite = true;
    MomentsF32(const UpdateArrays& a, const Range&)
        : first(static_cast<float*>(a.first_moment)),
          second(static_cast<float*>(a.second_moment)) {}
    template <class L>
    INFINITY_INLINE F load_first(size_t i, L lanes) const {
        return Vec::load(first + i, lanes);
    }
    template <class L>
    INFINITY_INLINE F load_second(size_t i, L lanes) const {
        return Vec::load(second + i, lanes);
    }
    template <class R, class L>
    INFINITY_INLINE void store(size_t i, F m, F v, L lanes) const {
        if constexpr (R::kFirst) Vec::store(first + i, m, lanes);
        if constexpr (R::kSecond) Vec::store(second + i, v, lanes);
    }
    // See [Note: quiet last].
    template <class R, class L>
    INFINITY_INLINE void quiet(size_t i, L lanes) const {
        if constexpr (R::kFirst) Vec::store(first + i, Vec::quiet(load_first(i, lanes)), lanes);
        if constexpr (R::kSecond) Vec::store(second + i, Vec::quiet(load_second(i, lanes)), lanes);
    }
    INFINITY_INLINE void prefetch_first(size_t i) const { prefetch_group(first, i); }
    INFINITY_INLINE void prefetch_second(size_t i) const { prefetch_group(second, i); }
    float* first;
    float* second;
};

// Quiet before they are stored: a payload does not outlive the rounding.
struct MomentsBf16 {
    static constexpr bool kBlocks = false;
    static constexpr bool kInfinite = true;
    MomentsBf16(const UpdateArrays& a, const Range& range)
        : first(static_cast<uint16_t*>(a.first_moment)),
          second(static_cast<uint16_t*>(a.second_moment)),
          noise(range) {}
    template <class L>
    INFINITY_INLINE F load_first(size_t i, L lanes) const {
        return Vec::load_bf16(first + i, lanes);
    }
    template <class L>
    INFINITY_INLINE F load_second(size_t i, L lanes) const {
        return Vec::load_bf16(second + i, lanes);
    }
    template <class R, class L>
    INFINITY_INLINE void store(size_t i, F m, F v, L lanes) const {
        const U random = noise.at(i);
        const U low = Vec::and_u(random, Vec::set_u(0xFFFFU));
        if constexpr (R::kFirst) store_rounded(first + i, m, low, lanes);
        if constexpr (R::kSecond) {
            store_rounded(second + i, v, Vec::template shr<16>(random), lanes);
        }
    }
    template <class L>
    static INFINITY_INLINE void store_rounded(uint16_t* p, F x, U random, L lanes) {
        Vec::store_high(p, Vec::add_u(Vec::as_u(Vec::quiet(x)), random), lanes);
    }
    template <class R, class L>
    INFINITY_INLINE void quiet(size_t, L) const {}
    INFINITY_INLINE void prefetch_first(size_t i) const { prefetch_group(first, i); }
    INFINITY_INLINE void prefetch_second(size_t i) const { prefetch_group(second, i); }
    uint16_t* first;
    uint16_t* second;
    Noise noise;
};

constexpr uint32_t kTwoBits = 0x40000000U;
constexpr uint32_t kNanBits = 0x7FC00000U;

inline float float_of(uint32_t bits) { return Scalar::from_bits(bits); }

// What the codes of a block are multiplied with.
struct Scale {
    F binade;  // of the largest magnitude: 2^kSpan units
    F minus_unit;
};

// See [Note: int8 codes]. kSpan: binades between the unit and the block's largest magnitude.
template <uint32_t kSpan>
struct Compander {
    static constexpr uint32_t kLowest = kSpan + 1;           // whose unit is still a normal number
    static constexpr uint32_t kBase = (127U - kSpan) << 23;  // 1 / 2^kSpan
    static constexpr uint32_t kCodeMask = (8 * kSpan + 7) << kCodeBit;  // all bits of a code
    static_assert((kBase & kCodeMask) == 0);
    static_assert((kTwoBits & kCodeMask) == 0);

    // The exponent of a block whose largest magnitude has these bits. Only a NaN has a sign.
    static uint32_t exponent(uint32_t largest) {
        const uint32_t e = ((largest & 0x7FFFFFFFU) + kRoundsUp) >> 23;
        if (e < kLowest) return kLowest;
        return e < kNotFinite ? e : kNotFinite;
    }
    static Scale scale(uint32_t e) {
        const uint32_t bits = e == kNotFinite ? kNanBits : (e < kLowest ? kLowest : e) << 23;
        const F binade = Vec::set(float_of(bits));
        return {binade, Vec::mul(binade, Vec::set(-float_of(kBase)))};
    }
    // Two over the unit; anything if the block is not finite.
    static F inverse(uint32_t e) { return Vec::set(float_of((255U - (e - kSpan)) << 23)); }

    // `code` from kCodeBit on, with anything beside it. The bits of y / 2^kSpan are the code's and
    // others that are 0 in every code, so or does for add; (y - 1) s is then one fma.
    INFINITY_INLINE F decode(U code, const Scale& scale) const {
        const U y = Vec::and_or(code, code_mask, base);
        return Vec::fma(Vec::as_f(y), scale.binade, scale.minus_unit);
    }
    U code_mask = Vec::set_u(kept_constant(kCodeMask));
    U base = Vec::set_u(kept_constant(kBase));
};

// A block's exponent is known when all of its elements are, so the new moments wait in registers.
struct MomentsInt8 {
    static constexpr bool kBlocks = true;
    static constexpr bool kInfinite = false;  // finite below 2^128, or NaN
    using First = Compander<kFirstSpan>;
    using Second = Compander<kSecondSpan>;

    MomentsInt8(const UpdateArrays& a, const Range& range)
        : first(static_cast<uint8_t*>(a.first_moment)),
          second(static_cast<uint8_t*>(a.second_moment)),
          first_scale(a.first_scale),
          second_scale(a.second_scale),
          noise(range) {}

    // Of the block that is under way: its codes and their scales, the largest new magnitudes.
    struct Units {
        Vec::Codes first_codes;
        Vec::Codes second_codes;
        Scale first;
        Scale second;
        U largest_first;
        U largest_second;
        // k: from the first element of the block.
        template <class L>
        INFINITY_INLINE void see_first(F x, size_t k, L lanes) {
            const U y = Vec::keep(magnitude(x), lanes);
            largest_first = k == 0 ? y : Vec::max_u(largest_first, y);
        }
        // No rule makes a second moment negative; a NaN's sign leaves it the largest.
        template <class L>
        INFINITY_INLINE void see_second(F x, size_t k, L lanes) {
            const U y = Vec::keep(Vec::as_u(x), lanes);
            largest_second = k == 0 ? y : Vec::max_u(largest_second, y);
        }
    };
    // n elements from i, the first of a block.
    template <class R>
    INFINITY_INLINE Units units(size_t i, size_t n) const {
        Units u{};
        if constexpr (R::kFirst) {
            u.first_codes = Vec::load_codes(first + i, n);
            u.first = First::scale(first_scale[i / kCodeBlock]);
        }
        if constexpr (R::kSecond) {
            u.second_codes = Vec::load_codes(second + i, n);
            u.second = Second::scale(second_scale[i / kCodeBlock]);
        }
        return u;
    }
    // k: from the first element of the block.
    template <class L>
    INFINITY_INLINE F load_first(size_t k, const Units& u, L lanes) const {
        const F x =
            first_codec.decode(Vec::template unpack<kCodeBit>(u.first_codes, k, lanes), u.first);
        const U signs = Vec::template unpack<24>(u.first_codes, k, lanes);
        return Vec::as_f(Vec::and_or(signs, sign, Vec::as_u(x)));
    }
    template <class L>
    INFINITY_INLINE F load_second(size_t k, const Units& u, L lanes) const {
        return second_codec.decode(Vec::template unpack<kCodeBit>(u.second_codes, k, lanes),
                                   u.second);
    }
    // Of the block's new moments.
    struct Exponents {
        explicit Exponents(const Units& u)
            : first(First::exponent(Vec::largest(u.largest_first))),
              second(Second::exponent(Vec::largest(u.largest_second))) {}
        uint32_t first;
        uint32_t second;
    };
    // The new codes and exponents of n elements from i; whether all of their moments are finite.
    template <class R>
    INFINITY_INLINE bool store(size_t i, size_t n, const F* m, const F* v, Exponents e) const {
        U first_code[kCodeBlock / kWidth] = {};
        U second_code[kCodeBlock / kWidth] = {};
        for (size_t k = 0; k < n; k += kWidth) {
            const bool upper = k >= kCodeBlock / 2;
            const U random = noise.at(i + k % (kCodeBlock / 2));
            const U low = Vec::and_u(random, random_mask);
            const U high = Vec::template shr<32 - kCodeBit>(random);
            const size_t at = k / kWidth;
            if constexpr (R::kFirst) {
                first_code[at] = encode_first(m[at], First::inverse(e.first), upper ? high : low);
            }
            if constexpr (R::kSecond) {
                second_code[at] = encode(v[at], Second::inverse(e.second), two, upper ? low : high);
            }
        }
        if constexpr (R::kFirst) {
            Vec::template store_codes<kCodeBit, true>(first + i, first_code, n);
            close(first, first_scale, i, n, e.first);
        }
        if constexpr (R::kSecond) {
            bool zero = Vec::template store_codes<kCodeBit, false>(second + i, second_code, n);
            if (__builtin_expect(zero, 0)) raise_zeros(second + i, v, second_code, n);
            close(second, second_scale, i, n, e.second);
        }
        return (R::kSecond ? e.second : e.first) != kNotFinite;
    }
    // What is not 0 is never stored as 0. Most blocks have no code of 0, and are not asked.
    INFINITY_INLINE void raise_zeros(uint8_t* p, const F* v, U* codes, size_t n) const {
        for (size_t k = 0; k < n; k += kWidth) {
            U& code = codes[k / kWidth];
            code = Vec::at_least_if(Vec::as_u(v[k / kWidth]), lowest_code, code);
        }
        Vec::template store_codes<kCodeBit, false>(p, codes, n);
    }
    // Writes the exponent. Codes that were made of NaNs depend on the ISA, and give way to zeros.
    static INFINITY_INLINE void close(uint8_t* codes, uint8_t* scale, size_t i, size_t n,
                                      uint32_t e) {
        scale[i / kCodeBlock] = static_cast<uint8_t>(e);
        if (e == kNotFinite) {
            Vec::fence();  // whoever stored them
            for (size_t k = 0; k < n; ++k) codes[i + k] = 0;
        }
    }
    // A code from kCodeBit on, below it what is left of it. `offset` is 2 with the sign of x, so
    // that y comes doubled: none of the bits of 2 is one of a code's.
    static INFINITY_INLINE U encode(F x, F inverse, F offset, U random) {
        return Vec::add_u(Vec::as_u(Vec::fma(x, inverse, offset)), random);
    }
    INFINITY_INLINE U encode_first(F x, F inverse, U random) const {
        const U offset = Vec::and_or(Vec::as_u(x), sign, Vec::as_u(two));
        return encode(x, inverse, Vec::as_f(offset), random);
    }
    static constexpr uint32_t kSign = 0x80000000U;
    static INFINITY_INLINE U magnitude(F x) { return Vec::and_u(Vec::as_u(x), Vec::set_u(~kSign)); }
    INFINITY_INLINE void prefetch_first(size_t i) const { prefetch_codes(first, i); }
    INFINITY_INLINE void prefetch_second(size_t i) const { prefetch_codes(second, i); }

    uint8_t* first;
    uint8_t* second;
    uint8_t* first_scale;
    uint8_t* second_scale;
    Noise noise;
    First first_codec;
    Second second_codec;
    F two = Vec::set(float_of(kept_constant(kTwoBits)));
    U random_mask = Vec::set_u(kept_constant((1U << kCodeBit) - 1));
    U sign = Vec::set_u(kept_constant(kSign));
    U lowest_code = Vec::set_u(kept_constant(kTwoBits + (1U << kCodeBit)));
};

}  // namespace
}  // namespace infinity::cpu_adam
