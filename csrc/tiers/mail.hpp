// Mail: messages between the processes of a node, as bytes in shared memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "region.hpp"

namespace infinity::tiers {

// For each pair of processes and each direction a ring of bytes. Each process has a region of
// shared memory, which it alone writes: rings of what it sends, and how far it has read the rings
// of others.
//
// [Note: need wakeup]
// A process says in its region who of it sleeps until a message comes (`sleep`), and then looks
// once more (`unread`). A sender first writes, then looks whether somebody sleeps (`sleeper`), and
// wakes them by other means. In the same way a sender says that it waits for room, and then tries
// once more to write, and a reader looks when it has read. All four accesses are sequentially
// consistent, so at least one of the two sees what the other has done: no message waits for a
// sleeper that nobody wakes.
class Mail {
  public:
    static constexpr std::uint64_t kRing = 512 << 10;  // bytes
    // What a region for `ranks` processes takes.
    static std::uint64_t nbytes(std::uint64_t ranks);

    // own: zeroed memory of this process, the number `rank` of `ranks`. Throws std::out_of_range if
    // it is too small.
    Mail(std::shared_ptr<Region> own, std::uint64_t ranks, std::uint64_t rank);

    // Reads and serves a peer's region from now on. Throws std::out_of_range if it is too small.
    void meet(std::uint64_t peer, std::shared_ptr<Region> theirs);

    // One thread at a time writes to a peer, and one reads. Both throw std::out_of_range if the
    // peer is unknown, and std::runtime_error if its region has impossible numbers.
    //
    // Sends as many of the bytes as there is room for, and returns their number.
    std::uint64_t write(std::uint64_t peer, const char* bytes, std::uint64_t nbytes);
    // Takes the next bytes that the peer has sent, no more than `unread` returns.
    void read(std::uint64_t peer, char* into, std::uint64_t nbytes);
    // The number of bytes that the peer has sent and that are not read.
    std::uint64_t unread(std::uint64_t peer) const;
    // Whether there are bytes of any peer to read.
    bool unread() const;

    // Sets who of this process sleeps: a number with a meaning for those who wake it, 0 for nobody.
    // `who` is 0 or 1; each is set by one thread at a time.
    void sleep(std::uint64_t who, std::uint64_t how);
    // What a peer has set, after what this process has written: that of 0, and that of 1.
    std::uint64_t sleeper(std::uint64_t peer, std::uint64_t who) const;

  private:
    struct Way;
    struct Head;
    const Region& region_of(std::uint64_t peer) const;
    static Head& head(const Region& region);
    // What a region has for a peer.
    static Way& way(const Region& region, std::uint64_t peer);

    std::shared_ptr<Region> own_;
    std::uint64_t ranks_, rank_;
    std::vector<std::shared_ptr<Region>> others_;  // null: unknown
};

}  // namespace infinity::tiers
