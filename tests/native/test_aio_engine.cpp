// Engines under many threads, on every backend: meant for the sanitizers.
#include <fcntl.h>
#include <sys/wait.h>
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

std::string directory;

struct Memory {
    explicit Memory(size_t bytes)
        : data(static_cast<std::byte*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096))) {}
    ~Memory() { std::free(data); }
    std::byte* data;
};

std::string make_file(const std::string& name, uint64_t bytes) {
    const std::string path = directory + "/" + name;
    const int descriptor = ::open(path.c_str(), O_CREAT | O_TRUNC | O_RDWR | O_CLOEXEC, 0600);
    CHECK(descriptor >= 0 && ftruncate(descriptor, static_cast<off_t>(bytes)) == 0);
    ::close(descriptor);
    return path;
}

std::shared_ptr<Engine> make_engine(const std::string& backend,
                                    std::shared_ptr<Faults> faults = nullptr) {
    Options options;
    options.directory = directory;
    options.backend = backend;
    options.depth = 8;
    options.block_bytes = 16384;
    options.faults = std::move(faults);
    return Engine::create(std::move(options));
}

std::shared_ptr<Future> start(Engine& engine, Kind kind, const std::shared_ptr<File>& file,
                              Range range) {
    auto request = std::make_unique<Request>();
    request->kind = kind;
    request->file = file;
    request->left = range;
    request->deadline = Clock::now() + engine.slack(kind);
    request->future = std::make_shared<Future>(1, range.bytes);
    std::shared_ptr<Future> future = request->future;
    std::vector<std::unique_ptr<Request>> requests;
    requests.push_back(std::move(request));
    engine.submit(std::move(requests));
    return future;
}

void wait(const std::shared_ptr<Future>& future) {
    while (future->wait(TimePoint::max()) != Future::Wait::done) {
    }
}

void check(const std::shared_ptr<Future>& future) {
    wait(future);
    if (future->failure())
        std::fprintf(stderr, "%s failed: %s\n", future->failure()->operation.c_str(),
                     std::strerror(future->failure()->error));
    CHECK(future->failure() == nullptr);
}

// Each thread owns a region, of an odd size: neighbours share pages.
void work(Engine& engine, const std::shared_ptr<File>& file, uint64_t begin, uint64_t bytes,
          unsigned seed, int rounds) {
    std::mt19937_64 random(seed);
    std::vector<std::byte> model(bytes);
    Memory out(bytes + 8192);
    Memory in(bytes + 8192);
    for (int round = 0; round < rounds; ++round) {
        // Two writes side by side in flight, then two reads across them.
        const uint64_t shift = random() % 4 == 0 ? random() % 4096 : begin % 4096;
        const uint64_t first = random() % bytes;
        const uint64_t middle = first + random() % (bytes - first);
        const uint64_t last = middle + random() % (bytes - middle);
        for (uint64_t i = first; i < last; ++i) model[i] = static_cast<std::byte>(random());
        std::memcpy(out.data + shift + first, model.data() + first, last - first);
        std::vector<std::shared_ptr<Future>> futures;
        for (const auto& [from, to] : {std::pair{first, middle}, std::pair{middle, last}})
            if (from < to)
                futures.push_back(start(engine, Kind::write, file,
                                        {out.data + shift + from, begin + from, to - from}));
        if (round % 16 == 0) futures.push_back(start(engine, Kind::sync, file, {}));
        for (const auto& future : futures) check(future);
        const uint64_t from = random() % bytes;
        const uint64_t to = from + 1 + random() % (bytes - from);
        std::memset(in.data, 0, bytes + 4096);
        check(start(engine, Kind::read, file, {in.data + shift + from, begin + from, to - from}));
        CHECK(std::memcmp(in.data + shift + from, model.data() + from, to - from) == 0);
    }
}

void test_threads(const std::string& backend, const std::shared_ptr<Faults>& faults) {
    constexpr uint64_t region = 50001;
    constexpr unsigned workers = 6;
    constexpr int rounds = 60;
    std::vector<std::shared_ptr<Engine>> engines = {make_engine(backend, faults),
                                                    make_engine(backend, faults)};
    std::vector<std::shared_ptr<File>> files;
    for (size_t i = 0; i < engines.size(); ++i)
        files.push_back(
            engines[i]->open(make_file(backend + std::to_string(i), region * workers), true));
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < workers; ++i)
        for (size_t path = 0; path < engines.size(); ++path)
            threads.emplace_back([&, i, path] {
                work(*engines[path], files[path], i * region, region, i + 100, rounds);
            });
    for (std::thread& thread : threads) thread.join();
    for (size_t i = 0; i < engines.size(); ++i) {
        engines[i]->close_file(files[i]);
        CHECK(files[i].use_count() == 1);
        CHECK(engines[i]->stats().failures == 0);
        engines[i]->close();
    }
}

