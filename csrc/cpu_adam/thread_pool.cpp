#include "thread_pool.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "errors.hpp"
#include "float_mode.hpp"

namespace infinity::cpu_adam {
namespace {

using Clock = std::chrono::steady_clock;

// In seconds. Longer waits could overflow the clock.
constexpr double kLongestWait = 1e6;

// The number of chunks from which on threads are woken to help a waiting thread. A system call that
// wakes a thread takes as long as a few chunks, and longer where it has to interrupt another
// virtual CPU.
constexpr size_t kWorthWaking = 8;

int64_t now_ns() {
    using std::chrono::nanoseconds;
    return std::chrono::duration_cast<nanoseconds>(Clock::now().time_since_epoch()).count();
}

void pin_to(int cpu) {
    if (cpu < 0 || cpu >= CPU_SETSIZE) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    // A refusal (the cgroup's CPUs may have changed) costs locality, not correctness.
    pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
}

// Blocks all signals in this thread until the end of the scope, and in threads that it starts
// meanwhile. Signals are for the trainer: a handler that ran in the pool's threads could not reach
// it.
class SignalsBlocked {
  public:
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;

  private:
    sigset_t before_;
};

ConfigError forked_error() {
    return {
        "This update pool belongs to the process that this one was forked from; its threads do "
        "not exist here.",
        "Make a pool of your own after the fork, or start processes with the spawn method."};
}

}  // namespace

bool Job::conflicts_with(const Job& other) const {
    for (const ByteRange& a : touches_) {
        for (const ByteRange& b : other.touches_) {
            if ((a.written || b.written) && a.begin < b.end && b.begin < a.end) return true;
        }
    }
    return false;
}

// [Note: fork] A forked child has one thread, and a copy of this state whose mutex may be locked
// for ever and whose condition variables may have waiters for ever. So nothing here is locked,
// joined or destroyed in a child. Every entry checks the process first, and the last owner in a
// child lets the state leak.
class PoolState {
  public:
    PoolState(const std::vector<int>& cpus, Team team) : team_(team), width_(cpus.size()) {
        const SignalsBlocked blocked;
        try {
            for (const int cpu : cpus) threads_.emplace_back([this, cpu] { work(cpu); });
        } catch (const std::system_error& error) {
            close();
            throw ConfigError(
                "The system refused an update thread: " + std::string(error.what()) + ".",
                "Raise the limit of processes (ulimit -u, pids cgroup) or of address space (ulimit "
                "-v), or lower threads.");
        }
    }

    bool forked() const { return getpid() != process_; }

    void submit(const std::shared_ptr<Job>& job, bool awaited) {
        if (forked()) throw forked_error();
        const std::lock_guard lock(mutex_);
        if (closing_) {
            throw ConfigError("This update pool is closed.",
                              "Submit before close(), or make a new pool.");
        }
        if (job->chunks_ == 0) {
            job->began_ns_ = job->ended_ns_ = now_ns();
            job->done_.store(true, std::memory_order_release);
            return;
        }
        job->after_all_earlier_ =
            std::any_of(unfinished_.begin(), unfinished_.end(),
                        [&](const auto& earlier) { return job->conflicts_with(*earlier); });
        job->awaited_ = awaited;
        unfinished_.push_back(job);
        if (awaited && (job->chunks_ < kWorthWaking || team_is_wide())) return;
        if (job->chunks_ == 1) {
            work_.notify_one();
        } else {
            work_.notify_all();
        }
    }

    bool wait(const Job& job, double seconds) {
        if (job.done()) return true;
        if (forked()) throw forked_error();
        std::unique_lock lock(mutex_);
        const auto done = [&] { return job.done(); };
        if (seconds < 0) {
            help(job, lock, Clock::time_point::max());
            finished_.wait(lock, done);
            return true;
        }
        const auto longest = std::chrono::duration_cast<Clock::duration>(
            std::chrono::duration<double>(std::min(seconds, kLongestWait)));
        const Clock::time_point end = Clock::now() + longest;
        help(job, lock, end);
        return finished_.wait_until(lock, end, done);
    }

    void close() {
        if (forked()) return;
        std::vector<std::thread> ending;
        {
            const std::lock_guard lock(mutex_);
            closing_ = true;
            ending.swap(threads_);
            work_.notify_all();
        }
        for (std::thread& thread : ending) thread.join();
    }

    bool closed() const {
        if (forked()) return true;
        const std::lock_guard lock(mutex_);
        return closing_;
    }

