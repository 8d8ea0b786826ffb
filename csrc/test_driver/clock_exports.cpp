// The controls of the virtual clock. All do nothing, and return 0, where it does not run.
#include <algorithm>
#include <cstdint>

#include "call.hpp"

using namespace infinity::test_driver;  // NOLINT: the library is about one namespace

// Starts the virtual clock at 0; the next reset ends it. rates: bytes per second of the link up,
// the link down, the device's memory and host memory. copies: whether copies move their bytes.
EXPORT void infinity_test_start_clock(const std::uint64_t* rates, int copies) {
    Machine::Lock lock = machine().lock();
    VirtualClock::Rates found{};
    std::copy_n(rates, found.size(), found.begin());
    machine().start_clock(lock, found, copies != 0);
}

// When a stream has done all that is queued, or the time of the calling thread (by_host).
EXPORT std::int64_t infinity_test_time(Stream* stream, int by_host) {
    const Machine::Lock lock = machine().lock();
    if (!machine().clock().on()) return 0;
    if (by_host != 0) return machine().clock().now();
    const Stream* found = machine().find(stream);
    return found == nullptr ? 0 : found->time;
}

// Queues `length` of the device's time on a stream, for work of which the driver knows nothing.
EXPORT void infinity_test_computes(Stream* stream, std::int64_t length) {
    const Machine::Lock lock = machine().lock();
    if (Stream* found = machine().find(stream)) machine().takes(*found, length);
}

// Work of other threads of the host, which the calling thread begins now and does not wait for,
// uses `nbytes` bytes of host memory. Returns when it ends.
EXPORT std::int64_t infinity_test_host_works(std::uint64_t nbytes) {
    const Machine::Lock lock = machine().lock();
    VirtualClock& clock = machine().clock();
    if (!clock.on()) return 0;
    const Time length = clock.length(Resource::host_memory, nbytes);
    return clock.computed(Resource::host_memory, clock.now(), length);
}

// The calling thread waits until `time`.
EXPORT void infinity_test_wait_until(std::int64_t time) {
    const Machine::Lock lock = machine().lock();
    machine().clock().wait_until(time);
}

// For how much of the time from `begin` to `end` a resource has work. resource: its place in the
// rates.
EXPORT std::int64_t infinity_test_busy(unsigned resource, std::int64_t begin, std::int64_t end) {
    const Machine::Lock lock = machine().lock();
    if (!machine().clock().on() || resource >= resources) return 0;
    return machine().clock().busy(static_cast<Resource>(resource), begin, end);
}
