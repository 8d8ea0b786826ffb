// Leases: bytes borrowed from a region, which return to their pool by themselves.
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

// Bytes on loan. Every handle and every Storage made from a lease shares the lease, and the last of
// them to go gives the bytes back to the pool. This may happen on any thread and without the GIL:
// autograd frees storages where it likes, and a garbage collection may run inside any Python code,
// also while a lock of ours is held.
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
    std::uint64_t leases = 0;   // leases that are out now
    std::uint64_t granted = 0;  // leases granted so far
    std::uint64_t waits = 0;    // requests that had to wait for a lease to return
    std::uint64_t refused = 0;  // requests that ended without a lease
    std::uint64_t returns = 0;  // leases that have come back so far
};

// Thrown where a pool is used in a process forked from its own. Its bytes are not mapped there.
class Forked : public std::runtime_error {
  public:
    Forked() : std::runtime_error("this pool belongs to the parent process") {}
};

// Why a request ended without a lease.
struct Refusal {
    enum class Reason {
        closed,
        queued,  // others were waiting already, or still are: enough bytes may be free
        full
    };
    Reason reason = Reason::full;
    std::uint64_t needed = 0;  // with `full`: the pool's capacity in bytes that would have sufficed
};

// How long a request may wait for leases to return. `interrupted`, where given, is called every 100
// ms with no lock held, so that a person's Ctrl-C ends the wait.
struct Patience {
    std::chrono::nanoseconds timeout{0};
    std::function<bool()> interrupted = nullptr;
};

// A hard budget: the leases that are out never have more than `nbytes` bytes in all, because they
// are disjoint spans of `nbytes` bytes of the region.
class Pool : public std::enable_shared_from_this<Pool> {
  public:
    // Throws std::invalid_argument if [offset, offset + nbytes) leaves the region, or if the
    // region's address plus offset is not a multiple of the granule.
    Pool(std::shared_ptr<Region> region, std::uint64_t offset, std::uint64_t nbytes,
         std::uint64_t granule);

    // Returns nullptr, and the reason in `refusal`, if no bytes came free in time. If nbytes can
    // never fit, the call returns at once. Requests that must wait are served in their order, since
    // a large request would otherwise starve behind small ones.
    std::shared_ptr<Lease> lease(std::uint64_t nbytes, const Patience& patience,
                                 Refusal* refusal = nullptr);

    // Ends the pool: no further leases are granted, and waiters get nullptr. Leases that are out
    // stay valid and share the region, of which the pool gives up its share.
    void close();
    bool closed() const;
    bool forked() const { return ::getpid() != owner_; }

    std::uint64_t capacity() const { return spans_.capacity(); }
    std::uint64_t largest_free() const;
    PoolCounters counters() const;

  private:
    friend class Lease;
    // The mutex may have been copied into a forked child while another thread held it.
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
    std::list<std::uint64_t> waiters_;  // bytes that each waiter wants, in order of arrival
};

}  // namespace infinity::tiers
