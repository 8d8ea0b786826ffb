// What an engine has done since it started.
#pragma once

#include <array>
#include <cstdint>

#include "request.hpp"

namespace infinity::aio {

// Arrays are by Kind.
struct Stats {
    std::array<uint64_t, kinds> requests{};    // landed, well or not
    std::array<uint64_t, kinds> transfers{};   // handed to the backend, resubmissions included
    std::array<uint64_t, kinds> bytes{};       // moved
    std::array<double, kinds> busy_seconds{};  // time with at least one transfer in flight
    uint64_t failures = 0;                     // requests landed with an error
    uint64_t retries = 0;                      // after EAGAIN or EINTR
    uint64_t short_transfers = 0;
    uint64_t buffered_bytes = 0;  // moved through the page cache
    uint64_t queue_peak = 0;      // requests waiting for a free slot
    uint64_t in_flight_peak = 0;  // transfers
    uint64_t waits = 0;           // trips of the submission thread to the backend
};

}  // namespace infinity::aio
