// The thread pool and the jobs: order, waiting, closing, forking, floating-point mode, bad
// requests.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

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
#include "pool_jobs.hpp"

namespace infinity::cpu_adam {
namespace {

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
    // But the caller works no longer than it would wait, apart from one chunk.
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

void test_small_awaited_work_is_the_caller_s() {
    ThreadPool pool(unpinned(2));
    int others = 0;
    for (int i = 0; i < 300; ++i) {
        auto job = std::make_shared<WhoJob>(i % 3);
        const Ticket ticket = pool.submit(job, {.awaited = true});
        CHECK(ticket.wait(-1));
        for (const std::thread::id& each : job->who) others += each != std::this_thread::get_id();
        CHECK(job->began_ns() > 0 && job->began_ns() <= job->ended_ns());
    }
    CHECK(others < 30);  // of 300 chunks, by threads that were awake anyway: they have just begun
    // Work that nobody waits for after all is done by the next thread that comes, or at the end.
    std::atomic<int> counter{0};
    const auto count = [&] {
        return std::make_shared<CountingJob>(1, std::vector<ByteRange>{}, counter);
    };
    pool.submit(count(), {.awaited = true});
    CHECK(pool.submit(std::make_shared<MeetingJob>()).wait(-1));
    pool.submit(count(), {.awaited = true});
    pool.close();
    CHECK(counter == 2);
}

void test_jobs_wait_for_what_their_hooks_say() {
    std::vector<long> cells(4, 1);
    std::atomic<int> counter{0};
    ThreadPool pool(unpinned(2));
    std::vector<std::shared_ptr<TestHooks>> hooks;
    std::vector<Ticket> tickets;
    for (int i = 0; i < 3; ++i) {
        hooks.push_back(std::make_shared<TestHooks>());
        tickets.push_back(
            pool.submit(std::make_shared<AddJob>(cells, 2, i), {.hooks = hooks.back()}));
    }
    // A later job over the same bytes waits, too, and another job does not.
    const Ticket behind = pool.submit(std::make_shared<AddJob>(cells, 3, 0));
    const auto count = std::make_shared<CountingJob>(5, std::vector<ByteRange>{}, counter);
    CHECK(pool.submit(count).wait(-1));
    while (hooks[0]->asked_ < 3) usleep(100);
    CHECK(!tickets[0].done() && !behind.wait(0.001));
    CHECK(hooks[0]->ended_ == 0 && hooks[1]->asked_ == 0);
    hooks[1]->state_ = JobHooks::State::failed;  // that job must not run
    hooks[2]->state_ = JobHooks::State::happened;
    hooks[0]->state_ = JobHooks::State::happened;
    CHECK(behind.wait(-1));
    for (const Ticket& each : tickets) CHECK(each.done() && each.wait(0));
    for (const long cell : cells) CHECK(cell == ((1 * 2 + 0) * 2 + 2) * 3);
    CHECK(hooks[0]->ended_ == 1 && hooks[1]->ended_ == 0 && hooks[2]->ended_ == 1);
    // close() waits for jobs whose hooks have not let them begin.
    const auto last = std::make_shared<TestHooks>();
    const Ticket ticket =
        pool.submit(std::make_shared<AddJob>(cells, 0, 7), {.awaited = true, .hooks = last});
    std::thread later([&] {
        while (!pool.closed()) usleep(100);
        last->state_ = JobHooks::State::happened;
    });
    pool.close();
    later.join();
    CHECK(ticket.done() && cells[0] == 7 && last->ended_ == 1);
    CHECK(hooks[0].use_count() == 1);
}

// Notes the order in which jobs run.
struct ListedJob : Job {
    ListedJob(int number, std::vector<int>& list) : Job(1, {}), number_(number), list_(list) {}
    void run(size_t) noexcept override { list_.push_back(number_); }
    int number_;
    std::vector<int>& list_;
};

void test_priorities() {
    std::vector<int> list;
    ThreadPool pool(unpinned(1));
    const auto held = std::make_shared<HeldJob>();
    pool.submit(held);
    held->await_begin();
    const int64_t priorities[] = {0, 1, 1, 2, 0};
    for (int i = 0; i < 5; ++i)
        pool.submit(std::make_shared<ListedJob>(i, list), {.priority = priorities[i]});
    const auto hooks = std::make_shared<TestHooks>();
    pool.submit(std::make_shared<ListedJob>(5, list), {.priority = 3, .hooks = hooks});
    const Ticket wanted = pool.submit(std::make_shared<ListedJob>(6, list));
    CHECK(!wanted.wait(0));  // from now on it is before all others
    hooks->state_ = JobHooks::State::happened;
    held->release();
    pool.close();
    CHECK((list == std::vector<int>{6, 5, 3, 1, 2, 0, 4}));
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
        const UpdateArrays arrays = expected.arrays(ParameterFormat::kSplit, moments, true);
        kernels.update[0][0][4][static_cast<int>(moments)](arrays, arrays, folded, range);
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
    test_jobs_wait_for_what_their_hooks_say();
    test_priorities();
    test_many_submitters_and_close_with_work_queued();
    test_closed_and_empty();
    test_fork();
    test_float_mode();
    test_jobs_match_one_kernel_call();
    test_bad_requests();
    return 0;
}
