// CRC32C: known values, every implementation against the definition, blocks, threads, forks.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "crc32c.hpp"
#include "workers.hpp"

namespace infinity::checksum {
namespace {

// By the definition, bit by bit.
uint32_t slow_crc32c(const std::byte* data, size_t bytes, uint32_t value) {
    uint32_t crc = ~value;
    for (size_t i = 0; i < bytes; ++i) {
        crc ^= static_cast<uint32_t>(data[i]);
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78 : 0);
    }
    return ~crc;
}

std::vector<std::byte> random_bytes(size_t bytes) {
    std::mt19937 random(7);
    std::vector<std::byte> data(bytes);
    for (std::byte& each : data) each = static_cast<std::byte>(random());
    return data;
}

void test_known_values(const Implementation& implementation) {
    const auto crc = [&](const std::vector<unsigned char>& data) {
        return crc32c(reinterpret_cast<const std::byte*>(data.data()), data.size(), 0,
                      implementation);
    };
    CHECK(crc({}) == 0);
    CHECK(crc({'1', '2', '3', '4', '5', '6', '7', '8', '9'}) == 0xE3069283);
    CHECK(crc(std::vector<unsigned char>(32, 0x00)) == 0x8A9136AA);
    CHECK(crc(std::vector<unsigned char>(32, 0xFF)) == 0x62A8AB43);
}

// Each range is copied to memory of exactly its size, so that a sanitizer sees a read outside.
void test_lengths_alignments_and_splits(const Implementation& implementation) {
    const std::vector<std::byte> data = random_bytes(200);
    for (size_t begin = 0; begin < 9; ++begin) {
        for (size_t bytes = 0; bytes < 70; ++bytes) {
            const std::vector<std::byte> exact(data.begin(), data.begin() + begin + bytes);
            const std::byte* at = exact.data() + begin;
            const uint32_t expected = slow_crc32c(at, bytes, 0);
            CHECK(crc32c(at, bytes, 0, implementation) == expected);
            for (size_t first = 0; first <= bytes; ++first) {
                const uint32_t value = crc32c(at, first, 0, implementation);
                CHECK(crc32c(at + first, bytes - first, value, implementation) == expected);
            }
        }
    }
}

using Rows = std::vector<int64_t>;

// The checksums of blocks, one at a time.
std::vector<uint32_t> slow_blocks(const std::byte* base, const Rows& rows) {
    std::vector<uint32_t> found;
    for (size_t i = 0; i < rows.size(); i += 3) {
        for (int64_t at = 0; at < rows[i + 1]; at += rows[i + 2]) {
            const int64_t bytes = std::min(rows[i + 2], rows[i + 1] - at);
            found.push_back(slow_crc32c(base + rows[i] + at, static_cast<size_t>(bytes), 0));
        }
    }
    return found;
}

void check_blocks(const std::vector<std::byte>& memory, const Rows& rows,
                  const Implementation& implementation, size_t threads) {
    const size_t n = rows.size() / 3;
    CHECK(fault_of_segments(rows.data(), n, memory.size()).empty());
    const std::vector<uint32_t> expected = slow_blocks(memory.data(), rows);
    CHECK(block_count(rows.data(), n) == expected.size());
    std::vector<uint32_t> found(expected.size());
    crc32c_blocks(memory.data(), rows.data(), n, found.data(), implementation, threads);
    CHECK(found == expected);
}

void test_blocks(const Implementation& implementation) {
    const std::vector<std::byte> memory = random_bytes(5000);
    std::mt19937 random(3);
    const auto below = [&](int64_t end) { return static_cast<int64_t>(random() % end); };
    for (int round = 0; round < 200; ++round) {
        Rows rows;
        for (int64_t i = below(6); i > 0; --i) {
            const int64_t offset = below(5001);
            const int64_t bytes = below(3) == 0 ? below(20) : below(5001);
            rows.insert(rows.end(), {offset, std::min(bytes, 5000 - offset), 1 + below(300)});
        }
        for (const size_t threads : {1U, 3U}) check_blocks(memory, rows, implementation, threads);
    }
    check_blocks(memory, {0, 5000, INT64_MAX, 5000, 0, 1, 0, 5000, 1}, implementation, 2);
}

// Enough bytes for many parts, in blocks that are smaller and larger than a part's least bytes.
void test_threads() {
    const std::vector<std::byte> memory = random_bytes(6 << 20);
    const auto size = static_cast<int64_t>(memory.size());
    const Implementation& best = *runnable_implementations().front();
    Rows small;
    for (int64_t i = 0; i < size / 1024; ++i) small.insert(small.end(), {i * 1024, 1024, 4096});
    for (const Rows& rows : {small, Rows{0, size, 4096, 5, size - 5, 300'000},
                             Rows{0, size, 1 << 20, 1, 10, 3, 0, 600'000, size}}) {
        check_blocks(memory, rows, best, 4);
    }
}

void test_faults() {
    const auto bad = [](const Rows& rows) {
        return !fault_of_segments(rows.data(), rows.size() / 3, 100).empty();
    };
    CHECK(!bad({}) && !bad({0, 100, 1, 100, 0, 1}));
    CHECK(bad({0, 101, 1}) && bad({1, 100, 1}) && bad({101, 0, 1}));
    CHECK(bad({-1, 1, 1}) && bad({0, -1, 1}) && bad({0, 1, 0}) && bad({0, 0, -1}));
    CHECK(bad({INT64_MAX, INT64_MAX, 1}) && bad({INT64_MIN, INT64_MIN, INT64_MIN}));
    CHECK(bad({0, 1, 1, 0, 200, 1}));
    bool thrown = false;
    const Rows many{0, INT64_MAX, 1, 0, 1, 1};
    try {
        block_count(many.data(), 2);
    } catch (const std::length_error&) {
        thrown = true;
    }
    CHECK(thrown);
}

void check_division(size_t threads, size_t parts) {
    std::vector<std::atomic<int>> ran(parts);
    divide(threads, parts, [&](size_t i) { ++ran[i]; });
    for (const std::atomic<int>& each : ran) CHECK(each == 1);
}

// Each part ends when both have begun, which one thread alone cannot bring about.
bool two_threads_meet() {
    std::atomic<int> begun = 0;
    std::atomic<bool> met = true;
    divide(2, 2, [&](size_t) {
        ++begun;
        for (int i = 0; i < 10000 && begun < 2; ++i) usleep(1000);
        if (begun < 2) met = false;
    });
    return met;
}

void test_division() {
    for (const size_t threads : {0U, 1U, 2U, 5U, 1000U}) {
        for (const size_t parts : {0U, 1U, 2U, 100U}) check_division(threads, parts);
    }
    CHECK(two_threads_meet());
    std::vector<std::thread> callers;
    for (int t = 0; t < 4; ++t) {
        callers.emplace_back([] {
            for (int i = 0; i < 200; ++i) check_division(3, 7);
        });
    }
    for (std::thread& caller : callers) caller.join();
}

// In the child the threads are gone, and made anew. The parent's are still there.
[[maybe_unused]] void test_fork() {
    CHECK(two_threads_meet());
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(60);  // a hang is a failure
        _exit(two_threads_meet() ? 0 : 1);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(two_threads_meet());
}

}  // namespace
}  // namespace infinity::checksum

int main() {
    using namespace infinity::checksum;
    // First: a fork while AddressSanitizer starts a thread may leave its locks held in the child,
    // and test_division starts 255 that it does not wait for.
#if !defined(__SANITIZE_THREAD__)  // it ends a forked child that starts a thread
    test_fork();
#endif
    CHECK(runnable_implementations().back()->name == std::string("table"));
    for (const Implementation* implementation : runnable_implementations()) {
        test_known_values(*implementation);
        test_lengths_alignments_and_splits(*implementation);
        test_blocks(*implementation);
    }
    test_faults();
    test_threads();
    test_division();
    return 0;
}
