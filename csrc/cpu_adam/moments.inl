// Loading and storing of moments, and the random bits that round them. Part of kernels.inl.
//
// [Note: unbiased moments] A mean that changes by a thousandth of itself in a step stands still if
// that change is less than half a unit of its last place. Rounded to nearest, a second moment in
// bf16 ends 24% from where it should be. Stochastic rounding goes up with a probability equal to
// the part that is cut off, so every mean is right on average. The random bits are a hash of a key,
// which all elements of a parameter share in one step, and of the element's index in its parameter.
// They do not depend on chunk, thread or page. In bf16 the low half of a hash rounds the first
// moment and the high half the second. In int8 the elements k and k + 32 of a block share a hash,
// that of k's index. For element k, the low 20 bits round the first moment and the high 20 bits the
// second. For element k + 32, the low bits round the second moment and the high bits the first.
// Eight bits of the hash belong to both halves. They are the highest of the low bits and the lowest
// of the high bits, and as the lowest bits they hardly ever decide a rounding.
//
// [Note: int8 codes] A block of kCodeBlock elements has an exponent e, which is that of its largest
// magnitude. The unit is s = 2^(e - kSpan). A magnitude x is kept as y = x / s + 1, a float of
// kSpan + 1 binades. The three upper bits of y's mantissa, with the exponent above them, are the
// code: the mu-law of telephony (ITU-T G.711) with more segments. Code 0 is 0. The steps are s / 8
// at first and double from each binade of y to the next, so a value that is not tiny is off by one
// part in eight at most. Rounding the bits of y is unbiased, because y is linear in its bits within
// a segment. The first moment has a sign and reaches 2^15 s, the second reaches 2^31 s: its square
// root has the same reach. A second moment that is not 0 is never stored as 0, since m / sqrt(v)
// would have no bound then (the zero-point problem, Li, Chen and Zhu, arXiv:2309.01507). A block
// with an element that is not finite, or above 3.19e38, becomes NaN as a whole, so that the fault
// shows.

