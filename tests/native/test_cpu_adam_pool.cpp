// The thread pool and the jobs: order, waiting, closing, forking, floating-point mode, bad
// requests.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "cpu_adam_compare.hpp"
#include "errors.hpp"
#include "jobs.hpp"

namespace infinity::cpu_adam {
namespace {

struct CountingJob : Job {
    CountingJob(size_t chunks, std::vector<ByteRange> touches, std::atomic<int>& counter)
        : Job(chunks, std::move(touches)), counter_(counter) {}
    void run(size_t) noexcept override { counter_.fetch_add(1); }
    std::atomic<int>& counter_;
};

// Reads and writes plain memory: wrong unless jobs over the same bytes run one after the other.
struct AddJob : Job {
    AddJob(std::vector<long>& cells, long factor, long term)
        : Job(cells.size(), {range(cells)}), cells_(cells), factor_(factor), term_(term) {}
    static ByteRange range(std::vector<long>& cells) {
        const uintptr_t at = reinterpret_cast<uintptr_t>(cells.data());
        return {at, at + cells.size() * sizeof(long), true};
    }
    void run(size_t chunk) noexcept override {
        // Not the own cell: a chunk depends on what the job before did everywhere.
        if (chunk == 0) {
            for (long& cell : cells_) cell = cell * factor_ + term_;
        }
    }
    std::vector<long>& cells_;
    long factor_, term_;
};

// Runs until it is released: no clock says that a job is still under way.
struct HeldJob : Job {
    HeldJob() : Job(1, {}) {}
    void run(size_t) noexcept override {
        begun_ = true;
        while (!released_) usleep(100);
    }
    // After this nobody who waits can take the job over.
    void await_begin() const {
        while (!begun_) usleep(100);
    }
    void release() { released_ = true; }
    std::atomic<bool> begun_{false};
    std::atomic<bool> released_{false};
};

// Each of its two chunks ends when the other has begun: not on one thread.
struct MeetingJob : Job {
    MeetingJob() : Job(2, {}) {}
    void run(size_t) noexcept override {
        begun_.fetch_add(1);
        for (int i = 0; i < 10000 && begun_.load() < 2; ++i) usleep(1000);
        if (begun_.load() < 2) lonely_ = true;
    }
    std::atomic<int> begun_{0};
    std::atomic<bool> lonely_{false};
};

std::vector<int> unpinned(size_t threads) { return std::vector<int>(threads, -1); }

void test_order() {
    std::vector<long> cells(64, 1);
    std::vector<long> others(64, 1);
    long expected = 1;
    ThreadPool pool(unpinned(4));
    std::optional<Ticket> last;
    for (int i = 0; i < 300; ++i) {
        pool.submit(std::make_shared<AddJob>(others, 1, 1));
        last = pool.submit(std::make_shared<AddJob>(cells, i % 3, i));
        expected = expected * (i % 3) + i;
    }
    CHECK(last->wait(-1));
    for (const long cell : cells) CHECK(cell == expected);
    pool.close();
    for (const long cell : others) CHECK(cell == 301);
}

void test_who_waits_works_too() {
    ThreadPool pool(unpinned(1));
    auto job = std::make_shared<MeetingJob>();
    CHECK(pool.submit(job).wait(-1));
    CHECK(!job->lonely_);
    // But not for longer than asked for, and a chunk.
    std::atomic<int> counter{0};
    const auto first = std::make_shared<HeldJob>();
    const auto last = std::make_shared<HeldJob>();
    pool.submit(first);
    first->await_begin();
    const Ticket later =
        pool.submit(std::make_shared<CountingJob>(1, std::vector<ByteRange>{}, counter));
    CHECK(!pool.submit(last).wait(0));
    first->release();
    CHECK(later.wait(60));
    last->release();
    CHECK(counter == 1);
}

// Says which thread ran it.
struct WhoJob : Job {
    explicit WhoJob(size_t chunks) : Job(chunks, {}), who(chunks) {}
    void run(size_t chunk) noexcept override { who[chunk] = std::this_thread::get_id(); }
    std::vector<std::thread::id> who;
};

void test_small_awaited_work_is_the_caller_s() {
    ThreadPool pool(unpinned(2));
    int others = 0;
    for (int i = 0; i < 300; ++i) {
        auto job = std::make_shared<WhoJob>(i % 3);
        const Ticket ticket = pool.submit(job, true);
        CHECK(ticket.wait(-1));
        for (const std::thread::id& each : job->who) others += each != std::this_thread::get_id();
        CHECK(job->began_ns() > 0 && job->began_ns() <= job->ended_ns());
    }
    CHECK(others < 30);  // of 300 chunks, by threads that were awake anyway: they have just begun
    // What nobody waits for after all is done by the next thread that comes, or at the end.
    std::atomic<int> counter{0};
    const auto count = [&] {
        return std::make_shared<CountingJob>(1, std::vector<ByteRange>{}, counter);
    };
    pool.submit(count(), true);
    CHECK(pool.submit(std::make_shared<MeetingJob>()).wait(-1));
    pool.submit(count(), true);
    pool.close();
    CHECK(counter == 2);
}

// An OpenMP runtime, as far as a pool knows one.
std::vector<std::thread::id> team_ids;
int team_threads = 0;

Team fake_team(int threads) {
    team_threads = threads;
    Team team;
    team.parallel = [](void (*work)(void*), void* data, unsigned, unsigned) {
        std::vector<std::thread> others;
        for (int i = 1; i < team_threads; ++i) {
            others.emplace_back(work, data);
            team_ids.push_back(others.back().get_id());
        }
        work(data);
        for (std::thread& other : others) other.join();
    };
    team.threads = [] { return team_threads; };
    return team;
}

void test_a_team_helps_who_waits() {
    ThreadPool pool(unpinned(2), fake_team(2));
    // The pool's threads have just begun, and sleep once they have met.
    CHECK(pool.submit(std::make_shared<MeetingJob>()).wait(-1));
    team_ids.clear();
    int strangers = 0;
    for (int i = 0; i < 100; ++i) {
        auto job = std::make_shared<WhoJob>(64);
        CHECK(pool.submit(job, true).wait(-1));
        for (const std::thread::id& each : job->who) {
            CHECK(each != std::thread::id());
            strangers += each != std::this_thread::get_id() &&
                         std::find(team_ids.begin(), team_ids.end(), each) == team_ids.end();
        }
    }
    CHECK(team_ids.size() == 100);
    CHECK(strangers < 640);  // of 6400 chunks
    auto meeting = std::make_shared<MeetingJob>();
    CHECK(pool.submit(meeting, true).wait(-1));
    CHECK(!meeting->lonely_);
    // What is not waited for is the pool's, and what nobody waits for after all is done at the end.
    std::atomic<int> counter{0};
    const auto count = [&](size_t chunks) {
        return std::make_shared<CountingJob>(chunks, std::vector<ByteRange>{}, counter);
    };
    const Ticket alone = pool.submit(count(64));
    while (!alone.done()) usleep(100);
    pool.submit(count(64), true);
    pool.close();
    CHECK(counter == 128);
}

void test_a_team_and_jobs_in_order() {
    std::vector<long> cells(64, 1);
    long expected = 1;
    ThreadPool pool(unpinned(3), fake_team(3));
    for (int i = 0; i < 60; ++i) {
        std::vector<Ticket> tickets;
        for (int j = 0; j < 3; ++j) {
            tickets.push_back(pool.submit(std::make_shared<AddJob>(cells, j, i), (i + j) % 2 == 0));
            expected = expected * j + i;
        }
        if (i % 3 == 0) std::swap(tickets.front(), tickets.back());
        for (const Ticket& ticket : tickets) CHECK(ticket.wait(-1));
    }
    for (const long cell : cells) CHECK(cell == expected);
    // One that somebody waits for, behind one that a thread of the pool has.
    const auto held = std::make_shared<HeldJob>();
    pool.submit(held);
    held->await_begin();
    const Ticket behind = pool.submit(std::make_shared<AddJob>(cells, 1, 1), true);
    std::thread releaser([&] {
        usleep(1000);
        held->release();
    });
    CHECK(behind.wait(-1));
    releaser.join();
}

void test_a_narrow_team_does_not_stand_in_for_the_pool() {
    ThreadPool pool(unpinned(2), fake_team(1));
    auto job = std::make_shared<WhoJob>(20000);
    team_ids.clear();
    CHECK(pool.submit(job, true).wait(-1));
    auto meeting = std::make_shared<MeetingJob>();
    CHECK(pool.submit(meeting).wait(-1));
    CHECK(!meeting->lonely_ && team_ids.empty());
}

void test_many_submitters_and_close_with_work_queued() {
    std::atomic<int> counter{0};
    const auto held = std::make_shared<HeldJob>();
    std::optional<Ticket> outlives;
    {
        ThreadPool pool(unpinned(3));
        std::vector<std::thread> submitters;
        for (int t = 0; t < 4; ++t) {
            submitters.emplace_back([&] {
                for (int i = 0; i < 100; ++i) {
                    const Ticket ticket = pool.submit(
                        std::make_shared<CountingJob>(5, std::vector<ByteRange>{}, counter));
                    if (i % 10 == 0) CHECK(ticket.wait(-1));
                }
            });
        }
        for (std::thread& thread : submitters) thread.join();
        outlives = pool.submit(held);
        held->await_begin();
        CHECK(!outlives->wait(0.0));
        CHECK(!outlives->wait(0.001));
        std::thread releaser([&] {
            while (!pool.closed()) usleep(100);
            held->release();
        });
        pool.close();
        releaser.join();
    }
    CHECK(counter == 4 * 100 * 5);
    CHECK(outlives->done() && outlives->wait(-1));
}

template <class F>
bool refused(F&& f) {
    try {
        f();
    } catch (const ConfigError& error) {
        CHECK(!error.cause.empty() && !error.cure.empty());
        return true;
    }
    return false;
}

void test_closed_and_empty() {
    std::atomic<int> counter{0};
    ThreadPool pool(unpinned(1));
    const auto empty = std::make_shared<CountingJob>(0, std::vector<ByteRange>{}, counter);
    CHECK(pool.submit(empty).wait(-1));
    pool.close();
    pool.close();
    CHECK(pool.closed());
    CHECK(refused([&] { pool.submit(empty); }));
}

void test_fork() {
    auto pool = std::make_unique<ThreadPool>(unpinned(2));
    const auto held = std::make_shared<HeldJob>();
    std::optional<Ticket> busy = pool->submit(held);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(10);  // a hang is a failure
        bool ok = refused([&] { pool->submit(std::make_shared<HeldJob>()); });
        ok = ok && refused([&] { busy->wait(-1); });
        pool->close();
        pool.reset();
        busy.reset();
        _exit(ok ? 0 : 1);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    held->release();
    CHECK(busy->wait(-1));
}

// With denormals flushed, 1e-40 would be 0.
void test_float_mode() {
#if defined(INFINITY_X86)
    const unsigned before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(before | 0x8040);
    ThreadPool pool(unpinned(1));
    __builtin_ia32_ldmxcsr(before);
#else
    ThreadPool pool(unpinned(1));
#endif
    for (const KernelTable* table : runnable_kernels()) {
        float p = 0;
        const float g = -1e-40F;
        UpdateRequest request{
            1, Dtype::kF32, ParameterFormat::kPlain, MomentFormat::kF32, {}, {{0, 1, 0}}, {}, 1.0};
        request.arrays.grad = &g;
        request.arrays.param = &p;
        request.hypers = {SgdHyper{1.0, 0.0, 0.0, 0.0, false, false, false}};
        CHECK(pool.submit(make_update_job(*table, request, kBlock)).wait(-1));
        CHECK(p == 1e-40F);
    }
}

// Chunks, segments and threads change nothing; every segment gets its own hyper-parameters.
void compare_jobs_with_calls(MomentFormat moments, const std::vector<Segment>& segments) {
    constexpr size_t kElements = 5 * kBlock + 321;
    const std::vector<Hyper> hypers{AdamHyper{true, 1e-2, 0.9, 0.999, 1e-8, 0.1, 3, false},
                                    AdamHyper{true, 1e-3, 0.8, 0.99, 1e-6, 0.0, 9, false}};
    Page expected(kElements, 11);
    expected.calm();
    const KernelTable& kernels = *runnable_kernels().front();
    for (const Segment& s : segments) {
        const Folded folded = fold(hypers[s.hyper], 0.5);
        const Range range{s.start, s.count, static_cast<uint32_t>(s.index), s.seed};
        kernels.update[0][0][4][static_cast<int>(moments)](
            expected.arrays(ParameterFormat::kSplit, moments, true), folded, range);
    }
    for (const size_t chunk : {kBlock, 2 * kBlock, 64 * kBlock}) {
        for (const size_t threads : {1U, 2U, 5U}) {
            Page page(kElements, 11);
            page.calm();
            ThreadPool pool(unpinned(threads));
            const UpdateRequest request{kElements,
                                        Dtype::kF32,
                                        ParameterFormat::kSplit,
                                        moments,
                                        page.arrays(ParameterFormat::kSplit, moments, true),
                                        segments,
                                        hypers,
                                        0.5};
            CHECK(pool.submit(make_update_job(kernels, request, chunk)).wait(-1));
            CHECK(same_bits(page, expected));
        }
    }
}

void test_jobs_match_one_kernel_call() {
    const std::vector<Segment> anywhere{{0, 2 * kBlock + 5, 0, 0, 1},
                                        {2 * kBlock + 8, 3, 1, 0, 2},
                                        {2 * kBlock + 20, 3 * kBlock + 301, 1, 5 * kBlock, 3}};
    const std::vector<Segment> on_blocks{{0, 2 * kBlock + 5, 0, 0, 1},
                                         {2 * kBlock + 64, 3, 1, 0, 2},
                                         {2 * kBlock + 128, 3 * kBlock + 193, 1, 5 * kBlock, 3}};
    compare_jobs_with_calls(MomentFormat::kF32, anywhere);
    compare_jobs_with_calls(MomentFormat::kBf16, anywhere);
    compare_jobs_with_calls(MomentFormat::kInt8, on_blocks);
}

void test_bad_requests() {
    Page page(100, 1);
    const Page before = page;
    UpdateRequest good{100,
                       Dtype::kF32,
                       ParameterFormat::kPlainBf16,
                       MomentFormat::kInt8,
                       page.arrays(ParameterFormat::kPlainBf16, MomentFormat::kInt8, false),
                       {{0, 100, 0}},
                       {AdamHyper{true, 1e-2, 0.9, 0.999, 1e-8, 0.1, 3, false}},
                       1.0};
    const auto bad = [&](auto&& change) {
        UpdateRequest request = good;
        change(request);
        return refused([&] { make_update_job(kScalarKernels, request, kBlock); });
    };
    CHECK(!bad([](UpdateRequest&) {}));
    CHECK(bad([](UpdateRequest& r) { r.arrays.grad = nullptr; }));
    CHECK(bad([](UpdateRequest& r) { r.arrays.copy = nullptr; }));
    CHECK(bad([](UpdateRequest& r) { r.arrays.second_moment = nullptr; }));
    CHECK(bad([](UpdateRequest& r) { r.arrays.copy = static_cast<float*>(r.arrays.param) + 99; }));
    CHECK(bad([](UpdateRequest& r) { r.arrays.first_scale = nullptr; }));
    CHECK(bad([](UpdateRequest& r) { r.arrays.second_scale = r.arrays.first_scale + 1; }));
    CHECK(!bad([](UpdateRequest& r) {
        r.moments = MomentFormat::kBf16;
        r.arrays.first_moment = r.arrays.param;
        r.arrays.param = r.arrays.copy;
        r.arrays.copy = nullptr;
        r.format = ParameterFormat::kPlain;
        r.arrays.second_moment = static_cast<uint16_t*>(r.arrays.first_moment) + 100;
        r.arrays.first_scale = nullptr;
    }));
    CHECK(bad([](UpdateRequest& r) { r.segments = {{1, 99, 0}}; }));
    CHECK(bad([](UpdateRequest& r) { r.segments[0].index = 63; }));
    CHECK(!bad([](UpdateRequest& r) { r.segments = {{64, 36, 0, 128}}; }));
    CHECK(bad([](UpdateRequest& r) { r.segments[0].count = 101; }));
    CHECK(bad([](UpdateRequest& r) { r.segments[0].start = SIZE_MAX; }));
    CHECK(bad([](UpdateRequest& r) { r.segments.push_back({50, 1, 0}); }));
    CHECK(bad([](UpdateRequest& r) { r.segments[0].hyper = 1; }));
    CHECK(bad([](UpdateRequest& r) { r.elements = SIZE_MAX / 2; }));
    CHECK(bad([](UpdateRequest& r) { std::get<AdamHyper>(r.hypers[0]).beta1 = 1.0; }));
    CHECK(bad([](UpdateRequest& r) { std::get<AdamHyper>(r.hypers[0]).step = 0; }));
    CHECK(bad(
        [](UpdateRequest& r) { r.hypers[0] = SgdHyper{0.1, 0.0, 0.0, 0.0, true, false, false}; }));
    CHECK(refused([&] { make_update_job(kScalarKernels, good, kBlock - 1); }));
    CHECK(refused([&] { make_update_job(kScalarKernels, good, 0); }));
    CHECK(refused([&] { select_kernels("pentium"); }));
    CHECK(same_bits(page, before));
}

}  // namespace
}  // namespace infinity::cpu_adam

int main() {
    using namespace infinity::cpu_adam;
    test_order();
    test_who_waits_works_too();
    test_small_awaited_work_is_the_caller_s();
    test_a_team_helps_who_waits();
    test_a_team_and_jobs_in_order();
    test_a_narrow_team_does_not_stand_in_for_the_pool();
    test_many_submitters_and_close_with_work_queued();
    test_closed_and_empty();
    test_fork();
    test_float_mode();
    test_jobs_match_one_kernel_call();
    test_bad_requests();
    return 0;
}
