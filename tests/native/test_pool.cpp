// Pools and regions from many threads, for the sanitizers: every byte is stamped by its holder and
// read back.
#include <atomic>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "pool.hpp"

using namespace infinity::tiers;

namespace {

constexpr std::uint64_t kPage = 4096;

void threads_share_no_byte() {
    auto pool = std::make_shared<Pool>(map_host({.nbytes = 24 * kPage}), 0, 24 * kPage, kPage);
    std::vector<std::thread> threads;
    for (int number = 0; number < 8; ++number) {
        threads.emplace_back([pool, number] {
            std::mt19937 random(static_cast<unsigned>(number));
            for (int turn = 0; turn < 400; ++turn) {
                const std::uint64_t nbytes = random() % (6 * kPage);
                const auto lease = pool->lease(nbytes, {std::chrono::seconds(60)});
                CHECK(lease);
                std::memset(lease->address(), number, nbytes);
                std::this_thread::yield();
                for (std::uint64_t at = 0; at < nbytes; at += 97) {
                    CHECK(lease->address()[at] == static_cast<std::byte>(number));
                }
            }
        });
    }
    for (auto& thread : threads) thread.join();
    const PoolCounters counters = pool->counters();
    CHECK(counters.leases == 0 && counters.leased == 0 && counters.granted == 8 * 400);
    CHECK(pool->largest_free() == 24 * kPage);
}

void a_lease_outlives_pool_and_region() {
    std::atomic<bool> released = false;
    std::vector<std::byte> bytes(4 * kPage);
    auto* aligned = reinterpret_cast<std::byte*>(
        (reinterpret_cast<std::uintptr_t>(bytes.data()) + kPage - 1) / kPage * kPage);
    auto region = std::make_shared<Region>(aligned, 2 * kPage, Device{}, [&] { released = true; });
    auto pool = std::make_shared<Pool>(region, 0, 2 * kPage, kPage);
    auto lease = pool->lease(kPage, {});
    region.reset();
    pool->close();
    CHECK(pool->closed() && !pool->lease(kPage, {}));
    pool.reset();
    CHECK(!released);
    std::memset(lease->address(), 1, kPage);
    lease.reset();
    CHECK(released);
}

void waiting_ends_on_time_on_close_and_on_interruption() {
    auto pool = std::make_shared<Pool>(map_host({.nbytes = kPage}), 0, kPage, kPage);
    const auto held = pool->lease(kPage, {});
    CHECK(!pool->lease(kPage, {std::chrono::milliseconds(5)}));
    CHECK(!pool->lease(kPage, {std::chrono::hours(1), [] { return true; }}));
    std::thread waiter([&] { CHECK(!pool->lease(kPage, {std::chrono::hours(1)})); });
    while (pool->counters().waits < 3) std::this_thread::yield();
    pool->close();
    waiter.join();
}

void host_memory_is_exact_and_counted() {
    const auto region =
        map_host({.nbytes = 3 * kPage + 1, .huge_pages = HugePages::advise, .numa_node = 0});
    CHECK(region->nbytes() == 4 * kPage);
    CHECK(reinterpret_cast<std::uintptr_t>(region->address()) % (2 << 20) == 0);
    region->address()[2 * kPage] = std::byte{1};
    CHECK(resident_bytes(*region) == kPage);
    CHECK(resident_bytes(*map_host({.nbytes = 8 * kPage, .populate = true})) == 8 * kPage);
    // Several pieces, the last of them not whole: for several threads where there are CPUs.
    const std::uint64_t large = (std::uint64_t{130} << 20) + 3 * kPage;
    CHECK(resident_bytes(*map_host({.nbytes = large, .populate = true})) == large);
}

}  // namespace

int main() {
    threads_share_no_byte();
    a_lease_outlives_pool_and_region();
    waiting_ends_on_time_on_close_and_on_interruption();
    host_memory_is_exact_and_counted();
    return 0;
}
