// Threads that divide the parts of a piece of work among themselves and their caller.
#pragma once

#include <cstddef>
#include <functional>

namespace infinity::checksum {

// The most threads that work on one call, the caller included.
inline constexpr size_t kMostThreads = 256;

// Runs part(0), ..., part(parts - 1), which must not throw, in any order on up to `threads` threads
// of which the caller is one. Returns when all have run. Threads are started when first needed,
// receive no signals, and stay for later calls of any thread. If the system refuses a thread, fewer
// do the work. A forked child starts threads of its own.
void divide(size_t threads, size_t parts, const std::function<void(size_t)>& part);

}  // namespace infinity::checksum
