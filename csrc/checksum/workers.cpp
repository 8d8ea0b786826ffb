#include "workers.hpp"

#include <pthread.h>
#include <signal.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

namespace infinity::checksum {
namespace {

// One call of divide(). Lives on the caller's stack until no thread works on it.
struct Job {
    const std::function<void(size_t)>& part;
    const size_t parts;
    size_t wanted;       // threads that may still join; under the lock
    size_t working = 0;  // threads that have joined; under the lock
    std::atomic<size_t> next = 0;

    void run() {
        for (;;) {
            const size_t i = next.fetch_add(1, std::memory_order_relaxed);
            if (i >= parts) return;
            part(i);
        }
    }
};

// Starts a thread that nobody joins, with all signals blocked: signals are for the program's own
// threads. Returns whether the system granted it.
template <class Action>
bool start_quietly(Action action) {
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = true;
    try {
        std::thread(action).detach();
    } catch (const std::exception&) {  // no thread, or no memory for one
        started = false;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return started;
}

// Never destroyed: at exit its threads sleep on, and end with the process.
class Workers {
  public:
    bool forked() const { return getpid() != process_; }

    void divide(Job& job) {
        std::unique_lock lock(mutex_);
        while (threads_ < job.wanted && start_quietly([this] { work(); })) ++threads_;
        jobs_.push_back(&job);
        if (job.wanted == 1) {
            work_.notify_one();
        } else {
            work_.notify_all();
        }
        lock.unlock();
        job.run();
        lock.lock();
        jobs_.erase(std::remove(jobs_.begin(), jobs_.end(), &job), jobs_.end());
        left_.wait(lock, [&] { return job.working == 0; });
    }

  private:
    void work() {
        pthread_setname_np(pthread_self(), "infinity-crc");
        std::unique_lock lock(mutex_);
        for (;;) {
            work_.wait(lock, [&] { return !jobs_.empty(); });
            Job& job = *jobs_.front();
            if (--job.wanted == 0) jobs_.pop_front();
            ++job.working;
            lock.unlock();
            job.run();
            lock.lock();
            // After the last of these the caller may take the job away.
            if (--job.working == 0) left_.notify_all();
        }
    }

    const pid_t process_ = getpid();
    std::mutex mutex_;
    std::condition_variable work_;
    std::condition_variable left_;
    std::deque<Job*> jobs_;  // those that want more threads
    size_t threads_ = 0;
};

// The workers of this process. A forked child has none of the threads, and the mutex may be locked
// for ever, so it makes workers of its own and leaves the memory of the others alone.
Workers& workers() {
    static std::atomic<Workers*> current = nullptr;
    Workers* found = current.load(std::memory_order_acquire);
    if (found != nullptr && !found->forked()) return *found;
    auto* const made = new Workers;
    if (current.compare_exchange_strong(found, made, std::memory_order_acq_rel)) return *made;
    delete made;  // another thread was first; this one has no threads yet
    return *found;
}

}  // namespace

void divide(size_t threads, size_t parts, const std::function<void(size_t)>& part) {
    const size_t helpers = std::min({threads, parts, kMostThreads});
    Job job{part, parts, helpers > 1 ? helpers - 1 : 0};
    if (job.wanted == 0) {
        job.run();
    } else {
        workers().divide(job);
    }
}

}  // namespace infinity::checksum
