// CRC32C (Castagnoli): of bytes, and of the blocks of segments of a memory.
//
// The polynomial is 0x1EDC6F41 with reflected bits, and the CRC is inverted before the first byte
// and after the last, as in iSCSI (RFC 3720): the CRC of "123456789" is 0xE3069283.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "implementations.hpp"

namespace infinity::checksum {

// The CRC of the bytes that `value` is the CRC of, followed by `data`. The CRC of no bytes is 0.
uint32_t crc32c(const std::byte* data, size_t bytes, uint32_t value = 0,
                const Implementation& implementation = *runnable_implementations().front());

// Segments are n rows of three numbers: offset from the memory's first byte, bytes, bytes of a
// block. Each segment is cut into blocks, of which the last may be shorter. A segment of 0 bytes
// has none.

// What is wrong with segments of a memory of `memory_bytes` bytes: the cause of an error, which
// names the first bad row. Empty if nothing is wrong.
std::string fault_of_segments(const int64_t* segments, size_t n, uint64_t memory_bytes);

// The number of blocks of faultless segments. Throws std::length_error if it is above 2^63 - 1.
uint64_t block_count(const int64_t* segments, size_t n);

// Writes the CRC of each block to `out`, segment after segment. Segments must be faultless. The
// work is divided among `threads` threads, of which the caller is one; with little work, or where
// the system refuses threads, among fewer.
void crc32c_blocks(const std::byte* base, const int64_t* segments, size_t n, uint32_t* out,
                   const Implementation& implementation = *runnable_implementations().front(),
                   size_t threads = 1);

}  // namespace infinity::checksum
