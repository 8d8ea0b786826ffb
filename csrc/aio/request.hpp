// Requests and transfers. A caller makes a request, and a backend does transfers: blocks of a
// request.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "future.hpp"

namespace infinity::aio {

class File;

enum class Kind : uint8_t { read, write, sync };
inline constexpr int kinds = 3;
const char* verb(Kind kind);

// The alignment in bytes that direct I/O on a file asks for. Both are powers of two.
struct Alignment {
    bool direct = false;
    uint32_t memory = 1;
    uint32_t granularity = 1;  // of offsets and lengths; see [Note: unaligned parts]
};

// A range of memory and the range of a file that it is read from or written to.
struct Range {
    std::byte* address = nullptr;
    uint64_t offset = 0;
    uint64_t bytes = 0;
};

struct Block {
    uint32_t bytes = 0;
    bool direct = false;
};

// The first block to cut off a range. It is direct where that is possible, of at most block_bytes.
// It is buffered before the first aligned offset, after the last one, and where the memory is not
// aligned.
inline Block first_block(const Range& range, const Alignment& alignment, uint32_t block_bytes) {
    const auto buffered = [&](uint64_t bytes) {
        return Block{static_cast<uint32_t>(std::min<uint64_t>(bytes, block_bytes)), false};
    };
    if (!alignment.direct) return buffered(range.bytes);
    const uint64_t mask = alignment.granularity - 1;
    const uint64_t head = (alignment.granularity - (range.offset & mask)) & mask;
    const uint64_t body = head < range.bytes ? (range.bytes - head) & ~mask : 0;
    const auto body_address = reinterpret_cast<uintptr_t>(range.address) + head;
    if (body == 0 || body_address % alignment.memory != 0) return buffered(range.bytes);
    if (head != 0) return buffered(head);
    const uint64_t limit = std::max<uint64_t>(block_bytes & ~mask, alignment.granularity);
    return {static_cast<uint32_t>(std::min(body, limit)), true};
}

struct Request {
    Kind kind = Kind::read;
    std::shared_ptr<File> file;
    Range left;  // not yet handed to the backend
    TimePoint deadline;
    std::shared_ptr<Future> future;
    const std::byte* memory = nullptr;  // the first byte of the caller's memory

    // For the engine's thread only, from here on.
    uint64_t sequence = 0;  // order of arrival, among equal deadlines
    uint32_t in_flight = 0;
    bool queued = false;
    bool started = false;  // false for a sync, until it is handed out: a sync has no bytes to count
    bool failed = false;
    Failure failure;

    bool issued() const { return failed || (started && left.bytes == 0); }
};

struct Transfer {
    uint32_t slot = 0;  // its index among the engine's transfers, by which backends keep arrays
    Kind kind = Kind::read;
    bool direct = false;
    File* file = nullptr;
    std::byte* address = nullptr;
    uint64_t offset = 0;
    uint32_t bytes = 0;

    // For the loop only, from here on.
    Request* request = nullptr;
    Range block;         // the whole block, of which a part may have moved
    uint32_t tries = 0;  // attempts since bytes last moved
    TimePoint not_before;
};

}  // namespace infinity::aio
