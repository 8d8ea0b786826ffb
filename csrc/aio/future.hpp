// The result of one request, or of several requests that were made together.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>

#include "errors.hpp"

namespace infinity::aio {

using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC, as Python's time.monotonic()
using TimePoint = Clock::time_point;

// A future is done when all parts have landed. From then on no engine touches the memory of the
// request. Completing a future costs a system call only if somebody waits.
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

    // Notes that one part has landed. The first failure of any part is the future's failure.
    void land() noexcept;
    void land(Failure failure) noexcept;

    bool done() const noexcept { return word_.load(std::memory_order_acquire) == finished; }

    // Sleeps until the future is done, until `until`, or until a signal handler has run in this
    // thread.
    Wait wait(TimePoint until) noexcept;

    // When the request was made and, once done, when its last part landed. Neither depends on when
    // somebody asked.
    TimePoint submitted() const noexcept { return submitted_; }
    TimePoint landed() const noexcept { return landed_; }

    // Once done: the failure, or nullptr.
    const Failure* failure() const noexcept { return failure_ ? &*failure_ : nullptr; }
    uint64_t bytes() const noexcept { return bytes_; }

  private:
    enum : uint32_t { pending, awaited, finished };

    std::atomic<uint32_t> word_{pending};  // what waiters sleep on (futex)
    const uint64_t bytes_;
    std::atomic<uint32_t> parts_;
    std::atomic<bool> failed_{false};  // set by the thread that may write failure_
    std::optional<Failure> failure_;
    const TimePoint submitted_ = Clock::now();
    TimePoint landed_{};  // written by the last part, published by word_
};

}  // namespace infinity::aio
