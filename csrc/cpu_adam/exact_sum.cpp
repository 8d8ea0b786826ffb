#include "exact_sum.hpp"

#include <algorithm>
#include <bit>

namespace infinity::cpu_adam {
namespace {

constexpr int kDigitBits = 32;
constexpr uint64_t kDigitMask = 0xFFFFFFFF;
constexpr int kFractionBits = 52;
constexpr uint64_t kExponents = 0x7FF;
// One value adds less than 2^33 to a digit, so this many leave room in 64 bits.
constexpr size_t kBeforeCarry = size_t{1} << 28;

}  // namespace

void ExactSum::add(const double* values, size_t count, ptrdiff_t stride) {
    while (count > 0) {
        const size_t some = std::min(count, kBeforeCarry);
        for (size_t i = 0; i < some; ++i, values += stride) {
            const uint64_t bits = std::bit_cast<uint64_t>(*values);
            if ((bits >> kFractionBits & kExponents) == kExponents) {
                nonfinite_ += *values;
            } else {
                add_finite(bits);
            }
        }
        carry();
        count -= some;
    }
}

// The value is its significand, below 2^53, times 2^shift units. Shifted within the first of three
// digits, the significand has at most 84 bits.
inline void ExactSum::add_finite(uint64_t bits) {
    const uint64_t exponent = bits >> kFractionBits & kExponents;
    uint64_t significand = bits & ((uint64_t{1} << kFractionBits) - 1);
    if (exponent > 0) significand |= uint64_t{1} << kFractionBits;  // subnormal numbers have no 1
    const uint64_t shift = exponent > 0 ? exponent - 1 : 0;
    const uint64_t within = shift % kDigitBits;
    const uint64_t low = (significand & kDigitMask) << within;
    const uint64_t high = (significand >> kDigitBits) << within;
    const int64_t sign = static_cast<int64_t>(bits) >> 63;  // 0, or -1 for a negative value
    int64_t* const digits = &digits_[shift / kDigitBits];
    const auto signed_value = [sign](uint64_t x) {
        return (static_cast<int64_t>(x) ^ sign) - sign;
    };
    digits[0] += signed_value(low & kDigitMask);
    digits[1] += signed_value((low >> kDigitBits) + (high & kDigitMask));
    digits[2] += signed_value(high >> kDigitBits);
}

// Brings all digits but the last into [0, 2^32). The last one has the sign.
void ExactSum::carry() {
    for (size_t i = 0; i + 1 < kDigits; ++i) {
        digits_[i + 1] += digits_[i] >> kDigitBits;
        digits_[i] &= static_cast<int64_t>(kDigitMask);
    }
}

std::array<uint32_t, ExactSum::kDigits> ExactSum::units() const {
    std::array<uint32_t, kDigits> found{};
    std::transform(digits_.begin(), digits_.end(), found.begin(),
                   [](int64_t digit) { return static_cast<uint32_t>(digit); });
    return found;
}

}  // namespace infinity::cpu_adam