void test_faulty_threads(const std::string& backend) {
    const auto faults = std::make_shared<Faults>();
    FaultRule rule;
    rule.times = 1;
    const auto add = [&](FaultRule::Action action, uint64_t nth) {
        rule.action = action;
        rule.nth = nth;
        faults->add(rule);
    };
    for (uint64_t nth = 5; nth < 3000; nth += 23) {
        rule.error = nth % 2 ? EAGAIN : EINTR;
        add(FaultRule::Action::fail, nth);
        rule.bytes = static_cast<uint32_t>(1 + nth * 37 % 16383);
        add(FaultRule::Action::shorten, nth + 7);
        rule.delay = std::chrono::microseconds(nth % 1000);
        add(FaultRule::Action::delay, nth + 11);
    }
    test_threads(backend, faults);
    CHECK(faults->fired() > 0);
}

// Closing while others submit: every future is done afterwards, well or cancelled. Requests on
// their way at once have memory of their own: two reads into the same bytes are the caller's race.
void test_close(const std::string& backend) {
    constexpr uint64_t bytes = 1 << 20;
    constexpr uint64_t slots = 16;
    constexpr uint64_t slot = bytes / slots;
    for (int round = 0; round < 10; ++round) {
        std::shared_ptr<Engine> engine = make_engine(backend);
        const std::shared_ptr<File> file = engine->open(make_file("close", bytes), true);
        std::vector<std::thread> threads;
        for (int i = 0; i < 4; ++i)
            threads.emplace_back([&] {
                Memory memory(bytes);
                std::vector<std::shared_ptr<Future>> futures;
                const auto end = [](const std::shared_ptr<Future>& future) {
                    wait(future);
                    CHECK(!future->failure() || future->failure()->error == ECANCELED);
                };
                while (!engine->closed()) {
                    const uint64_t begin = futures.size() % slots * slot;
                    if (futures.size() >= slots) end(futures[futures.size() - slots]);
                    futures.push_back(
                        start(*engine, Kind::read, file, {memory.data + begin, begin, slot}));
                }
                for (const auto& future : futures) end(future);
            });
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        std::thread other([&] { engine->close(); });
        engine->close();
        other.join();
        for (std::thread& thread : threads) thread.join();
    }
}

void test_failure(const std::string& backend) {
    const auto faults = std::make_shared<Faults>();
    const std::shared_ptr<Engine> engine = make_engine(backend, faults);
    const std::shared_ptr<File> file = engine->open(make_file("fail", 1 << 20), true);
    FaultRule rule;
    rule.kind = Kind::write;
    rule.nth = 3;
    rule.error = EIO;
    faults->add(rule);
    Memory memory(1 << 20);
    std::memset(memory.data, 7, 1 << 20);
    const auto failing = start(*engine, Kind::write, file, {memory.data, 0, 1 << 20});
    wait(failing);
    CHECK(failing->failure() && failing->failure()->error == EIO);
    CHECK(failing->failure()->offset == 2 * 16384);
    check(start(*engine, Kind::write, file, {memory.data, 0, 1 << 20}));
    const auto beyond = start(*engine, Kind::read, file, {memory.data, 1 << 20, 1});
    wait(beyond);
    CHECK(beyond->failure() && beyond->failure()->error == end_of_file);
}

// A request ends when its last block lands, whenever anybody looks.
void test_times(const std::string& backend) {
    const auto faults = std::make_shared<Faults>();
    const std::shared_ptr<Engine> engine = make_engine(backend, faults);
    const std::shared_ptr<File> file = engine->open(make_file("times", 1 << 16), true);
    FaultRule rule;
    rule.nth = 3;
    rule.action = FaultRule::Action::delay;
    rule.delay = std::chrono::milliseconds(20);
    faults->add(rule);
    Memory memory(1 << 16);
    const TimePoint before = Clock::now();
    const auto slow = start(*engine, Kind::read, file, {memory.data, 0, 1 << 16});
    check(slow);
    const TimePoint seen = Clock::now();
    CHECK(before <= slow->submitted() && slow->landed() <= seen);
    CHECK(slow->landed() - slow->submitted() >= rule.delay);
    const Future nothing(0);
    CHECK(nothing.submitted() == nothing.landed());
}

// A forked child may drop what it inherited, without a join, a hang or a wait for the parent's I/O.
void test_fork(const std::string& backend) {
    std::shared_ptr<Engine> engine = make_engine(backend);
    std::shared_ptr<File> file = engine->open(make_file("fork", 1 << 20), true);
    const pid_t child = fork();
    if (child == 0) {
        const bool told = engine->forked();
        engine->close();
        file.reset();
        engine.reset();
        _exit(told ? 0 : 1);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    Memory memory(4096);
    std::memset(memory.data, 1, 4096);
    check(start(*engine, Kind::write, file, {memory.data, 0, 4096}));
    CHECK(!engine->forked());
}

}  // namespace

int main() {
    std::string pattern = (std::filesystem::temp_directory_path() / "infinity-XXXXXX").string();
    CHECK(mkdtemp(pattern.data()) != nullptr);
    directory = pattern;
    for (const BackendReport& backend : probe(directory).backends) {
        std::printf("%s: %s%s\n", backend.name.c_str(), backend.ok ? "ok " : "",
                    backend.reason.c_str());
        if (!backend.ok) continue;
        test_threads(backend.name, nullptr);
        test_faulty_threads(backend.name);
        test_close(backend.name);
        test_failure(backend.name);
        test_times(backend.name);
        test_fork(backend.name);
    }
    std::filesystem::remove_all(directory);
}
