// The recording of writes and syncs, with engines and other threads at once: meant for the
// sanitizers.
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "engine.hpp"

using namespace infinity::aio;

namespace {

constexpr uint64_t block = 16384;
constexpr int writes = 40;

std::string directory;

std::shared_ptr<Future> start(Engine& engine, Kind kind, const std::shared_ptr<File>& file,
                              Range range) {
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
    return future;
}

void check(const std::shared_ptr<Future>& future) {
    while (future->wait(TimePoint::max()) != Future::Wait::done) {
    }
    CHECK(future->failure() == nullptr);
}

// Writes two blocks at a time and syncs after each, over memory that changes in between.
void write_all(const std::string& backend, const std::shared_ptr<Faults>& faults,
               const std::string& path) {
    const int descriptor = ::open(path.c_str(), O_CREAT | O_TRUNC | O_RDWR | O_CLOEXEC, 0600);
    CHECK(descriptor >= 0 && ftruncate(descriptor, 2 * block) == 0);
    ::close(descriptor);
    Options options;
    options.directory = directory;
    options.backend = backend;
    options.depth = 4;
    options.block_bytes = block;
    options.faults = faults;
    const std::shared_ptr<Engine> engine = Engine::create(std::move(options));
    const std::shared_ptr<File> file = engine->open(path, true);
    auto* memory = static_cast<std::byte*>(std::aligned_alloc(4096, 2 * block));
    for (int i = 0; i < writes; ++i) {
        std::memset(memory, i, 2 * block);
        check(start(*engine, Kind::write, file, {memory, 0, 2 * block}));
        check(start(*engine, Kind::sync, file, {}));
    }
    engine->close_file(file);
    engine->close();
    std::free(memory);
}

void test_order(const std::string& backend) {
    const auto faults = std::make_shared<Faults>();
    Recording& recording = faults->recording();
    recording.start();
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i)
        threads.emplace_back(
            [&, i] { write_all(backend, faults, directory + "/" + std::to_string(i)); });
    threads.emplace_back([&] {
        for (int i = 0; i < writes; ++i) {
            Event event;
            event.kind = "rename";
            recording.end(recording.begin(std::move(event)));
            CHECK(recording.events().size() > 0);
        }
    });
    for (std::thread& thread : threads) thread.join();
    std::set<uint64_t> numbers;
    const std::vector<Event> events = recording.events();
    CHECK(events.size() == 3 * 3 * writes + writes);
    for (const Event& event : events) {
        CHECK(event.completed && event.submitted < *event.completed);
        CHECK(event.result >= 0 && !event.changed);
        CHECK(numbers.insert(event.submitted).second && numbers.insert(*event.completed).second);
    }
    // In each file every sync begins after the two writes before it and ends before the next.
    for (int i = 0; i < 3; ++i) {
        uint64_t synced = 0;
        uint64_t written = 0;
        int syncs = 0;
        for (const Event& event : events) {
            if (event.path != directory + "/" + std::to_string(i)) continue;
            CHECK(event.submitted > synced);
            if (event.kind == "sync") {
                CHECK(event.submitted > written);
                synced = *event.completed;
                ++syncs;
            } else {
                CHECK(event.kind == "write" && event.data->size() == block);
                CHECK(event.data->front() == std::byte(syncs));
                CHECK(event.data->back() == std::byte(syncs));
                written = std::max(written, *event.completed);
            }
        }
        CHECK(syncs == writes);
    }
}

// Starting and clearing while transfers are in flight loses events, and nothing else.
void test_clearing(const std::string& backend) {
    const auto faults = std::make_shared<Faults>();
    std::atomic<bool> over = false;
    std::thread other([&] {
        while (!over) {
            faults->recording().start();
            for (const Event& event : faults->recording().events()) CHECK(!event.changed);
            faults->recording().clear();
        }
    });
    write_all(backend, faults, directory + "/cleared");
    over = true;
    other.join();
    CHECK(faults->recording().events().empty());
}

}  // namespace

int main() {
    std::string pattern = (std::filesystem::temp_directory_path() / "infinity-XXXXXX").string();
    CHECK(mkdtemp(pattern.data()) != nullptr);
    directory = pattern;
    for (const BackendReport& backend : probe(directory).backends) {
        if (!backend.ok) continue;
        test_order(backend.name);
        test_clearing(backend.name);
    }
    std::filesystem::remove_all(directory);
}
