// Pinned threads that run jobs chunk by chunk. Knows nothing of kernels, and never of Python.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "openmp_team.hpp"

namespace infinity::cpu_adam {

struct ByteRange {
    uintptr_t begin;
    uintptr_t end;
    bool written;
};

// Work cut into chunks that may run in any order and on any thread. `touches` names the bytes that
// the chunks read and write.
class Job {
  public:
    Job(size_t chunks, std::vector<ByteRange> touches)
        : chunks_(chunks), touches_(std::move(touches)) {}
    Job(const Job&) = delete;
    Job& operator=(const Job&) = delete;
    virtual ~Job() = default;

    virtual void run(size_t chunk) noexcept = 0;

    // Everything that the job wrote is visible to a thread that has seen true.
    bool done() const { return done_.load(std::memory_order_acquire); }

    // Of the monotonic clock, once the job is done: when its first chunk began and its last ended.
    int64_t began_ns() const { return began_ns_; }
    int64_t ended_ns() const { return ended_ns_; }

  private:
    friend class PoolState;
    bool conflicts_with(const Job& other) const;
    bool has_chunks() const { return next_.load(std::memory_order_relaxed) < chunks_; }

    const size_t chunks_;
    const std::vector<ByteRange> touches_;
    std::atomic<size_t> next_{0};
    std::atomic<size_t> finished_{0};
    std::atomic<bool> done_{false};
    int64_t began_ns_ = 0;  // written by who takes the first chunk, and
    int64_t ended_ns_ = 0;  // by who has run the last one; read by those who have seen done_
    bool after_all_earlier_ = false;  // guarded by the pool's mutex, as the next one
    bool awaited_ = false;
};

class PoolState;

// A job on its way. Copies are cheap; it may outlive its pool.
class Ticket {
  public:
    Ticket(std::shared_ptr<PoolState> pool, std::shared_ptr<Job> job);
    bool done() const { return job_->done(); }
    // True once the job is done; false after that many seconds (negative: no limit) and what a
    // chunk takes: the caller works on the job meanwhile, and on those before it.
    // Throws ConfigError in a forked child, where nobody will ever finish the job.
    bool wait(double seconds) const;

  private:
    std::shared_ptr<PoolState> pool_;
    std::shared_ptr<Job> job_;
};

// Jobs behave as if they ran one after the other in the order of submission: the next one starts
// while the last chunks of the one before are still running only where they share no written byte.
class ThreadPool {
  public:
    // One thread per entry, pinned to that CPU if the system allows; -1 pins to none. team: of
    // those who wait, who then work on their jobs with it, where it has as many threads.
    explicit ThreadPool(const std::vector<int>& cpus, Team team = {});
    // Finishes what is queued. In a forked child, where the threads do not exist, does nothing.
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    // awaited: the caller is about to wait. No thread is woken for what he does by himself: a small
    // job, or any with his team. Throws ConfigError if the pool is closed, or belongs to the parent
    // of this process.
    Ticket submit(std::shared_ptr<Job> job, bool awaited = false);
    // Finishes what is queued, then ends the threads. Harmless when repeated.
    void close();
    bool closed() const;

  private:
    std::shared_ptr<PoolState> state_;
};

}  // namespace infinity::cpu_adam
