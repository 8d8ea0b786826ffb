#include "fork.hpp"

#include <pthread.h>

#include <atomic>

namespace infinity::aio {
namespace {

// Read by an atomic load at every call, where getpid() would be a system call.
std::atomic<uint64_t> generation{0};

void count_fork() { generation.fetch_add(1, std::memory_order_relaxed); }

[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, count_fork);

}  // namespace

uint64_t fork_generation() noexcept { return generation.load(std::memory_order_relaxed); }

}  // namespace infinity::aio
