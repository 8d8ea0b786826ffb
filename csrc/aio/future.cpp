#include "future.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>

namespace infinity::aio {
namespace {

// A futex call of our own: std::atomic::wait knows neither a deadline nor signals, and Ctrl-C must
// end a wait.
long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* until) {
    static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
    return syscall(SYS_futex, word, operation | FUTEX_PRIVATE_FLAG, value, until, nullptr,
                   FUTEX_BITSET_MATCH_ANY);
}

timespec absolute(TimePoint until) {
    const auto since = until.time_since_epoch();
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(since);
    return {static_cast<time_t>(seconds.count()),
            static_cast<long>(std::chrono::nanoseconds(since - seconds).count())};
}

}  // namespace

std::string describe_errno(const std::string& call, int error) {
    return call + ": " + std::strerror(error) + " (errno " + std::to_string(error) + ")";
}

void Future::land() noexcept {
    // acq_rel: the last part publishes the failure that another part's thread has written.
    if (parts_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    landed_ = Clock::now();
    if (word_.exchange(finished, std::memory_order_acq_rel) == awaited)
        futex(&word_, FUTEX_WAKE, INT_MAX, nullptr);
}

void Future::land(Failure failure) noexcept {
    if (!failed_.exchange(true, std::memory_order_relaxed)) failure_ = std::move(failure);
    land();
}

Future::Wait Future::wait(TimePoint until) noexcept {
    uint32_t seen = pending;
    word_.compare_exchange_strong(seen, awaited, std::memory_order_acquire);
    if (seen == finished) return Wait::done;
    // Every sleep has a limit, though a far one. Without a limit the kernel restarts the call after
    // a signal handler that was installed with SA_RESTART, and the handler's exception would go
    // unseen.
    const TimePoint horizon = Clock::now() + std::chrono::hours(1);
    const timespec limit = absolute(until < horizon ? until : horizon);
    const long outcome = futex(&word_, FUTEX_WAIT_BITSET, awaited, &limit);
    const int error = outcome == 0 ? 0 : errno;
    if (done()) return Wait::done;
    if (error == ETIMEDOUT && until <= Clock::now()) return Wait::timeout;
    return Wait::interrupted;
}

}  // namespace infinity::aio
