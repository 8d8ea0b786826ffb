// Which bytes of a fixed range are taken. Pure bookkeeping: the range may be memory (pool.hpp) or a
// slab file on NVMe; nothing here touches it.
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
    std::uint64_t nbytes = 0;  // as asked for; the granules taken may reach past its end
    // How many spans had come back when any of these bytes last did, that span included; 0: never.
    std::uint64_t last_return = 0;
};

// Best fit, lowest offset among equals, neighbours coalesced at once. Best fit keeps large free
// spans whole while pages of a few sizes come and go; where all spans have one size it degenerates
// to a slot pool, which cannot fragment. Every offset is a multiple of the granule.
// Not thread-safe: its owner locks.
class SpanAllocator {
  public:
    // Throws std::invalid_argument unless granule is a power of two. A tail of capacity smaller
    // than a granule is never handed out.
    SpanAllocator(std::uint64_t capacity, std::uint64_t granule);

    // nullopt where no free span is large enough. nbytes = 0 takes one granule, so that every span
    // has an address of its own.
    std::optional<Span> take(std::uint64_t nbytes);

    // Throws std::invalid_argument for anything that take() did not return or that came back
    // before; nothing is changed then.
    void give_back(Span span);

    std::uint64_t capacity() const { return capacity_; }  // whole granules, bytes
    std::uint64_t used() const { return used_; }          // bytes, in whole granules
    std::uint64_t returns() const { return returns_; }    // spans that have come back, ever
    std::uint64_t largest_free() const;                   // bytes

    // The smallest capacity in which take(nbytes) would succeed with what is out now, for an
    // nbytes that does not fit: the free bytes at the end are extended until it does.
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
