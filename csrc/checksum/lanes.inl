// The loops over bytes and blocks, the same for every implementation. Each file that includes this
// one is compiled for another instruction set, so all is in an anonymous namespace, and nothing of
// the standard library is called that the linker could take from one file for all.
//
// A Step has two functions, which take the inverted CRC and return it with more bytes:
//   static uint64_t word(uint64_t crc, uint64_t eight_bytes);
//   static uint64_t byte(uint64_t crc, unsigned char one_byte);

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "implementations.hpp"

namespace infinity::checksum {
namespace {

static_assert(std::endian::native == std::endian::little, "word() takes its first byte lowest");

// A block, or what is left of it, and its inverted CRC so far.
struct Lane {
    const std::byte* data;
    uint64_t left;  // bytes
    uint64_t crc;
    uint32_t* out;
};

// Hands out the blocks of runs, one after another.
struct Blocks {
    const Run* run;
    const Run* end;
    uint64_t done = 0;   // bytes of `run`
    uint64_t count = 0;  // blocks of `run`

    bool next(Lane& lane) {
        while (run != end && done == run->bytes) {
            ++run;
            done = count = 0;
        }
        if (run == end) return false;
        const uint64_t rest = run->bytes - done;
        const uint64_t bytes = rest < run->block ? rest : run->block;
        lane = {run->data + done, bytes, 0xFFFFFFFF, run->out + count};
        done += bytes;
        ++count;
        return true;
    }
};

inline uint64_t word_at(const std::byte* data) {
    uint64_t word;
    std::memcpy(&word, data, sizeof(word));
    return word;
}

// [Note: lanes] A CRC instruction takes three cycles, but a CPU begins one each cycle. Words of one
// block depend on each other, words of different blocks do not, so the next words of N blocks are
// taken in turn.
template <class Step, int N>
void advance(Lane* lanes, uint64_t words) {
    const std::byte* data[N];
    uint64_t crc[N];
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
        data[i] = lanes[i].data;
        crc[i] = lanes[i].crc;
    }
    const uint64_t bytes = words * 8;
    for (uint64_t at = 0; at < bytes; at += 8) {
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) crc[i] = Step::word(crc[i], word_at(data[i] + at));
    }
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
        lanes[i].data += bytes;
        lanes[i].left -= bytes;
        lanes[i].crc = crc[i];
    }
}

// The CRC of a lane with less than a word left.
template <class Step>
uint32_t finish(const Lane& lane) {
    uint64_t crc = lane.crc;
    for (uint64_t i = 0; i < lane.left; ++i) {
        crc = Step::byte(crc, static_cast<unsigned char>(lane.data[i]));
    }
    return ~static_cast<uint32_t>(crc);
}

template <class Step>
uint32_t crc_of_bytes(const std::byte* data, size_t bytes, uint32_t value) {
    Lane lane{data, bytes, static_cast<uint32_t>(~value), nullptr};
    advance<Step, 1>(&lane, bytes / 8);
    return finish<Step>(lane);
}

template <class Step>
void crc_of_runs(const Run* runs, size_t n) {
    static_assert(kLanes == 4, "the switch below");
    Blocks blocks{runs, runs + n};
    Lane lanes[kLanes];
    int live = 0;
    while (live < kLanes && blocks.next(lanes[live])) ++live;
    while (live > 0) {
        uint64_t words = lanes[0].left / 8;
        for (int i = 1; i < live; ++i) {
            if (lanes[i].left / 8 < words) words = lanes[i].left / 8;
        }
        switch (live) {
            case 4:
                advance<Step, 4>(lanes, words);
                break;
            case 3:
                advance<Step, 3>(lanes, words);
                break;
            case 2:
                advance<Step, 2>(lanes, words);
                break;
            default:
                advance<Step, 1>(lanes, words);
        }
        for (int i = live - 1; i >= 0; --i) {
            if (lanes[i].left >= 8) continue;
            *lanes[i].out = finish<Step>(lanes[i]);
            if (!blocks.next(lanes[i])) lanes[i] = lanes[--live];
        }
    }
}

}  // namespace
}  // namespace infinity::checksum
