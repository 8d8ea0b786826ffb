// The parts of csrc/aio without I/O: cutting requests into blocks, the deadline queue, striping.
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "check.hpp"
#include "queue.hpp"
#include "request.hpp"
#include "stripe.hpp"

using namespace infinity::aio;

namespace {

std::byte* at(uint64_t address) { return reinterpret_cast<std::byte*>(address); }

void check_cut(Range range, const Alignment& alignment, uint32_t block_bytes) {
    const uint64_t page = alignment.granularity;
    uint64_t buffered = 0;
    bool misaligned = false;
    while (range.bytes > 0) {
        const Block block = first_block(range, alignment, block_bytes);
        CHECK(block.bytes > 0 && block.bytes <= range.bytes);
        CHECK(block.bytes <= std::max<uint64_t>(block_bytes, page));
        const auto address = reinterpret_cast<uintptr_t>(range.address);
        if (block.direct) {
            CHECK(alignment.direct);
            CHECK(range.offset % page == 0 && block.bytes % page == 0);
            CHECK(address % alignment.memory == 0);
        } else {
            buffered += block.bytes;
            misaligned |= (address - range.offset) % alignment.memory != 0;
        }
        range = {range.address + block.bytes, range.offset + block.bytes,
                 range.bytes - block.bytes};
    }
    // Only the ends of a range go through the page cache, unless the memory is misaligned.
    CHECK(!alignment.direct || misaligned || buffered < 2 * page);
}

void test_cut() {
    std::mt19937_64 random(1);
    for (int i = 0; i < 200000; ++i) {
        const uint32_t memory = 1u << random() % 13;
        const Alignment alignment{random() % 8 != 0, memory,
                                  std::max(4096u, memory) << random() % 3};
        const uint64_t align = uint64_t{1} << random() % 16;
        const Range range{at((1 << 20) + random() % (1 << 20) / align * align),
                          random() % (1 << 20) / align * align, 1 + random() % (1 << 18)};
        check_cut(range, alignment, 4096u << random() % 6);
    }
    const Alignment page{true, 512, 4096};
    CHECK(first_block({at(4096), 8192, 1 << 30}, page, 4 << 20).bytes == 4 << 20);
    CHECK(first_block({at(4096 + 1), 8193, 1 << 30}, page, 4 << 20).bytes == 4095);
    CHECK(!first_block({at(4096), 8193, 1 << 20}, page, 4 << 20).direct);  // memory never fits
    CHECK(first_block({at(4096), 8193, 1 << 20}, page, 4 << 20).bytes == 1 << 20);
}

void test_queue() {
    std::mt19937_64 random(2);
    DeadlineQueue queue;
    std::vector<std::unique_ptr<Request>> requests;
    for (uint64_t i = 0; i < 1000; ++i) {
        requests.push_back(std::make_unique<Request>());
        requests.back()->sequence = i;
        requests.back()->deadline = TimePoint(std::chrono::nanoseconds(random() % 50));
        queue.push(requests.back().get());
    }
    Request* before = queue.pop();
    while (!queue.empty()) {
        Request* next = queue.pop();
        CHECK(!next->queued);
        CHECK(before->deadline < next->deadline ||
              (before->deadline == next->deadline && before->sequence < next->sequence));
        before = next;
    }
}

void test_stripes() {
    // Manifests rely on exactly these values.
    const StripeMap map({3, 1}, 10);
    CHECK(map.period() == (std::vector<uint32_t>{0, 0, 1, 0}));
    const std::vector<Extent> extents = map.extents(5, 45);
    CHECK(extents.size() == 3);
    CHECK(extents[0].file == 0 && extents[0].offset == 5 && extents[0].bytes == 15);
    CHECK(extents[1].file == 1 && extents[1].offset == 0 && extents[1].bytes == 10);
    CHECK(extents[2].file == 0 && extents[2].offset == 20 && extents[2].bytes == 20);
    // Behind a header of `base` bytes every place is that much further on, and nothing else
    // changes.
    const StripeMap behind({3, 1}, 10, 4096);
    CHECK(behind.base() == 4096 && map.base() == 0);
    CHECK(behind.period() == map.period());
    const std::vector<Extent> moved = behind.extents(5, 45);
    CHECK(moved.size() == extents.size());
    for (size_t i = 0; i < extents.size(); ++i)
        CHECK(moved[i].file == extents[i].file && moved[i].bytes == extents[i].bytes &&
              moved[i].offset == extents[i].offset + 4096);
    // Every byte has one place of its own, and the files have no gaps.
    std::mt19937_64 random(3);
    for (int round = 0; round < 200; ++round) {
        std::vector<uint32_t> weights(1 + random() % 4);
        for (uint32_t& weight : weights) weight = static_cast<uint32_t>(1 + random() % 5);
        const uint64_t base = random() % 3 * 100;
        const StripeMap any(weights, 1 + random() % 7, base);
        const uint64_t bytes = random() % 400;
        std::vector<uint64_t> next(weights.size(), base);
        for (const Extent& extent : any.extents(0, bytes)) {
            CHECK(extent.offset == next[extent.file]);
            next[extent.file] += extent.bytes;
        }
        CHECK(std::accumulate(next.begin(), next.end(), uint64_t{0}) == bytes + base * next.size());
    }
}

}  // namespace

int main() {
    test_cut();
    test_queue();
    test_stripes();
}
