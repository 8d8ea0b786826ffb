// Reads that are verified: by single pages, and by engines on every backend.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "engine.hpp"

using namespace infinity::aio;

namespace {

constexpr uint64_t page = PageChecksums::page;
constexpr uint64_t pages = 64;
constexpr uint64_t bytes = pages * page;

std::string directory;

struct Memory {
    Memory() : data(static_cast<std::byte*>(std::aligned_alloc(page, bytes))) { fill(0); }
    ~Memory() { std::free(data); }
    void fill(unsigned seed) {
        std::mt19937_64 random(seed);
        for (uint64_t i = 0; i < bytes; ++i) data[i] = static_cast<std::byte>(random());
    }
    Range range(uint64_t offset, uint64_t length) const { return {data + offset, offset, length}; }
    std::byte* data;
};

void test_pages() {
    PageChecksums checksums(bytes + 100);
    Memory memory;
    CHECK(!checksums.difference(memory.range(0, bytes)));  // takes the checksums of the first read
    CHECK(checksums.compared() == 0);
    CHECK(!checksums.difference(memory.range(0, bytes)));
    CHECK(checksums.compared() == bytes);
    memory.data[5 * page + 17] ^= std::byte{4};
    CHECK(checksums.difference(memory.range(0, bytes)) == 5 * page);
    CHECK(!checksums.difference(memory.range(6 * page, 3 * page)));
    CHECK(!checksums.difference(memory.range(5 * page + 1, page)));  // covers no page
    checksums.written(memory.range(5 * page, page));
    CHECK(!checksums.difference(memory.range(0, bytes)));
    // A page that is written in part is unknown, and then that of its next read.
    checksums.written(memory.range(page, page + 100));
    memory.data[2 * page] ^= std::byte{1};
    CHECK(!checksums.difference(memory.range(0, bytes)));
    memory.data[2 * page] ^= std::byte{1};
    CHECK(checksums.difference(memory.range(0, bytes)) == 2 * page);
    checksums.unknown(memory.range(2 * page + 5, 1));
    CHECK(!checksums.difference(memory.range(0, bytes)));
    // Past the size for which it was made nothing is compared.
    const Range past{memory.data, bytes - page, 3 * page};
    checksums.written(past);
    memory.data[page] ^= std::byte{1};
    CHECK(!checksums.difference(past));
    memory.data[0] ^= std::byte{1};
    CHECK(checksums.difference(past) == bytes - page);
}

std::shared_ptr<Engine> make_engine(const std::string& backend, std::shared_ptr<Faults> faults) {
    Options options;
    options.directory = directory;
    options.backend = backend;
    options.depth = 4;
    options.block_bytes = 4 * page;
    options.faults = std::move(faults);
    return Engine::create(std::move(options));
}

std::shared_ptr<Future> run(Engine& engine, Kind kind, const std::shared_ptr<File>& file,
                            const Range& range) {
    auto request = std::make_unique<Request>();
    request->kind = kind;
    request->file = file;
    request->left = range;
    request->deadline = Clock::now();
    request->future = std::make_shared<Future>(1, range.bytes);
    std::shared_ptr<Future> future = request->future;
    std::vector<std::unique_ptr<Request>> requests;
    requests.push_back(std::move(request));
    engine.submit(std::move(requests));
    while (future->wait(TimePoint::max()) != Future::Wait::done) {
    }
    return future;
}

void overwrite(const std::string& path, uint64_t offset, std::byte value) {
    const int descriptor = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
    CHECK(descriptor >= 0 && ::pwrite(descriptor, &value, 1, static_cast<off_t>(offset)) == 1);
    CHECK(::fsync(descriptor) == 0);
    ::close(descriptor);
}

std::string make_file(const std::string& name) {
    const std::string path = directory + "/" + name;
    const int descriptor = ::open(path.c_str(), O_CREAT | O_TRUNC | O_RDWR | O_CLOEXEC, 0600);
    CHECK(descriptor >= 0 && ftruncate(descriptor, static_cast<off_t>(bytes)) == 0);
    ::close(descriptor);
    return path;
}

void check_difference(const std::shared_ptr<Future>& future, uint64_t offset, uint64_t position) {
    const Failure* failure = future->failure();
    CHECK(failure != nullptr && failure->error == other_bytes);
    CHECK(failure->offset == offset && failure->position == position);
}

void test_engine(const std::string& backend) {
    const auto faults = std::make_shared<Faults>();
    const auto engine = make_engine(backend, faults);
    const std::string path = make_file(backend);
    const auto file = engine->open(path, true, true);
    Memory out;
    Memory in;
    const auto add = [&](FaultRule::Action action, Kind kind, uint64_t nth, uint32_t moved,
                         int error = 0) {
        FaultRule rule;
        rule.action = action;
        rule.kind = kind;
        rule.nth = nth;
        rule.bytes = moved;
        rule.error = error;
        faults->add(rule);
    };
    for (unsigned round = 0; round < 40; ++round) {
        out.fill(round);
        // Short transfers are continued, and do not matter to what is compared.
        add(FaultRule::Action::shorten, Kind::write, 1 + round % 7, 1 + 777 * round % 16000);
        add(FaultRule::Action::shorten, Kind::read, 1 + round % 5, 1 + 555 * round % 16000);
        CHECK(run(*engine, Kind::write, file, out.range(0, bytes))->failure() == nullptr);
        CHECK(run(*engine, Kind::read, file, in.range(0, bytes))->failure() == nullptr);
        CHECK(std::memcmp(in.data, out.data, bytes) == 0);
        faults->clear();
        const uint64_t at = (round * 7919 * 53) % bytes;
        overwrite(path, at, out.data[at] ^ std::byte{16});
        const uint64_t first = at / page * page;
        check_difference(run(*engine, Kind::read, file, in.range(0, bytes)), first, first);
        check_difference(run(*engine, Kind::read, file, in.range(first, page)), first, 0);
        overwrite(path, at, out.data[at]);
        CHECK(run(*engine, Kind::read, file, in.range(0, bytes))->failure() == nullptr);
    }
    CHECK(engine->stats().verified_bytes >= 80 * bytes);
    // Writes that are dropped or torn.
    for (const uint32_t moved : {0u, 6000u}) {
        out.fill(1000 + moved);
        add(FaultRule::Action::tear, Kind::write, 3, moved);
        CHECK(run(*engine, Kind::write, file, out.range(0, bytes))->failure() == nullptr);
        faults->clear();
        const uint64_t first = 8 * page + moved / page * page;
        check_difference(run(*engine, Kind::read, file, in.range(0, bytes)), first, first);
    }
    // After a write that fails, nobody knows what is there.
    CHECK(run(*engine, Kind::write, file, out.range(0, bytes))->failure() == nullptr);
    out.fill(2000);
    add(FaultRule::Action::fail, Kind::write, 1, 0, EIO);
    CHECK(run(*engine, Kind::write, file, out.range(4 * page, page))->failure() != nullptr);
    faults->clear();
    overwrite(path, 4 * page, std::byte{1});
    CHECK(run(*engine, Kind::read, file, in.range(0, bytes))->failure() == nullptr);
    engine->close_file(file);
    engine->close();
}

// Threads that write and read ranges of their own, with whole pages.
void test_threads(const std::string& backend) {
    const auto engine = make_engine(backend, nullptr);
    const auto file = engine->open(make_file(backend + "-threads"), true, true);
    std::vector<std::thread> threads;
    for (unsigned worker = 0; worker < 4; ++worker)
        threads.emplace_back([&, worker] {
            Memory memory;
            const uint64_t own = bytes / 4;
            for (unsigned round = 0; round < 60; ++round) {
                memory.fill(worker * 1000 + round);
                const uint64_t skipped = round % 8 * page;
                const Range range = memory.range(worker * own + skipped, own - skipped);
                CHECK(run(*engine, Kind::write, file, range)->failure() == nullptr);
                CHECK(run(*engine, Kind::read, file, range)->failure() == nullptr);
            }
        });
    for (std::thread& thread : threads) thread.join();
    CHECK(engine->stats().failures == 0);
    engine->close_file(file);
    engine->close();
}

}  // namespace

int main() {
    std::string pattern = (std::filesystem::temp_directory_path() / "infinity-XXXXXX").string();
    CHECK(mkdtemp(pattern.data()) != nullptr);
    directory = pattern;
    test_pages();
    for (const BackendReport& backend : probe(directory).backends) {
        if (!backend.ok) continue;
        test_engine(backend.name);
        test_threads(backend.name);
    }
    std::filesystem::remove_all(directory);
}
