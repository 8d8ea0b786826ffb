// pread and pwrite in a few threads: works on any file system and under any sandbox.
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#include "backend.hpp"
#include "blocking_transfer.hpp"
#include "file.hpp"

namespace infinity::aio {
namespace {

constexpr unsigned most_threads = 16;

class Threads final : public Backend {
  public:
    explicit Threads(unsigned depth) : limit_(std::min(depth, most_threads)) {}
    ~Threads() override;

    const char* name() const override { return "threads"; }
    void submit(Transfer& transfer) override;
    void wait(TimePoint until, bool wakeable, std::vector<Completion>& done) override;
    void wake() override;

  private:
    void work();

    const unsigned limit_;
    std::mutex mutex_;
    std::condition_variable work_;    // queue_ is not empty, or stopping_
    std::condition_variable landed_;  // landing_ is not empty, or woken_
    std::deque<Transfer*> queue_;
    std::vector<Completion> landing_;
    unsigned idle_ = 0;
    bool woken_ = false;
    bool stopping_ = false;
    std::vector<std::thread> workers_;
};

Threads::~Threads() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    work_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void Threads::submit(Transfer& transfer) {
    const std::lock_guard lock(mutex_);
    queue_.push_back(&transfer);
    // Threads are started as the queue needs them. They inherit the mask of the engine's thread,
    // which blocks all signals.
    if (idle_ < queue_.size() && workers_.size() < limit_) {
        try {
            workers_.emplace_back([this] { work(); });
        } catch (const std::system_error&) {
            if (!workers_.empty()) return;  // the other threads will take the work
            queue_.pop_back();
            landing_.push_back({&transfer, -EAGAIN});  // the engine tries again a little later
            return;
        }
    }
    work_.notify_one();
}

void Threads::wait(TimePoint until, bool, std::vector<Completion>& done) {
    std::unique_lock lock(mutex_);
    const auto awake = [&] { return woken_ || !landing_.empty(); };
    if (until == TimePoint::max()) {
        landed_.wait(lock, awake);
    } else {
        landed_.wait_until(lock, until, awake);
    }
    woken_ = false;
    done.insert(done.end(), landing_.begin(), landing_.end());
    landing_.clear();
}

void Threads::wake() {
    {
        const std::lock_guard lock(mutex_);
        woken_ = true;
    }
    landed_.notify_one();
}

void Threads::work() {
    std::unique_lock lock(mutex_);
    while (true) {
        ++idle_;
        work_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
        --idle_;
        if (queue_.empty()) return;
        Transfer* transfer = queue_.front();
        queue_.pop_front();
        lock.unlock();
        const int64_t result = transfer_now(*transfer, transfer->bytes, transfer->direct);
        lock.lock();
        landing_.push_back({transfer, result});
        if (landing_.size() == 1) landed_.notify_one();
    }
}

}  // namespace

std::unique_ptr<Backend> make_threads(unsigned depth) { return std::make_unique<Threads>(depth); }

}  // namespace infinity::aio
