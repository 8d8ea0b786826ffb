#include "span_allocator.hpp"

#include <iterator>
#include <stdexcept>

namespace infinity::tiers {

SpanAllocator::SpanAllocator(std::uint64_t capacity, std::uint64_t granule) : granule_(granule) {
    if (granule == 0 || (granule & (granule - 1)) != 0) {
        throw std::invalid_argument("the granule of a span allocator must be a power of two");
    }
    capacity_ = capacity / granule * granule;
    if (capacity_ != 0) insert_free(0, {capacity_, 0});
}

std::optional<Span> SpanAllocator::take(std::uint64_t nbytes) {
    if (nbytes > capacity_) return std::nullopt;  // before the rounding, which could overflow
    const std::uint64_t size = round_up(nbytes);
    auto best = free_by_size_.lower_bound({size, 0});
    if (best == free_by_size_.end()) return std::nullopt;
    if (best->second + best->first == capacity_ && std::next(best) != free_by_size_.end()) ++best;
    const std::uint64_t offset = best->second;
    const auto position = free_by_offset_.find(offset);
    const Free free = position->second;
    erase_free(position);
    if (free.nbytes > size) insert_free(offset + size, {free.nbytes - size, free.last_return});
    taken_.emplace(offset, size);
    used_ += size;
    return Span{offset, nbytes, free.last_return};
}

void SpanAllocator::give_back(Span span) {
    const auto taken = taken_.find(span.offset);
    if (taken == taken_.end() || taken->second != round_up(span.nbytes)) {
        throw std::invalid_argument("a span came back that is not out");
    }
    std::uint64_t offset = taken->first;
    Free free{taken->second, ++returns_};  // the latest return of all that merge below
    taken_.erase(taken);
    used_ -= free.nbytes;
    const auto after = free_by_offset_.lower_bound(offset);
    if (after != free_by_offset_.begin()) {
        const auto before = std::prev(after);
        if (before->first + before->second.nbytes == offset) {
            offset = before->first;
            free.nbytes += before->second.nbytes;
            erase_free(before);
        }
    }
    if (after != free_by_offset_.end() && after->first == offset + free.nbytes) {
        free.nbytes += after->second.nbytes;
        erase_free(after);
    }
    insert_free(offset, free);
}

std::uint64_t SpanAllocator::largest_free() const {
    return free_by_size_.empty() ? 0 : free_by_size_.rbegin()->first;
}

std::uint64_t SpanAllocator::capacity_for(std::uint64_t nbytes) const {
    std::uint64_t tail = 0;
    if (!free_by_offset_.empty()) {
        const auto& [offset, free] = *free_by_offset_.rbegin();
        if (offset + free.nbytes == capacity_) tail = free.nbytes;
    }
    return capacity_ - tail + round_up(nbytes);
}

std::uint64_t SpanAllocator::round_up(std::uint64_t nbytes) const {
    return nbytes == 0 ? granule_ : (nbytes + granule_ - 1) / granule_ * granule_;
}

void SpanAllocator::insert_free(std::uint64_t offset, Free free) {
    free_by_offset_.emplace(offset, free);
    free_by_size_.emplace(free.nbytes, offset);
}

void SpanAllocator::erase_free(std::map<std::uint64_t, Free>::iterator position) {
    free_by_size_.erase({position->second.nbytes, position->first});
    free_by_offset_.erase(position);
}

}  // namespace infinity::tiers
