// Detection of forks. A forked child inherits an engine's memory but none of its threads, and
// mutexes in whatever state they were in. Every entry point asks here first, and touches nothing
// else in a child.
#pragma once

#include <cstdint>

namespace infinity::aio {

// The number of forks between the first process and this one.
uint64_t fork_generation() noexcept;

// Remembers the process that made an object.
class Process {
  public:
    Process() noexcept : generation_(fork_generation()) {}
    bool forked() const noexcept { return generation_ != fork_generation(); }

  private:
    uint64_t generation_;
};

}  // namespace infinity::aio
