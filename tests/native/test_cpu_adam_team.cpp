// A pool whose callers have a team of threads: what the team does, and what it leaves to the pool.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "pool_jobs.hpp"
#include "thread_pool.hpp"

namespace infinity::cpu_adam {
namespace {

// As much of an OpenMP runtime as a pool uses.
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
        CHECK(pool.submit(job, {.awaited = true}).wait(-1));
        for (const std::thread::id& each : job->who) {
            CHECK(each != std::thread::id());
            strangers += each != std::this_thread::get_id() &&
                         std::find(team_ids.begin(), team_ids.end(), each) == team_ids.end();
        }
    }
    CHECK(team_ids.size() == 100);
    CHECK(strangers < 640);  // of 6400 chunks
    auto meeting = std::make_shared<MeetingJob>();
    CHECK(pool.submit(meeting, {.awaited = true}).wait(-1));
    CHECK(!meeting->lonely_);
    // The pool does jobs that are not to be waited for. Jobs that nobody waits for in spite of that
    // are done at the end.
    std::atomic<int> counter{0};
    const auto count = [&](size_t chunks) {
        return std::make_shared<CountingJob>(chunks, std::vector<ByteRange>{}, counter);
    };
    const Ticket alone = pool.submit(count(64));
    while (!alone.done()) usleep(100);
    pool.submit(count(64), {.awaited = true});
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
            tickets.push_back(
                pool.submit(std::make_shared<AddJob>(cells, j, i), {.awaited = (i + j) % 2 == 0}));
            expected = expected * j + i;
        }
        if (i % 3 == 0) std::swap(tickets.front(), tickets.back());
        for (const Ticket& ticket : tickets) CHECK(ticket.wait(-1));
    }
    for (const long cell : cells) CHECK(cell == expected);
    // A job that is waited for, behind a job that a thread of the pool runs.
    const auto held = std::make_shared<HeldJob>();
    pool.submit(held);
    held->await_begin();
    const Ticket behind = pool.submit(std::make_shared<AddJob>(cells, 1, 1), {.awaited = true});
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
    CHECK(pool.submit(job, {.awaited = true}).wait(-1));
    auto meeting = std::make_shared<MeetingJob>();
    CHECK(pool.submit(meeting).wait(-1));
    CHECK(!meeting->lonely_ && team_ids.empty());
}

}  // namespace
}  // namespace infinity::cpu_adam

int main() {
    using namespace infinity::cpu_adam;
    test_a_team_helps_who_waits();
    test_a_team_and_jobs_in_order();
    test_a_narrow_team_does_not_stand_in_for_the_pool();
}
