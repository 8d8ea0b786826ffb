// The driver's handles over the test driver, from several threads, with streams as threads: what
// events order the sanitizers find in order, and the checker with them.
#include <dlfcn.h>

#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "driver.hpp"

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

std::string violations() {
    char text[4096];
    control<std::size_t(char*, std::size_t)>("infinity_test_violations")(text, sizeof text);
    return text;
}

Address at(const void* memory) { return reinterpret_cast<Address>(memory); }

void finish(const Event& event) {
    while (!event.done()) std::this_thread::yield();
}

std::shared_ptr<Driver> open() { return std::make_shared<Driver>(load(INFINITY_TEST_DRIVER), 0); }

// Bytes go around through memory that all streams share, each after the last one's event.
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

void what_is_not_ordered_is_found(std::uint64_t seed) {
    reset(seed, false);  // with threads it would be the data race that it is
    const auto driver = open();
    std::vector<char> memory(300);
    const Stream first(driver, 0);
    const Stream second(driver, 0);
    first.copy(at(memory.data()), at(memory.data() + 100), 100, 0);
    second.copy(at(memory.data() + 200), at(memory.data()), 100, 0);
    CHECK(!violations().empty());
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
            kernels_run_between_copies(seed, threads);
            streams_end_with_their_work_done(seed, threads);
        }
    }
    what_is_not_ordered_is_found(1);
    a_device_without_a_checker_is_told_nothing();
}
