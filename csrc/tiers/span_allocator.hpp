// An allocator of spans of a fixed range of bytes. The range may be memory (pool.hpp) or a slab
// file on NVMe: the allocator only keeps books and touches no byte of the range.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace infinity::tiers {

struct Span {
    std::uint64_t offset = 0;  // bytes from the start of the range
    std::uint64_t nbytes = 0;  // as asked for; the granules taken may end later
    // The value of returns() just after the latest return of any of these bytes. 0: none was ever
    // returned.
    std::uint64_t last_return = 0;
};

// Takes the smallest free span that fits, at the lowest offset among equals, and merges free
// neighbours at once. Best fit keeps large free spans whole while pages of a few sizes come and go.
// The free span at the end comes after all others. So what is taken does not depend on the
// capacity: a row of calls that has taken nothing behind an offset can do with that capacity.
// Where all spans have one size, the allocator behaves like a pool of slots, which cannot fragment.
// Every offset is a multiple of the granule. Not thread-safe: the owner locks.
class SpanAllocator {
  public:
    // Throws std::invalid_argument unless granule is a power of two. A remainder of capacity that
    // is smaller than a granule is never handed out.
    SpanAllocator(std::uint64_t capacity, std::uint64_t granule);

    // Returns nullopt if no free span is large enough. nbytes = 0 takes one granule, so that every
    // span has an address of its own.
    std::optional<Span> take(std::uint64_t nbytes);

    // Throws std::invalid_argument, and changes nothing, for a span that take() did not return or
    // that was given back before.
    void give_back(Span span);

    std::uint64_t capacity() const { return capacity_; }  // bytes, in whole granules
    std::uint64_t used() const { return used_; }          // bytes, in whole granules
    std::uint64_t returns() const { return returns_; }    // spans that have come back so far
    std::uint64_t largest_free() const;                   // bytes

    // For an nbytes that does not fit: the smallest capacity in bytes in which take(nbytes) would
    // succeed, given the spans that are out now. The free bytes at the end are extended until
    // nbytes fits.
    std::uint64_t capacity_for(std::uint64_t nbytes) const;

  private:
    struct Free {
        std::uint64_t nbytes = 0;
        std::uint64_t last_return = 0;
    };

    std::uint64_t round_up(std::uint64_t nbytes) const;
    void insert_free(std::uint64_t offset, Free free);
    void erase_free(std::map<std::uint64_t, Free>::iterator position);

    std::uint64_t granule_;
    std::uint64_t capacity_;
    std::uint64_t used_ = 0;
    std::uint64_t returns_ = 0;
    std::map<std::uint64_t, Free> free_by_offset_;
    std::set<std::pair<std::uint64_t, std::uint64_t>> free_by_size_;  // (bytes, offset)
    std::map<std::uint64_t, std::uint64_t> taken_;                    // offset -> bytes
};

}  // namespace infinity::tiers
