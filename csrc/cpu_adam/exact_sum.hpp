// Sums of float64 values without rounding, which no order of additions changes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace infinity::cpu_adam {

// Every finite float64 is an integer number of units of 2^-1074, below 2^2098. So a sum of 2^63
// values is below 2^2161, which a sign and 68 digits of 32 bits hold.
class ExactSum {
  public:
    static constexpr size_t kDigits = 68;

    // Adds `count` values, which lie `stride` elements apart.
    void add(const double* values, size_t count, ptrdiff_t stride = 1);

    // The sum of the finite values in units of 2^-1074: two's complement, the lowest digit first.
    std::array<uint32_t, kDigits> units() const;

    // The sum of the values that are not finite, as IEEE 754 adds them; 0 if there are none.
    double nonfinite() const { return nonfinite_; }

  private:
    void add_finite(uint64_t bits);
    void carry();

    std::array<int64_t, kDigits> digits_{};
    double nonfinite_ = 0;
};

}  // namespace infinity::cpu_adam
