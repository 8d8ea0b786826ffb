#include "crc32c.hpp"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "workers.hpp"

namespace infinity::checksum {
namespace {

// The least bytes of a part of the work. A thread takes some 20 us for them, about as long as it
// takes to wake it.
constexpr uint64_t kPartBytes = 512 << 10;

// The number of blocks of one segment.
uint64_t blocks_of(uint64_t bytes, uint64_t block) {
    return bytes / block + (bytes % block != 0 ? 1 : 0);
}

// Runs that are cut into parts of about equal work. Part i is runs[begins[i]] up to
// runs[begins[i + 1]].
struct Parts {
    std::vector<Run> runs;
    std::vector<size_t> begins{0};

    size_t size() const { return begins.size() - 1; }

    // Adds the run, cut where parts end. A part has at least `least_bytes` bytes, and a block for
    // each lane, or its lanes would idle.
    void add(Run run, uint64_t least_bytes) {
        while (run.bytes > 0) {
            const uint64_t missing = least_bytes > bytes_ ? least_bytes - bytes_ : 0;
            const uint64_t blocks = round_up(std::max<uint64_t>(blocks_of(missing, run.block), 1));
            // Compared as blocks: the bytes of so many blocks could overflow.
            const bool whole = blocks_of(run.bytes, run.block) <= blocks;
            const uint64_t taken = whole ? run.bytes : blocks * run.block;
            runs.push_back({run.data, taken, run.block, run.out});
            const uint64_t added = blocks_of(taken, run.block);
            bytes_ += taken;
            blocks_ += added;
            run = {run.data + taken, run.bytes - taken, run.block, run.out + added};
            if (bytes_ >= least_bytes && blocks_ >= kLanes) close();
        }
    }

    void close() {
        if (blocks_ == 0) return;
        begins.push_back(runs.size());
        bytes_ = blocks_ = 0;
    }

  private:
    static uint64_t round_up(uint64_t blocks) { return (blocks + kLanes - 1) / kLanes * kLanes; }

    uint64_t bytes_ = 0;   // of the part that is open
    uint64_t blocks_ = 0;  // of the part that is open
};

}  // namespace

uint32_t crc32c(const std::byte* data, size_t bytes, uint32_t value,
                const Implementation& implementation) {
    return implementation.bytes(data, bytes, value);
}

std::string fault_of_segments(const int64_t* segments, size_t n, uint64_t memory_bytes) {
    for (size_t i = 0; i < n; ++i) {
        const int64_t offset = segments[3 * i];
        const int64_t bytes = segments[3 * i + 1];
        const int64_t block = segments[3 * i + 2];
        const std::string row = "Row " + std::to_string(i) + " of the segments";
        if (block <= 0) return row + " has blocks of " + std::to_string(block) + " bytes.";
        if (offset < 0 || bytes < 0 || static_cast<uint64_t>(offset) > memory_bytes ||
            static_cast<uint64_t>(bytes) > memory_bytes - static_cast<uint64_t>(offset)) {
            return row + " (" + std::to_string(bytes) + " bytes from offset " +
                   std::to_string(offset) + ") is not inside of the memory.";
        }
    }
    return "";
}

uint64_t block_count(const int64_t* segments, size_t n) {
    int64_t count = 0;
    for (size_t i = 0; i < n; ++i) {
        const auto bytes = static_cast<uint64_t>(segments[3 * i + 1]);
        const auto block = static_cast<uint64_t>(segments[3 * i + 2]);
        if (__builtin_add_overflow(count, blocks_of(bytes, block), &count)) {
            throw std::length_error("The segments have more blocks than can be counted.");
        }
    }
    return static_cast<uint64_t>(count);
}

void crc32c_blocks(const std::byte* base, const int64_t* segments, size_t n, uint32_t* out,
                   const Implementation& implementation, size_t threads) {
    const uint64_t least_bytes = threads > 1 ? kPartBytes : INT64_MAX;
    Parts parts;
    for (size_t i = 0; i < n; ++i) {
        const Run run{base + segments[3 * i], static_cast<uint64_t>(segments[3 * i + 1]),
                      static_cast<uint64_t>(segments[3 * i + 2]), out};
        parts.add(run, least_bytes);
        out += blocks_of(run.bytes, run.block);
    }
    parts.close();
    divide(threads, parts.size(), [&](size_t i) {
        const size_t begin = parts.begins[i];
        implementation.runs(parts.runs.data() + begin, parts.begins[i + 1] - begin);
    });
}

}  // namespace infinity::checksum
