// The driver's handles over the test driver, from several threads, with streams as threads. The
// sanitizers and the checker both find that accesses which events order are in order.
#include <dlfcn.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "driver.hpp"
#include "repeated.hpp"

using namespace infinity::driver;

namespace {

template <typename Function>
Function* control(const char* name) {
    static void* const library = ::dlopen(INFINITY_TEST_DRIVER, RTLD_NOW);
    CHECK(library != nullptr);
    auto* const found = reinterpret_cast<Function*>(::dlsym(library, name));
    CHECK(found != nullptr);
    return found;
}

void reset(std::uint64_t seed, bool threads) {
    control<void(std::uint64_t, int)>("infinity_test_reset")(seed, threads ? 1 : 0);
}

std::string lines(const char* name) {
    char text[4096];
    control<std::size_t(char*, std::size_t)>(name)(text, sizeof text);
    return text;
}

std::string violations() { return lines("infinity_test_violations"); }
std::string left() { return lines("infinity_test_left"); }

Address at(const void* memory) { return reinterpret_cast<Address>(memory); }

void finish(const Event& event) {
    while (!event.done()) std::this_thread::yield();
}

std::shared_ptr<Driver> open() { return std::make_shared<Driver>(load(INFINITY_TEST_DRIVER), 0); }

// Each stream copies the bytes on, after the event of the stream before it.
void a_chain_over_streams_carries_its_bytes(std::uint64_t seed, bool threads) {
    reset(seed, threads);
    const auto driver = open();
    constexpr std::size_t kStreams = 4;
    constexpr std::size_t kBytes = 1 << 14;
    std::vector<std::unique_ptr<Stream>> streams;
    for (std::size_t each = 0; each < kStreams; ++each) {
        streams.push_back(std::make_unique<Stream>(driver, static_cast<int>(each)));
    }
    std::vector<std::vector<unsigned char>> memory(kStreams + 1,
                                                   std::vector<unsigned char>(kBytes));
    for (int turn = 0; turn < 20; ++turn) {
        std::iota(memory[0].begin(), memory[0].end(), static_cast<unsigned char>(turn));
        std::shared_ptr<Event> last;
        for (std::size_t each = 0; each < kStreams; ++each) {
            if (last) streams[each]->wait(*last);
            streams[each]->copy(at(memory[each + 1].data()), at(memory[each].data()), kBytes, 1000);
            last = streams[each]->record(false);
        }
        finish(*last);
        CHECK(memory[kStreams] == memory[0]);
    }
    CHECK(violations().empty());
}

void threads_use_one_driver(std::uint64_t seed, bool threads) {
    reset(seed, threads);
    const auto driver = open();
    std::vector<std::thread> hosts;
    for (int number = 0; number < 4; ++number) {
        hosts.emplace_back([&driver, number] {
            const Stream stream(driver, 0);
            std::vector<int> source(500, number);
            std::vector<int> into(500);
            for (int turn = 0; turn < 50; ++turn) {
                std::fill(into.begin(), into.end(), -1);
                stream.copy(at(into.data()), at(source.data()), into.size() * sizeof(int), 0);
                const auto event = stream.record(true);
                finish(*event);
                CHECK(into == source);
                if (turn % 10 == 0) {
                    while (!stream.done()) std::this_thread::yield();
                }
            }
        });
    }
    for (std::thread& each : hosts) each.join();
    CHECK(violations().empty());
}

void kernels_run_between_copies(std::uint64_t seed, bool threads) {
    reset(seed, threads);
    const auto driver = open();
    const auto module = std::make_shared<Module>(
        driver, std::string("infinity-host-kernels:") + INFINITY_TEST_DRIVER);
    const auto fill = module->function("infinity_test_fill");
    const Stream stream(driver, 0);
    std::vector<std::uint32_t> memory(1000);
    std::vector<std::uint32_t> seen(1000);
    for (std::uint32_t value = 1; value < 30; ++value) {
        struct {
            std::uint32_t* into;
            std::uint32_t count;
            std::uint32_t value;
        } arguments = {memory.data(), 1000, value};
        fill->launch(stream, 1, 32, &arguments, sizeof arguments);
        stream.copy(at(seen.data()), at(memory.data()), 4000, 0);
        std::memset(&arguments, 0xff, sizeof arguments);  // they were taken by value
        finish(*stream.record(false));
        CHECK(seen == std::vector<std::uint32_t>(1000, value));
    }
    CHECK(violations().empty());
}

void streams_end_with_their_work_done(std::uint64_t seed, bool threads) {
    reset(seed, threads);
    const auto driver = open();
    std::vector<char> source(1 << 16, 'x');
    std::vector<char> into(1 << 16);
    {
        const Stream stream(driver, 0);
        stream.copy(at(into.data()), at(source.data()), into.size(), 100);
    }
    CHECK(into == source);
}

// Threads do the jobs of one object, as those of a pool would. At its one event all copies are
// done.
void jobs_end_with_one_event(std::uint64_t seed, bool threads) {
    reset(seed, threads);
    const auto driver = open();
    constexpr std::size_t kJobs = 24;
    constexpr std::size_t kBytes = 1 << 10;
    const Stream down(driver, 0);
    std::vector<unsigned char> there(kJobs * kBytes, 7);
    std::vector<unsigned char> here(there.size());
    std::vector<unsigned char> back(there.size());
    std::vector<std::shared_ptr<Event>> downs;
    CopiesAround::Up up{std::make_shared<Stream>(driver, 1), down.record(false), {}, 100, true};
    std::vector<std::vector<CopiesAround::Use>> uses;
    for (std::size_t start = 0; start < here.size(); start += kBytes) {
        down.copy(at(&here[start]), at(&there[start]), kBytes, 0);
        downs.push_back(down.record(false));
        up.copies.push_back({at(&back[start]), at(&here[start]), kBytes});
        uses.push_back({{at(&here[start]), kBytes, true}});
    }
    const auto around = std::make_shared<CopiesAround>(driver, downs, up, uses, "job");
    const auto hooks = around->hooks();
    std::atomic<std::size_t> next{0};
    std::vector<std::thread> hosts;
    for (int number = 0; number < 4; ++number) {
        hosts.emplace_back([&] {
            for (std::size_t job = next++; job < kJobs; job = next++) {
                while (hooks[job]->before() != infinity::JobHooks::State::happened) {
                    std::this_thread::yield();
                }
                for (std::size_t i = job * kBytes; i < (job + 1) * kBytes; ++i) ++here[i];
                hooks[job]->after();
            }
        });
    }
    for (std::thread& each : hosts) each.join();
    around->check();
    CHECK(around->events().first != nullptr);
    finish(*around->events().second);
    CHECK(back == std::vector<unsigned char>(there.size(), 8));
    CHECK(violations().empty());
}

void what_is_not_ordered_is_found(std::uint64_t seed) {
    reset(seed, false);  // with threads it would be a real data race
    const auto driver = open();
    std::vector<char> memory(300);
    const Stream first(driver, 0);
    const Stream second(driver, 0);
    first.copy(at(memory.data()), at(memory.data() + 100), 100, 0);
    second.copy(at(memory.data() + 200), at(memory.data()), 100, 0);
    CHECK(!violations().empty());
}

// Threads map, register and copy beside each other; each gives back what it took.
void memory_is_given_back(std::uint64_t seed, bool threads) {
    reset(seed, threads);
    const auto driver = open();
    std::vector<std::thread> hosts;
    for (unsigned char number = 0; number < 4; ++number) {
        hosts.emplace_back([&driver, number] {
            const Stream stream(driver, 0);
            std::vector<char> source(1 << 13, 'x');
            std::vector<char> into(1 << 13);
            for (int turn = 0; turn < 10; ++turn) {
                RepeatedMemory memory(driver, granularity(*driver), 3, number);
                driver->register_host(at(source.data()), source.size());
                stream.copy(at(into.data()), at(source.data()), into.size(), 1000);
                const auto* bytes = reinterpret_cast<const unsigned char*>(memory.address());
                CHECK(bytes[0] == number && bytes[3 * granularity(*driver) - 1] == number);
                finish(*stream.record(false));
                driver->synchronize();
                CHECK(into == source);
                memory.release();
                memory.release();
                driver->unregister_host(at(source.data()));
            }
        });
    }
    for (std::thread& each : hosts) each.join();
    CHECK(violations().empty());
    CHECK(left().empty());
}

// Whichever call fails, nothing is left.
void a_mapping_that_fails_leaves_nothing() {
    reset(1, false);
    const auto driver = open();
    const std::size_t chunk = granularity(*driver);
    for (const char* call :
         {"cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemsetD8_v2"}) {
        control<void(const char*, int, int)>("infinity_test_fail")(call, 1, 2);
        bool failed = false;
        try {
            const RepeatedMemory memory(driver, chunk, 2, 1);
        } catch (const CallFailed& error) {
            failed = error.name() == "CUDA_ERROR_OUT_OF_MEMORY";
        }
        CHECK(failed);
        CHECK(left().empty());
    }
    // What the driver must refuse: addresses and memory that are not what they are taken for.
    const Table& table = driver->table();
    const Driver::Current current(*driver);
    Address address = 0;
    CHECK(table.address_reserve(&address, 2 * chunk, 0, 0, 0) == success);
    MemoryHandle memory = 0;
    const AllocationProperties here = {pinned, 0, {on_device, 0}, nullptr, 0, 0, 0, {}};
    CHECK(table.memory_create(&memory, chunk, &here, 0) == success);
    CHECK(table.memory_map(address + 2 * chunk, chunk, 0, memory, 0) != success);  // beyond
    CHECK(table.memory_map(address, chunk, 0, memory, 0) == success);
    CHECK(table.memory_map(address, chunk, 0, memory, 0) != success);  // twice
    CHECK(table.memory_fill(address, 1, chunk) != success);            // no access set
    CHECK(table.memory_unmap(address, 2 * chunk) != success);          // more than is mapped
    CHECK(table.address_free(address, 2 * chunk) != success);          // still mapped
    CHECK(table.memory_release(memory) == success);
    CHECK(table.memory_release(memory) != success);                            // twice
    CHECK(table.memory_map(address + chunk, chunk, 0, memory, 0) != success);  // released
    CHECK(table.memory_unmap(address, chunk) == success);
    CHECK(table.memory_unmap(address, chunk) != success);  // twice
    CHECK(table.address_free(address, chunk) != success);  // a part
    CHECK(table.address_free(address, 2 * chunk) == success);
    CHECK(table.address_free(address, 2 * chunk) != success);  // twice
    CHECK(left().empty());
}

void a_device_without_a_checker_is_told_nothing() {
    Table table = load(INFINITY_TEST_DRIVER);
    table.touched = nullptr;
    const auto driver = std::make_shared<Driver>(table, 0);
    CHECK(!driver->checked());
    Stream(driver, 0).touched(1, 1, true, "");
}

}  // namespace

int main() {
    for (const bool threads : {false, true}) {
        for (std::uint64_t seed = 0; seed < 8; ++seed) {
            a_chain_over_streams_carries_its_bytes(seed, threads);
            threads_use_one_driver(seed, threads);
            jobs_end_with_one_event(seed, threads);
            kernels_run_between_copies(seed, threads);
            streams_end_with_their_work_done(seed, threads);
            memory_is_given_back(seed, threads);
        }
    }
    what_is_not_ordered_is_found(1);
    a_mapping_that_fails_leaves_nothing();
    a_device_without_a_checker_is_told_nothing();
}
