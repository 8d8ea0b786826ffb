// Jobs whose order, threads and ends tests of the pool can see.
#pragma once

#include <unistd.h>

#include <atomic>
#include <thread>
#include <utility>
#include <vector>

#include "thread_pool.hpp"

namespace infinity::cpu_adam {

struct CountingJob : Job {
    CountingJob(size_t chunks, std::vector<ByteRange> touches, std::atomic<int>& counter)
        : Job(chunks, std::move(touches)), counter_(counter) {}
    void run(size_t) noexcept override { counter_.fetch_add(1); }
    std::atomic<int>& counter_;
};

// Reads and writes plain memory. The result is wrong unless jobs over the same bytes run in turn.
struct AddJob : Job {
    AddJob(std::vector<long>& cells, long factor, long term)
        : Job(cells.size(), {range(cells)}), cells_(cells), factor_(factor), term_(term) {}
    static ByteRange range(std::vector<long>& cells) {
        const uintptr_t at = reinterpret_cast<uintptr_t>(cells.data());
        return {at, at + cells.size() * sizeof(long), true};
    }
    void run(size_t chunk) noexcept override {
        // One chunk changes all cells, so that it depends on all that the job before has done.
        if (chunk == 0) {
            for (long& cell : cells_) cell = cell * factor_ + term_;
        }
    }
    std::vector<long>& cells_;
    long factor_, term_;
};

// Answers what a test has set, and records the threads' calls.
struct TestHooks : JobHooks {
    State before() noexcept override {
        asked_.fetch_add(1);
        return state_.load();
    }
    void after() noexcept override { ended_.fetch_add(1); }
    std::atomic<State> state_{State::pending};
    std::atomic<int> asked_{0};
    std::atomic<int> ended_{0};
};

// Runs until it is released: no clock says that a job is still under way.
struct HeldJob : Job {
    HeldJob() : Job(1, {}) {}
    void run(size_t) noexcept override {
        begun_ = true;
        while (!released_) usleep(100);
    }
    // When this returns, a thread runs the job, so that no thread that waits can take it over.
    void await_begin() const {
        while (!begun_) usleep(100);
    }
    void release() { released_ = true; }
    std::atomic<bool> begun_{false};
    std::atomic<bool> released_{false};
};

// Each of the two chunks ends when the other has begun, so that one thread alone cannot run both.
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

inline std::vector<int> unpinned(size_t threads) { return std::vector<int>(threads, -1); }

// Records which thread ran each chunk.
struct WhoJob : Job {
    explicit WhoJob(size_t chunks) : Job(chunks, {}), who(chunks) {}
    void run(size_t chunk) noexcept override { who[chunk] = std::this_thread::get_id(); }
    std::vector<std::thread::id> who;
};

}  // namespace infinity::cpu_adam
