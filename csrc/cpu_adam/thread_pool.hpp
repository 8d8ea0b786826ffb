// Pinned threads that run jobs chunk by chunk. They know nothing of kernels or of Python.
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

// Work cut into chunks that may run in any order and on any thread. `touches` gives the bytes that
// the chunks read and write.
class Job {
  public:
    Job(size_t chunks, std::vector<ByteRange> touches)
        : chunks_(chunks), touches_(std::move(touches)) {}
    Job(const Job&) = delete;
    Job& operator=(const Job&) = delete;
    virtual ~Job() = default;

    virtual void run(size_t chunk) noexcept = 0;

    // Returns whether the job is done. A thread that has seen true also sees everything that the
    // job wrote.
    bool done() const { return done_.load(std::memory_order_acquire); }

    // When the job's first chunk began and its last chunk ended, in nanoseconds of the monotonic
    // clock. Valid once the job is done.
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
    int64_t began_ns_ = 0;            // written by the thread that takes the first chunk
    int64_t ended_ns_ = 0;            // written by the thread that ran the last chunk
    bool after_all_earlier_ = false;  // guarded by the pool's mutex, like the next member
    bool awaited_ = false;
};

class PoolState;

// A handle on a submitted job. Copies are cheap, and a ticket may outlive its pool.
class Ticket {
  public:
    Ticket(std::shared_ptr<PoolState> pool, std::shared_ptr<Job> job);
    bool done() const { return job_->done(); }
    // Waits for the job, and returns whether it is done. Meanwhile the caller works on the job and
    // on those before it, so the wait may take one chunk longer than `seconds` (negative: no
    // limit). Throws ConfigError in a forked child, where nobody will ever finish the job.
    bool wait(double seconds) const;

  private:
    std::shared_ptr<PoolState> pool_;
    std::shared_ptr<Job> job_;
};

// Jobs behave as if they ran one after the other, in the order of submission. A job starts while
// the last chunks of the job before it are still running only if the two share no written byte.
class ThreadPool {
  public:
    // Starts one thread per entry of `cpus`, pinned to that CPU if the system allows. -1 pins to no
    // CPU. team: the OpenMP threads that help a waiting thread with its jobs, if the team has as
    // many threads as the pool.
    explicit ThreadPool(const std::vector<int>& cpus, Team team = {});
    // Finishes the queued jobs. In a forked child, where the threads do not exist, does nothing.
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    // awaited: the caller is about to wait. Then no thread is woken for jobs that the caller does
    // by itself: small jobs, or any job if it has a team. Throws ConfigError if the pool is closed,
    // or belongs to the parent of this process.
    Ticket submit(std::shared_ptr<Job> job, bool awaited = false);
    // Finishes the queued jobs, then ends the threads. A second call does nothing.
    void close();
    bool closed() const;

  private:
    std::shared_ptr<PoolState> state_;
};

}  // namespace infinity::cpu_adam
