// An eventfd that other threads write to interrupt a sleep in the kernel.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

#include "errors.hpp"

namespace infinity::aio {

class Wakeup {
  public:
    Wakeup() : descriptor_(eventfd(0, EFD_CLOEXEC)) {
        if (descriptor_ < 0) throw Unavailable(describe_errno("eventfd", errno));
    }
    ~Wakeup() { ::close(descriptor_); }
    Wakeup(const Wakeup&) = delete;
    Wakeup& operator=(const Wakeup&) = delete;

    int descriptor() const { return descriptor_; }
    void signal() const {
        const uint64_t one = 1;
        // Cannot fail: the counter would have to reach 2^64 - 1 first.
        [[maybe_unused]] const ssize_t written = ::write(descriptor_, &one, sizeof one);
    }
    // Sleeps until signal() has been called since the last clear(), and resets the count of
    // signals.
    void clear() const {
        uint64_t count;
        [[maybe_unused]] const ssize_t got = ::read(descriptor_, &count, sizeof count);
    }

  private:
    int descriptor_;
};

}  // namespace infinity::aio
