#include "pool.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace infinity::tiers {

Lease::Lease(std::shared_ptr<Pool> pool, std::shared_ptr<Region> region, Span span)
    : pool_(std::move(pool)), region_(std::move(region)), span_(span) {}

Lease::~Lease() { pool_->give_back(span_); }

std::uint64_t Lease::offset() const { return pool_->offset_ + span_.offset; }

Pool::Pool(std::shared_ptr<Region> region, std::uint64_t offset, std::uint64_t nbytes,
           std::uint64_t granule)
    : region_(std::move(region)), offset_(offset), owner_(::getpid()), spans_(nbytes, granule) {
    if (offset > region_->nbytes() || nbytes > region_->nbytes() - offset) {
        throw std::invalid_argument("a pool must lie inside its region");
    }
    if ((reinterpret_cast<std::uintptr_t>(region_->address()) + offset) % granule != 0) {
        throw std::invalid_argument("a pool must start at a multiple of its granule");
    }
}

std::shared_ptr<Lease> Pool::lease(std::uint64_t nbytes, const Patience& patience,
                                   Refusal* refusal) {
    std::unique_lock guard = lock();
    std::optional<Span> span;
    const bool possible = region_ && nbytes <= spans_.capacity();
    if (possible && waiters_.empty()) span = spans_.take(nbytes);
    if (possible && !span && patience.timeout > std::chrono::nanoseconds::zero()) {
        span = wait_for_span(guard, nbytes, patience);
    }
    if (!span) {
        ++counters_.refused;
        if (refusal != nullptr) *refusal = why_not(nbytes);
        return nullptr;
    }
    ++counters_.granted;
    ++counters_.leases;
    counters_.leased = spans_.used();
    counters_.peak = std::max(counters_.peak, counters_.leased);
    std::shared_ptr<Region> region = region_;
    guard.unlock();
    return std::make_shared<Lease>(shared_from_this(), std::move(region), *span);
}

Refusal Pool::why_not(std::uint64_t nbytes) const {
    if (!region_) return {Refusal::Reason::closed};
    if (std::max<std::uint64_t>(nbytes, 1) <= spans_.largest_free())
        return {Refusal::Reason::queued};
    return {Refusal::Reason::full, spans_.capacity_for(nbytes)};
}

std::optional<Span> Pool::wait_for_span(std::unique_lock<std::mutex>& lock, std::uint64_t nbytes,
                                        const Patience& patience) {
    using Clock = std::chrono::steady_clock;
    constexpr std::chrono::milliseconds kPollEvery(100);
    ++counters_.waits;
    const Clock::time_point deadline = Clock::now() + patience.timeout;
    const auto me = waiters_.insert(waiters_.end(), nbytes);
    std::optional<Span> span;
    const auto settled = [&] {
        if (!region_) return true;
        if (me == waiters_.begin()) span = spans_.take(nbytes);
        return span.has_value();
    };
    while (!returned_.wait_until(lock, std::min(deadline, Clock::now() + kPollEvery), settled)) {
        if (Clock::now() >= deadline) break;
        if (!patience.interrupted) continue;
        lock.unlock();  // the callback may take the GIL, whose holder may want this mutex
        const bool interrupted = patience.interrupted();
        lock.lock();
        if (interrupted) break;
    }
    waiters_.erase(me);
    returned_.notify_all();  // the waiter that is first now may fit where this one did not
    return span;
}

void Pool::close() {
    std::shared_ptr<Region> region;  // dropped after the lock, as it may unmap the region
    const std::unique_lock guard = lock();
    region.swap(region_);
    returned_.notify_all();
}

bool Pool::closed() const {
    const std::unique_lock guard = lock();
    return !region_;
}

std::uint64_t Pool::largest_free() const {
    const std::unique_lock guard = lock();
    return spans_.largest_free();
}

PoolCounters Pool::counters() const {
    const std::unique_lock guard = lock();
    return counters_;
}

void Pool::give_back(Span span) {
    if (forked()) return;  // the child did not inherit the bytes, so there is nothing to return
    const std::unique_lock guard = lock();
    spans_.give_back(span);
    counters_.leased = spans_.used();
    counters_.returns = spans_.returns();
    --counters_.leases;
    returned_.notify_all();
}

}  // namespace infinity::tiers
