// Leases: bytes borrowed from a region, which return themselves.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>

#include "region.hpp"
#include "span_allocator.hpp"

namespace infinity::tiers {

class Pool;

// Bytes on loan. Shared by every handle and every Storage made from it; the last one to go gives
// the span back, from any thread and without the GIL (autograd frees storages where it likes, and a
// garbage collection may run inside any Python code, a lock of ours included).
class Lease {
  public:
    Lease(std::shared_ptr<Pool> pool, std::shared_ptr<Region> region, Span span);
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    std::byte* address() const { return region_->address() + offset(); }
    std::uint64_t offset() const;  // bytes from the start of the region
    std::uint64_t nbytes() const { return span_.nbytes; }
    std::uint64_t last_return() const { return span_.last_return; }
    Device device() const { return region_->device(); }

  private:
    std::shared_ptr<Pool> pool_;
    std::shared_ptr<Region> region_;
    Span span_;
};

struct PoolCounters {
    std::uint64_t leased = 0;   // bytes, in whole granules
    std::uint64_t peak = 0;     // the largest `leased` has been
    std::uint64_t leases = 0;   // out now
    std::uint64_t granted = 0;  // ever
    std::uint64_t waits = 0;    // requests that had to wait for a lease to return
    std::uint64_t refused = 0;  // requests that ended without a lease
    std::uint64_t returns = 0;  // leases that have come back, ever
};

// A pool was used in a process forked from its own, where its bytes are not mapped.
class Forked : public std::runtime_error {
  public:
    Forked() : std::runtime_error("this pool belongs to the parent process") {}
};

// Why a request ended without a lease.
struct Refusal {
    enum class Reason {
        closed,
        queued,  // others were waiting already, or still are: the bytes may be there
        full
    };
    Reason reason = Reason::full;
    std::uint64_t needed = 0;  // full: the capacity in which it would have been granted, bytes
};

// How long a request may wait for leases to return. `interrupted`, where given, is asked every 100
// ms with no lock held, so that a person's Ctrl-C ends the wait.
struct Patience {
    std::chrono::nanoseconds timeout{0};
    std::function<bool()> interrupted = nullptr;
};

// A hard budget: the sum of the leases out never exceeds `nbytes`, because they are disjoint spans
// of nbytes bytes of the region.
class Pool : public std::enable_shared_from_this<Pool> {
  public:
    // Throws std::invalid_argument where [offset, offset + nbytes) leaves the region or the
    // region's address plus offset is not a multiple of the granule.
    Pool(std::shared_ptr<Region> region, std::uint64_t offset, std::uint64_t nbytes,
         std::uint64_t granule);

    // nullptr, and the reason in `refusal`, where nothing came free in time, at once where nbytes
    // can never fit. A waiter is not overtaken: requests that must wait are served in their order,
    // or a large one would starve behind small ones.
    std::shared_ptr<Lease> lease(std::uint64_t nbytes, const Patience& patience,
                                 Refusal* refusal = nullptr);

    // No further leases; those out stay valid and share the region, which the pool lets go of.
    // Waiters end with nullptr.
    void close();
    bool closed() const;
    bool forked() const { return ::getpid() != owner_; }

    std::uint64_t capacity() const { return spans_.capacity(); }
    std::uint64_t largest_free() const;
    PoolCounters counters() const;

  private:
    friend class Lease;
    // The mutex may have been copied into a child while another thread held it.
    std::unique_lock<std::mutex> lock() const {
        if (forked()) throw Forked();
        return std::unique_lock(mutex_);
    }
    void give_back(Span span);
    Refusal why_not(std::uint64_t nbytes) const;  // with the lock held
    std::optional<Span> wait_for_span(std::unique_lock<std::mutex>& lock, std::uint64_t nbytes,
                                      const Patience& patience);

    std::shared_ptr<Region> region_;  // null once closed
    const std::uint64_t offset_;
    const pid_t owner_;  // the process whose memory and threads these are
    mutable std::mutex mutex_;
    std::condition_variable returned_;
    SpanAllocator spans_;
    PoolCounters counters_;
    std::list<std::uint64_t> waiters_;  // bytes each waits for, first come first
};

}  // namespace infinity::tiers
