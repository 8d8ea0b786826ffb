#include "twister.hpp"

namespace infinity::twister {
namespace {

constexpr std::size_t kMiddle = 397;
constexpr std::size_t kRest = kWords - kMiddle;

uint32_t twisted(uint32_t high, uint32_t low, uint32_t middle) {
    const uint32_t mixed = (high & 0x80000000U) | (low & 0x7fffffffU);
    return middle ^ (mixed >> 1) ^ (-(low & 1U) & 0x9908b0dfU);
}

// Makes the next words. No loop reads a word that it has written, so compilers vectorise all three.
void twist(uint32_t (&words)[kWords]) {
    for (std::size_t i = 0; i < kRest; ++i)
        words[i] = twisted(words[i], words[i + 1], words[i + kMiddle]);
    for (std::size_t i = kRest; i < 2 * kRest; ++i)
        words[i] = twisted(words[i], words[i + 1], words[i - kRest]);
    for (std::size_t i = 2 * kRest; i < kWords - 1; ++i)
        words[i] = twisted(words[i], words[i + 1], words[i - kRest]);
    words[kWords - 1] = twisted(words[kWords - 1], words[0], words[kMiddle - 1]);
}

}  // namespace

std::size_t count_on(uint32_t (&words)[kWords], std::size_t place, uint64_t count) {
    while (count > kWords - place) {
        count -= kWords - place;
        twist(words);
        place = 0;
    }
    return place + static_cast<std::size_t>(count);
}

}  // namespace infinity::twister
