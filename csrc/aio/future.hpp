// The result of one request, or of several that were asked for together.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>

#include "errors.hpp"

namespace infinity::aio {

using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC, as Python's time.monotonic()
using TimePoint = Clock::time_point;

// Done when all parts have landed; from then on no engine touches the memory of the request.
// Completing costs a system call only where somebody waits.
class Future {
  public:
    enum class Wait { done, timeout, interrupted };

    explicit Future(uint32_t parts, uint64_t bytes = 0) : bytes_(bytes), parts_(parts) {
        if (parts == 0) {
            landed_ = submitted_;
            word_.store(finished, std::memory_order_release);
        }
    }
    Future(const Future&) = delete;
    Future& operator=(const Future&) = delete;

    // One part has landed. The first failure of any part is the future's.
    void land() noexcept;
    void land(Failure failure) noexcept;

    bool done() const noexcept { return word_.load(std::memory_order_acquire) == finished; }

    // Sleeps until done, `until`, or a signal handler has run in this thread.
    Wait wait(TimePoint until) noexcept;

    // When it was asked for, and, once done, when the last part landed: not when somebody looked.
    TimePoint submitted() const noexcept { return submitted_; }
    TimePoint landed() const noexcept { return landed_; }

    // Once done: what went wrong, or nullptr.
    const Failure* failure() const noexcept { return failure_ ? &*failure_ : nullptr; }
    uint64_t bytes() const noexcept { return bytes_; }

  private:
    enum : uint32_t { pending, awaited, finished };

    std::atomic<uint32_t> word_{pending};  // what waiters sleep on (futex)
    const uint64_t bytes_;
    std::atomic<uint32_t> parts_;
    std::atomic<bool> failed_{false};  // claims failure_
    std::optional<Failure> failure_;
    const TimePoint submitted_ = Clock::now();
    TimePoint landed_{};  // the last part's to write; word_ publishes it
};

}  // namespace infinity::aio