  private:
    void work(int cpu) {
        pthread_setname_np(pthread_self(), "infinity-update");
        pin_to(cpu);
        const DefaultFloatMode float_mode;
        std::unique_lock lock(mutex_);
        for (;;) {
            std::shared_ptr<Job> job = startable();
            if (job == nullptr) {
                if (closing_ && unfinished_.empty()) return;
                work_.wait(lock);
                continue;
            }
            lock.unlock();
            run_chunks(*job, Clock::time_point::max());
            lock.lock();
        }
    }

    // A thread that waits for a job works on the job, and on earlier jobs that must be done before.
    // Waking threads takes longer than a small job, and the CPU of a waiting thread is free. So are
    // the CPUs of its OpenMP team.
    void help(const Job& wanted, std::unique_lock<std::mutex>& lock, Clock::time_point end) {
        const DefaultFloatMode float_mode;
        while (wanted.has_chunks() && Clock::now() < end) {
            const std::shared_ptr<Job> job = startable();
            if (job == nullptr) return;
            lock.unlock();
            if (job->chunks_ > 1 && team_is_wide()) {
                Helping helping{*this, *job, end};
                team_.parallel(&Helping::work, &helping, 0, 0);
            } else {
                run_chunks(*job, end);
            }
            lock.lock();
        }
    }

    // The argument of every thread of a team.
    struct Helping {
        PoolState& pool;
        Job& job;
        Clock::time_point end;

        static void work(void* data) {
            const auto& self = *static_cast<Helping*>(data);
            const DefaultFloatMode float_mode;
            self.pool.run_chunks(self.job, self.end);
        }
    };

    // A team with fewer threads would be slower than the pool: torchrun gives a process one OpenMP
    // thread.
    bool team_is_wide() const {
        return team_ && static_cast<size_t>(std::max(team_.threads(), 0)) >= width_;
    }

    // The first job that has chunks left and need not wait for an earlier job.
    std::shared_ptr<Job> startable() const {
        for (const std::shared_ptr<Job>& job : unfinished_) {
            if (job->after_all_earlier_ && job != unfinished_.front()) continue;
            if (job->has_chunks()) return job;
        }
        return nullptr;
    }

    // Runs chunks, without the lock. No chunk begins after `end`. The thread that has run the last
    // chunk finishes the job.
    void run_chunks(Job& job, Clock::time_point end) {
        size_t ran = 0;
        do {
            const size_t chunk = job.next_.fetch_add(1, std::memory_order_relaxed);
            if (chunk >= job.chunks_) break;
            if (chunk == 0) job.began_ns_ = now_ns();
            job.run(chunk);
            ++ran;
        } while (Clock::now() < end);
        if (ran > 0 &&
            job.finished_.fetch_add(ran, std::memory_order_acq_rel) + ran == job.chunks_) {
            const std::lock_guard lock(mutex_);
            finish(job);
        }
    }

    void finish(Job& job) {
        job.ended_ns_ = now_ns();
        job.done_.store(true, std::memory_order_release);
        unfinished_.erase(
            std::find_if(unfinished_.begin(), unfinished_.end(),
                         [&](const std::shared_ptr<Job>& each) { return each.get() == &job; }));
        finished_.notify_all();
        // Threads are woken for close(), for jobs that no thread is about to wait for, and for jobs
        // that this job may have blocked: a thread that waits for one of these sleeps already.
        const auto left = [](const auto& each) {
            return each->has_chunks() && (!each->awaited_ || each->after_all_earlier_);
        };
        if (closing_ || std::any_of(unfinished_.begin(), unfinished_.end(), left)) {
            work_.notify_all();
        }
    }

    const pid_t process_ = getpid();
    const Team team_;
    const size_t width_;
    mutable std::mutex mutex_;
    std::condition_variable work_;
    std::condition_variable finished_;
    std::deque<std::shared_ptr<Job>> unfinished_;
    bool closing_ = false;
    std::vector<std::thread> threads_;
};

Ticket::Ticket(std::shared_ptr<PoolState> pool, std::shared_ptr<Job> job)
    : pool_(std::move(pool)), job_(std::move(job)) {}

bool Ticket::wait(double seconds) const { return pool_->wait(*job_, seconds); }

ThreadPool::ThreadPool(const std::vector<int>& cpus, Team team)
    : state_(new PoolState(cpus, team), [](PoolState* state) {
          if (!state->forked()) delete state;
      }) {}

ThreadPool::~ThreadPool() { close(); }

Ticket ThreadPool::submit(std::shared_ptr<Job> job, bool awaited) {
    state_->submit(job, awaited);
    return {state_, std::move(job)};
}

void ThreadPool::close() { state_->close(); }

bool ThreadPool::closed() const { return state_->closed(); }

}  // namespace infinity::cpu_adam
