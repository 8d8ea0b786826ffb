// Pinned threads that run jobs chunk by chunk. They know nothing of kernels, devices or Python.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "job_hooks.hpp"
#include "openmp_team.hpp"

namespace infinity::cpu_adam {

struct ByteRange {
    uintptr_t begin;
    uintptr_t end;
    bool written;
};

// How a job is submitted.
struct Submission {
    // The caller is about to wait. Then no thread is woken for jobs that the caller does by itself:
    // small jobs, or any job if it has a team.
    bool awaited = false;
    // Jobs with a larger number begin first, and those with equal numbers in their order.
    int64_t priority = 0;
    // What the job waits for, and what it starts at its end; null: nothing.
    std::shared_ptr<JobHooks> hooks = nullptr;
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
    // The bytes that unfinished jobs use, by their first address.
    struct Access {
        uintptr_t end;
        bool written;
        Job* job;
    };
    using Accesses = std::multimap<uintptr_t, Access>;
    // Jobs with a larger priority first, then those submitted first.
    using Place = std::pair<int64_t, uint64_t>;

    bool has_chunks() const { return next_.load(std::memory_order_relaxed) < chunks_; }

    const size_t chunks_;
    const std::vector<ByteRange> touches_;
    std::atomic<size_t> next_{0};
    std::atomic<size_t> finished_{0};
    std::atomic<bool> done_{false};
    int64_t began_ns_ = 0;  // written by the thread that takes the first chunk
    int64_t ended_ns_ = 0;  // written by the thread that ran the last chunk
    // Guarded by the pool's mutex:
    Submission given_;
    Place place_;
    bool coming_ = false;        // what it waits for has not happened yet
    bool refused_ = false;       // what it waits for will never happen, so that it does not run
    size_t blockers_ = 0;        // unfinished earlier jobs that use the same bytes
    std::vector<Job*> blocked_;  // later jobs of which this is a blocker
    std::vector<Accesses::iterator> accesses_;
};

class PoolState;

// A handle on a submitted job. Copies are cheap, and a ticket may outlive its pool.
class Ticket {
  public:
    Ticket(std::shared_ptr<PoolState> pool, std::shared_ptr<Job> job);
    bool done() const { return job_->done(); }
    // Waits for the job, which goes before all others now, and returns whether it is done.
    // Meanwhile the caller works on the job, or on others while it cannot begin, so the wait may
    // take one chunk longer than `seconds` (negative: no limit). Throws ConfigError in a forked
    // child, where nobody will ever finish the job.
    bool wait(double seconds) const;

  private:
    std::shared_ptr<PoolState> pool_;
    std::shared_ptr<Job> job_;
};

// Jobs that share a written byte run one after the other, in the order of submission. All others
// may run in any order, and beside each other. What jobs wait for (their hooks) should happen in
// the order of submission, because the threads ask for the first such job only.
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

    // Throws ConfigError if the pool is closed, or belongs to the parent of this process.
    Ticket submit(std::shared_ptr<Job> job, Submission how = {});
    // Finishes the queued jobs, then ends the threads. A second call does nothing.
    void close();
    bool closed() const;

  private:
    std::shared_ptr<PoolState> state_;
};

}  // namespace infinity::cpu_adam
