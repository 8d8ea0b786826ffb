#include "thread_pool.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>
#include <unordered_map>
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

// The pauses between two questions whether a job may begin, while no other job is there.
constexpr std::chrono::microseconds kFirstPause{5};
constexpr std::chrono::microseconds kLongestPause{200};

constexpr int64_t kBeforeAll = std::numeric_limits<int64_t>::max();

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

    void submit(const std::shared_ptr<Job>& job, Submission how) {
        if (forked()) throw forked_error();
        const std::lock_guard lock(mutex_);
        if (closing_) {
            throw ConfigError("This update pool is closed.",
                              "Submit before close(), or make a new pool.");
        }
        job->place_ = {-how.priority, submitted_++};
        job->coming_ = how.hooks != nullptr;
        job->given_ = std::move(how);
        unfinished_.emplace(job.get(), job);
        if (job->chunks_ > 0) block(*job);
        if (job->coming_) {
            coming_.push_back(job.get());
        } else if (job->blockers_ == 0) {
            let_begin(*job);
        }
        const bool alone = job->chunks_ < kWorthWaking || team_is_wide();
        if (job->given_.awaited && alone && !job->coming_) return;
        if (job->chunks_ == 1) {
            work_.notify_one();
        } else {
            work_.notify_all();
        }
    }

    bool wait(Job& job, double seconds) {
        if (job.done()) return true;
        if (forked()) throw forked_error();
        std::unique_lock lock(mutex_);
        const auto done = [&] { return job.done(); };
        prefer(job);
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
            ask(lock);
            const std::shared_ptr<Job> job = startable();
            if (job == nullptr) {
                if (closing_ && unfinished_.empty()) return;
                rest(lock);
                continue;
            }
            if (!coming_.empty() && !resting_) work_.notify_one();  // another thread has to ask
            lock.unlock();
            run_chunks(*job, Clock::time_point::max());
            lock.lock();
        }
    }

    // Asks, without the lock, whether the first jobs that wait for something may begin now. One
    // thread asks at a time.
    void ask(std::unique_lock<std::mutex>& lock) {
        while (!asking_ && !coming_.empty()) {
            asking_ = true;
            const std::shared_ptr<JobHooks> hooks = coming_.front()->given_.hooks;
            lock.unlock();
            const JobHooks::State state = hooks->before();
            lock.lock();
            asking_ = false;
            if (state == JobHooks::State::pending) return;
            pause_ = kFirstPause;
            Job& job = *coming_.front();
            coming_.pop_front();
            job.coming_ = false;
            job.refused_ = state == JobHooks::State::failed;
            if (job.blockers_ == 0) let_begin(job);
            work_.notify_all();  // for other chunks, and to go on asking
        }
    }

    // Called once a job waits for nothing any more.
    void let_begin(Job& job) {
        if (!job.refused_ && job.chunks_ > 0) {
            startable_.emplace(job.place_, &job);
            return;
        }
        job.next_ = job.chunks_;
        job.began_ns_ = now_ns();
        if (!job.refused_ && job.given_.hooks != nullptr) job.given_.hooks->after();
        finish(job);
    }

    // Sleeps while no job can start. One thread wakes from time to time, to ask.
    void rest(std::unique_lock<std::mutex>& lock) {
        if (coming_.empty() || resting_) {
            work_.wait(lock);
            return;
        }
        resting_ = true;
        work_.wait_for(lock, pause_);
        resting_ = false;
        pause_ = std::min(2 * pause_, kLongestPause);
    }

    // A thread that waits for a job works on the job, and on others while it cannot begin.
    // Waking threads takes longer than a small job, and the CPU of a waiting thread is free. So are
    // the CPUs of its OpenMP team.
    void help(const Job& wanted, std::unique_lock<std::mutex>& lock, Clock::time_point end) {
        const DefaultFloatMode float_mode;
        while (wanted.has_chunks() && Clock::now() < end) {
            ask(lock);
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

    // The first job that has chunks left and waits for nothing.
    std::shared_ptr<Job> startable() {
        while (!startable_.empty()) {
            Job* const first = startable_.begin()->second;
            if (first->has_chunks()) return unfinished_.at(first);
            startable_.erase(startable_.begin());
        }
        return nullptr;
    }

    // Has a job go before all others.
    void prefer(Job& job) {
        if (job.place_.first == -kBeforeAll) return;
        const bool was_startable = startable_.erase(job.place_) > 0;
        job.place_.first = -kBeforeAll;
        if (was_startable) startable_.emplace(job.place_, &job);
    }

    // Notes the bytes that a job uses, and the earlier jobs for whose end it waits because of them.
    void block(Job& job) {
        std::vector<Job*> blockers;
        for (const ByteRange& mine : job.touches_) {
            const uintptr_t first = mine.begin - std::min<uintptr_t>(mine.begin, longest_);
            for (auto at = accesses_.lower_bound(first);
                 at != accesses_.end() && at->first < mine.end; ++at) {
                const Job::Access& other = at->second;
                if ((mine.written || other.written) && other.end > mine.begin)
                    blockers.push_back(other.job);
            }
        }
        std::sort(blockers.begin(), blockers.end());
        blockers.erase(std::unique(blockers.begin(), blockers.end()), blockers.end());
        for (Job* each : blockers) each->blocked_.push_back(&job);
        job.blockers_ = blockers.size();
        for (const ByteRange& mine : job.touches_) {
            if (mine.begin >= mine.end) continue;
            longest_ = std::max(longest_, mine.end - mine.begin);
            job.accesses_.push_back(
                accesses_.emplace(mine.begin, Job::Access{mine.end, mine.written, &job}));
        }
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
            if (job.given_.hooks != nullptr) job.given_.hooks->after();
            const std::lock_guard lock(mutex_);
            finish(job);
        }
    }

    void finish(Job& job) {
        const std::shared_ptr<Job> kept = std::move(unfinished_.at(&job));
        unfinished_.erase(&job);
        startable_.erase(job.place_);
        for (const auto& each : job.accesses_) accesses_.erase(each);
        job.accesses_.clear();
        job.given_.hooks = nullptr;
        bool unblocked = false;
        for (Job* each : job.blocked_) {
            if (--each->blockers_ > 0 || each->coming_) continue;
            let_begin(*each);
            unblocked = true;
        }
        job.ended_ns_ = now_ns();
        job.done_.store(true, std::memory_order_release);
        finished_.notify_all();
        // Threads are woken for close(), for jobs that no thread is about to wait for, and for jobs
        // that this job has blocked: a thread that waits for one of these sleeps already.
        const auto left = [](const auto& each) {
            return each.second->has_chunks() && !each.second->given_.awaited;
        };
        if (closing_ || unblocked || std::any_of(startable_.begin(), startable_.end(), left)) {
            work_.notify_all();
        }
    }

    const pid_t process_ = getpid();
    const Team team_;
    const size_t width_;
    mutable std::mutex mutex_;
    std::condition_variable work_;
    std::condition_variable finished_;
    std::unordered_map<Job*, std::shared_ptr<Job>> unfinished_;
    std::map<Job::Place, Job*> startable_;  // those that wait for nothing; some have no chunks left
    std::deque<Job*> coming_;               // those whose hooks have not let them begin
    Job::Accesses accesses_;
    uintptr_t longest_ = 0;  // bytes of the longest range that any job has used
    uint64_t submitted_ = 0;
    bool asking_ = false;   // whether a thread asks for the first of `coming_`
    bool resting_ = false;  // whether a thread wakes to ask
    std::chrono::microseconds pause_ = kFirstPause;
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

Ticket ThreadPool::submit(std::shared_ptr<Job> job, Submission how) {
    state_->submit(job, std::move(how));
    return {state_, std::move(job)};
}

void ThreadPool::close() { state_->close(); }

bool ThreadPool::closed() const { return state_->closed(); }

}  // namespace infinity::cpu_adam
