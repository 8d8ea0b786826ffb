// Counting on: the word behind any number of words is that of the standard library's twister.
#include <cstdint>
#include <random>

#include "check.hpp"
#include "twister.hpp"

namespace infinity::twister {
namespace {

// What the twister gives for a word.
uint32_t tempered(uint32_t word) {
    word ^= word >> 11;
    word ^= (word << 7) & 0x9d2c5680U;
    word ^= (word << 15) & 0xefc60000U;
    return word ^ (word >> 18);
}

void compare(uint32_t seed, uint64_t first, uint64_t count) {
    std::mt19937 expected(seed);
    uint32_t words[kWords] = {seed};
    for (uint32_t i = 1; i < kWords; ++i)
        words[i] = 1812433253U * (words[i - 1] ^ (words[i - 1] >> 30)) + i;
    std::size_t place = count_on(words, kWords, first);
    place = count_on(words, place, count);
    expected.discard(first + count);
    const std::size_t behind = count_on(words, place, 1);
    CHECK(behind >= 1 && behind <= kWords);
    CHECK(tempered(words[behind - 1]) == expected());
}

}  // namespace
}  // namespace infinity::twister

int main() {
    using infinity::twister::compare;
    for (uint64_t first = 0; first < 1300; first += 13) {
        for (const uint64_t count : {0, 1, 623, 624, 625, 1248, 5000}) compare(5, first, count);
    }
    compare(7, 1, 1000003);
    return 0;
}