namespace infinity::cpu_adam {
namespace {

using U = Vec::U;

// 2^32 / phi. With half of MurmurHash3's finaliser it is enough to scatter a Weyl sequence.
constexpr uint32_t kWeyl = 0x9E3779B1U;
constexpr uint32_t kMix = 0x85EBCA6BU;

// Hides a constant from the compiler, which then keeps it in a register or reads it as an operand,
// rather than broadcasting it anew in every block.
inline uint32_t kept_constant(uint32_t x) {
#if !defined(__CUDACC_RTC__)  // GPU instructions contain their constants
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
    // Consecutive seeds must not give consecutive keys. (The 32-bit mixer of C. Wellons'
    // hash-prospector.)
    static uint32_t key(uint32_t x) {
        x = (x ^ (x >> 16)) * 0x7FEB352DU;
        x = (x ^ (x >> 15)) * 0x846CA68BU;
        return x ^ (x >> 16);
    }
    U ramp;
    U mix;
    uint32_t start;
};

// Moments in fp32, whose elements do not depend on each other.
struct MomentsF32 {
    static constexpr bool kBlocks = false;
    static constexpr bool kInfinite = true;
    MomentsF32(const UpdateArrays& a, const UpdateArrays& outputs, const Range&)
        : first(static_cast<const float*>(a.first_moment)),
          second(static_cast<const float*>(a.second_moment)),
          new_first(static_cast<float*>(outputs.first_moment)),
          new_second(static_cast<float*>(outputs.second_moment)) {}
    template <class R>
    bool aligned(size_t i) const {
        return (!R::kFirst || aligned_at(new_first + i)) &&
               (!R::kSecond || aligned_at(new_second + i));
    }
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
        if constexpr (R::kFirst) Vec::store(new_first + i, m, lanes);
        if constexpr (R::kSecond) Vec::store(new_second + i, v, lanes);
    }
    // See [Note: quiet last].
    template <class R, class L>
    INFINITY_INLINE void quiet(size_t i, L lanes) const {
        if constexpr (R::kFirst) {
            Vec::store(new_first + i, Vec::quiet(load_first(i, lanes)), lanes);
        }
        if constexpr (R::kSecond) {
            Vec::store(new_second + i, Vec::quiet(load_second(i, lanes)), lanes);
        }
    }
    INFINITY_INLINE void prefetch_first(size_t i) const { prefetch_group(first, i); }
    INFINITY_INLINE void prefetch_second(size_t i) const { prefetch_group(second, i); }
    const float* first;
    const float* second;
    float* new_first;
    float* new_second;
};

// Moments in bf16. NaNs are made quiet before they are stored, since a payload does not survive the
// rounding.
struct MomentsBf16 {
    static constexpr bool kBlocks = false;
    static constexpr bool kInfinite = true;
    MomentsBf16(const UpdateArrays& a, const UpdateArrays& outputs, const Range& range)
        : first(static_cast<const uint16_t*>(a.first_moment)),
          second(static_cast<const uint16_t*>(a.second_moment)),
          new_first(static_cast<uint16_t*>(outputs.first_moment)),
          new_second(static_cast<uint16_t*>(outputs.second_moment)),
          noise(range) {}
    template <class R>
    bool aligned(size_t i) const {
        return (!R::kFirst || aligned_at(new_first + i)) &&
               (!R::kSecond || aligned_at(new_second + i));
    }
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
        if constexpr (R::kFirst) store_rounded(new_first + i, m, low, lanes);
        if constexpr (R::kSecond) {
            store_rounded(new_second + i, v, Vec::template shr<16>(random), lanes);
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
    const uint16_t* first;
    const uint16_t* second;
    uint16_t* new_first;
    uint16_t* new_second;
    Noise noise;
};

constexpr uint32_t kTwoBits = 0x40000000U;
constexpr uint32_t kNanBits = 0x7FC00000U;

inline float float_of(uint32_t bits) { return Scalar::from_bits(bits); }

// The factors by which the codes of a block are decoded.
struct Scale {
    F binade;  // the binade of the largest magnitude: 2^kSpan units
    F minus_unit;
};

// The codec of [Note: int8 codes]. kSpan: binades between the unit and the block's largest
// magnitude.
template <uint32_t kSpan>
struct Compander {
    static constexpr uint32_t kLowest = kSpan + 1;           // its unit is still a normal number
    static constexpr uint32_t kBase = (127U - kSpan) << 23;  // 1 / 2^kSpan
    static constexpr uint32_t kCodeMask = (8 * kSpan + 7) << kCodeBit;  // all bits of a code
    static_assert((kBase & kCodeMask) == 0);
    static_assert((kTwoBits & kCodeMask) == 0);

    // The exponent of a block whose largest magnitude has these bits. Only a NaN may have its sign
    // bit set.
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
    // Two divided by the unit. The result may be anything if the block is not finite.
    static F inverse(uint32_t e) { return Vec::set(float_of((255U - (e - kSpan)) << 23)); }

    // Decodes a code that begins at kCodeBit, whatever bits are beside it. The bits of y / 2^kSpan
    // are the code's bits and constant bits that are 0 in every code, so an `or` replaces the
    // addition. Then (y - 1) s is one fma.
    INFINITY_INLINE F decode(U code, const Scale& scale) const {
        const U y = Vec::and_or(code, code_mask, base);
        return Vec::fma(Vec::as_f(y), scale.binade, scale.minus_unit);
    }
    U code_mask = Vec::set_u(kept_constant(kCodeMask));
    U base = Vec::set_u(kept_constant(kBase));
};

// Moments in int8. A block's exponent is known only when all elements are computed, so the new
// moments wait in registers.
struct MomentsInt8 {
    static constexpr bool kBlocks = true;
    static constexpr bool kInfinite = false;  // values are finite below 2^128, or NaN
    using First = Compander<kFirstSpan>;
    using Second = Compander<kSecondSpan>;

