// Virtual time: how long copies and computations take at given rates, to the picosecond, however
// busy this machine is.
//
// [Note: virtual time]
// Nothing waits for the clock. Each stream and each thread of the host has a time, an event has the
// time of its recording, and all are computed when work is queued. Work begins when its stream has
// come so far, the thread that queues it has, and its resource is free; it ends after the time that
// its bytes take. A stream that waits for an event, and a thread that waits for one, go on at the
// event's time at the earliest.
//
// The answer whether an event has happened depends on the time of the thread that asks. A loop that
// asks until the answer is yes does not move that time, so the same question that a thread asks
// `most_asked` times in a row counts as a wait.
//
// Work takes its resource's free time from its beginning on, even if work that was queued before it
// begins later. So it may have pauses, and the order of calls of two threads does not matter as
// long as their work does not want the same time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <thread>

namespace infinity::test_driver {

using Time = std::int64_t;  // in picoseconds

// What takes time. Each does one piece of work at a time, at its full rate.
enum class Resource : unsigned { link_up, link_down, device, host_memory };
inline constexpr std::size_t resources = 4;

class VirtualClock {
  public:
    // Bytes per second, by Resource. That of `device` is the rate of its memory.
    using Rates = std::array<std::uint64_t, resources>;
    // How often a thread asks the same in a row until it counts as a wait.
    static constexpr unsigned most_asked = 64;

    // Starts at 0, with all resources free. copies: whether copies move their bytes.
    void start(const Rates& rates, bool copies);
    void stop() { on_ = false; }
    bool on() const { return on_; }
    bool copies() const { return !on_ || copies_; }

    // The time of the calling thread.
    Time now() { return threads_[std::this_thread::get_id()].now; }
    // The calling thread goes on at `time` at the earliest.
    void wait_until(Time time);
    // Whether the calling thread has reached `time`. what: identifies the question.
    bool reached(const void* what, Time time);

    // Each returns when work that can begin at `begin` ends. A copy over the link takes host
    // memory's time, too, but does not wait for it, for the link is slower.
    Time copied(Resource resource, Time begin, std::uint64_t nbytes);
    Time computed(Resource resource, Time begin, Time length);
    Time length(Resource resource, std::uint64_t nbytes) const;

    // How much of the time from `begin` to `end` a resource has work.
    Time busy(Resource resource, Time begin, Time end) const;

  private:
    struct Thread {
        Time now = 0;
        const void* asked = nullptr;
        unsigned times = 0;
    };
    struct Span {
        Time begin;
        Time end;
    };
    // The times with work, from begin to end, with a pause between any two.
    using Schedule = std::map<Time, Time>;

    // Takes `length` of the resource's free time from `begin` on. Returns when the work begins and
    // ends.
    Span take(Resource resource, Time begin, Time length);

    bool on_ = false;
    bool copies_ = true;
    Rates rates_{};
    std::array<Schedule, resources> schedules_;
    std::map<std::thread::id, Thread> threads_;
};

}  // namespace infinity::test_driver
