// CRC32C by the crc32c instructions of ARMv8.
#include <arm_acle.h>

#include "lanes.inl"

namespace infinity::checksum {
namespace {

struct Armv8Step {
    static uint64_t word(uint64_t crc, uint64_t word) {
        return __crc32cd(static_cast<uint32_t>(crc), word);
    }
    static uint64_t byte(uint64_t crc, unsigned char byte) {
        return __crc32cb(static_cast<uint32_t>(crc), byte);
    }
};

}  // namespace

const Implementation kArmv8{"armv8", crc_of_bytes<Armv8Step>, crc_of_runs<Armv8Step>};

}  // namespace infinity::checksum
