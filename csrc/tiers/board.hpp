// A board: which bytes of a process's shared memory other processes may copy by themselves.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "region.hpp"

namespace infinity::tiers {

// A number of entries in shared memory, one for each range of bytes that others copy. The process
// that maps the memory for writing opens and closes entries; the others copy.
//
// [Note: copies that change meanwhile]
// An entry counts its changes: the count is odd while the entry is open. Its process closes an
// entry before it changes the bytes, and then may change them at once: it does not wait for
// copies that others are making. A copy counts only if the entry was open before it, and has the
// same count after it. Otherwise the bytes may have changed meanwhile, and the copy is worth
// nothing. So one side never waits for the other, and a process may die at any time.
class Board {
  public:
    // What the bytes of an entry are, such as (step, loads, version). The board compares stamps.
    using Stamp = std::array<std::uint64_t, 3>;

    static constexpr std::uint64_t kEntryBytes =
        64;  // a cache line, so that entries do not collide

    // `memory` is all zero at first: all entries are closed.
    explicit Board(std::shared_ptr<Region> memory) : memory_(std::move(memory)) {}

    std::uint64_t entries() const { return memory_->nbytes() / kEntryBytes; }

    // Opens an entry: its bytes begin `offset` bytes from the start of the shared memory. Opens and
    // closes of an entry do not run at the same time. Throws std::out_of_range.
    void open(std::uint64_t index, const Stamp& stamp, std::uint64_t offset);
    // Closes an entry, if it is open. Call it before the bytes change. Throws std::out_of_range.
    void close(std::uint64_t index);

    // How often an entry has changed, if it is open with this stamp; 0 if it is not. A copy that
    // the caller begins afterwards counts if the entry is `unchanged` when the copy is complete.
    // Both throw std::out_of_range.
    std::uint64_t changes(std::uint64_t index, const Stamp& stamp) const;
    bool unchanged(std::uint64_t index, std::uint64_t changes) const;

    // Copies `nbytes` bytes from byte `start` of an entry to `into`. `window` is the shared memory
    // of the board's process. Returns whether the entry was open with this stamp all the time; if
    // not, `into` has undefined bytes. Throws std::out_of_range, also for bytes beyond the window.
    bool copy(std::uint64_t index, const Stamp& stamp, const Window& window, std::uint64_t start,
              std::byte* into, std::uint64_t nbytes) const;

  private:
    struct Entry;
    Entry* entry(std::uint64_t index) const;

    std::shared_ptr<Region> memory_;
};

}  // namespace infinity::tiers
