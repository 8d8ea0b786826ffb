// Counts of what an engine has done since it started.
#pragma once

#include <array>
#include <cstdint>

#include "request.hpp"

namespace infinity::aio {

// Counts of an engine. Arrays are indexed by Kind.
struct Stats {
    std::array<uint64_t, kinds> requests{};    // landed, with or without an error
    std::array<uint64_t, kinds> transfers{};   // handed to the backend, resubmissions included
    std::array<uint64_t, kinds> bytes{};       // bytes moved
    std::array<double, kinds> busy_seconds{};  // time with at least one transfer in flight
    uint64_t failures = 0;                     // requests that landed with an error
    uint64_t retries = 0;                      // attempts after EAGAIN or EINTR
    uint64_t short_transfers = 0;
    uint64_t buffered_bytes = 0;  // bytes moved through the page cache
    uint64_t verified_bytes = 0;  // bytes read whose checksums were known
    uint64_t queue_peak = 0;      // the most requests that waited for a free slot
    uint64_t in_flight_peak = 0;  // the most transfers in flight
    uint64_t waits = 0;           // times that the submission thread waited in the backend
};

}  // namespace infinity::aio
