// CRC32C by the crc32 instruction of x86-64 (SSE4.2).
#include <nmmintrin.h>

#include "lanes.inl"

namespace infinity::checksum {
namespace {

struct Sse42Step {
    static uint64_t word(uint64_t crc, uint64_t word) { return _mm_crc32_u64(crc, word); }
    static uint64_t byte(uint64_t crc, unsigned char byte) {
        return _mm_crc32_u8(static_cast<uint32_t>(crc), byte);
    }
};

}  // namespace

const Implementation kSse42{"sse4.2", crc_of_bytes<Sse42Step>, crc_of_runs<Sse42Step>};

}  // namespace infinity::checksum
