// The compiled implementations of CRC32C, and those that this CPU can run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace infinity::checksum {

// Bytes that lie together, cut into blocks. `out` gets the CRC of each block.
struct Run {
    const std::byte* data;
    uint64_t bytes;
    uint64_t block;  // bytes of a block, more than 0; the last block may be shorter
    uint32_t* out;
};

struct Implementation {
    const char* name;
    uint32_t (*bytes)(const std::byte* data, size_t bytes, uint32_t value);
    void (*runs)(const Run* runs, size_t n);
};

extern const Implementation kTable;
#if defined(INFINITY_X86)
extern const Implementation kSse42;
#elif defined(INFINITY_ARM64)
extern const Implementation kArmv8;
#endif

// The implementations that this CPU can run, best first. The last one is "table".
const std::vector<const Implementation*>& runnable_implementations();

// How many blocks an implementation works on at a time, see [Note: lanes] in
// csrc/checksum/lanes.inl.
inline constexpr int kLanes = 4;

}  // namespace infinity::checksum
