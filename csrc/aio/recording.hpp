// A recording of what went to the disk and in which order, from which tests build the states that
// a crash could have left.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace infinity::aio {

// One operation on a file or a directory.
struct Event {
    std::string kind;
    std::string path;
    std::string target;  // of a rename: the new path
    uint64_t offset = 0;
    std::shared_ptr<const std::vector<std::byte>> data;  // of a write, copied when it was submitted
    uint64_t submitted = 0;                              // see [Note: one order]
    std::optional<uint64_t> completed;                   // none: not ended, or noted as failed
    int64_t result = 0;    // once completed: bytes that were written, or -errno
    bool changed = false;  // the memory was changed while the write was in flight
};

// [Note: one order]
// Submissions and completions of all operations share one counter. A submission takes its number
// before the kernel can have begun, and a completion after the kernel has ended. So an operation
// that completes before another is submitted has truly happened before it. The reverse errs on the
// side of doubt: a write may seem to begin earlier and to end later than it did, which only adds
// states that a crash could leave. A transfer that a rule holds or delays is submitted when the
// engine hands it over, because a disk might have begun it at once.
//
// Thread-safe.
class Recording {
  public:
    void start();
    void clear();  // ends the recording and frees the events
    bool on() const { return on_; }

    // Returns a ticket for `end`, or 0 while nothing is recorded.
    uint64_t begin(Event event);
    // Does nothing for a ticket from before the last clear().
    void end(uint64_t ticket, int64_t result, bool changed);
    // Notes that an operation without a result of its own has succeeded.
    void end(uint64_t ticket);

    std::vector<Event> events() const;  // the bytes are shared, not copied

  private:
    Event* find(uint64_t ticket);

    std::atomic<bool> on_ = false;
    mutable std::mutex mutex_;
    std::deque<Event> events_;
    uint64_t first_ticket_ = 1;  // of events_.front()
    uint64_t clock_ = 0;
};

}  // namespace infinity::aio