    MomentsInt8(const UpdateArrays& a, const UpdateArrays& outputs, const Range& range)
        : first(static_cast<const uint8_t*>(a.first_moment)),
          second(static_cast<const uint8_t*>(a.second_moment)),
          first_scale(a.first_scale),
          second_scale(a.second_scale),
          new_first(static_cast<uint8_t*>(outputs.first_moment)),
          new_second(static_cast<uint8_t*>(outputs.second_moment)),
          new_first_scale(outputs.first_scale),
          new_second_scale(outputs.second_scale),
          noise(range) {}

    // The block that is being updated: its codes, their scales, and the largest new magnitudes.
    struct Units {
        Vec::Codes first_codes;
        Vec::Codes second_codes;
        Scale first;
        Scale second;
        U largest_first;
        U largest_second;
        // k: index of the element in the block.
        template <class L>
        INFINITY_INLINE void see_first(F x, size_t k, L lanes) {
            const U y = Vec::keep(magnitude(x), lanes);
            largest_first = k == 0 ? y : Vec::max_u(largest_first, y);
        }
        // No rule makes a second moment negative. A NaN with its sign bit set is still the largest.
        template <class L>
        INFINITY_INLINE void see_second(F x, size_t k, L lanes) {
            const U y = Vec::keep(Vec::as_u(x), lanes);
            largest_second = k == 0 ? y : Vec::max_u(largest_second, y);
        }
    };
    // Loads n elements from i, which is the first element of a block.
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
    // k: index of the element in the block.
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
    // The exponents of the block's new moments.
    struct Exponents {
        explicit Exponents(const Units& u)
            : first(First::exponent(Vec::largest(u.largest_first))),
              second(Second::exponent(Vec::largest(u.largest_second))) {}
        uint32_t first;
        uint32_t second;
    };
    // Stores the new codes and exponents of n elements from i. Returns whether all moments are
    // finite.
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
            Vec::template store_codes<kCodeBit, true>(new_first + i, first_code, n);
            close(new_first, new_first_scale, i, n, e.first);
        }
        if constexpr (R::kSecond) {
            bool zero = Vec::template store_codes<kCodeBit, false>(new_second + i, second_code, n);
            if (__builtin_expect(zero, 0)) raise_zeros(new_second + i, v, second_code, n);
            close(new_second, new_second_scale, i, n, e.second);
        }
        return (R::kSecond ? e.second : e.first) != kNotFinite;
    }
    // Raises codes of 0 whose moment is not 0. Most blocks have no code of 0, and this is not
    // called.
    INFINITY_INLINE void raise_zeros(uint8_t* p, const F* v, U* codes, size_t n) const {
        for (size_t k = 0; k < n; k += kWidth) {
            U& code = codes[k / kWidth];
            code = Vec::at_least_if(Vec::as_u(v[k / kWidth]), lowest_code, code);
        }
        Vec::template store_codes<kCodeBit, false>(p, codes, n);
    }
    // Writes the exponent. Codes made of NaNs depend on the ISA, so they are replaced by zeros.
    static INFINITY_INLINE void close(uint8_t* codes, uint8_t* scale, size_t i, size_t n,
                                      uint32_t e) {
        scale[i / kCodeBlock] = static_cast<uint8_t>(e);
        if (e == kNotFinite) {
            Vec::fence();  // other lanes may have stored the codes
            for (size_t k = 0; k < n; ++k) codes[i + k] = 0;
        }
    }
    // Encodes x: the code begins at kCodeBit, with the rest of the mantissa below it. `offset` is 2
    // with the sign of x, so that y is doubled: no bit of 2 is a bit of a code.
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

    const uint8_t* first;
    const uint8_t* second;
    const uint8_t* first_scale;
    const uint8_t* second_scale;
    uint8_t* new_first;
    uint8_t* new_second;
    uint8_t* new_first_scale;
    uint8_t* new_second_scale;
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
