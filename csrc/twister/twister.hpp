// MT19937 (Matsumoto and Nishimura, 1998), counted on without its output.
#pragma once

#include <cstddef>
#include <cstdint>

namespace infinity::twister {

constexpr std::size_t kWords = 624;

// Counts `count` words on. place: the index of the next word, at most kWords, which means that the
// words have to be made first. Returns the index of the next word, in the same way.
std::size_t count_on(uint32_t (&words)[kWords], std::size_t place, uint64_t count);

}  // namespace infinity::twister
