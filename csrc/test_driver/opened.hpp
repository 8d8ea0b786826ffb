// Device memory that processes share (CUDA IPC), in RAM.
//
// [Note: memory of another process]
// What other code made as shared memory (a memfd) counts as one allocation. Its handle names the
// process, the descriptor and the inode. Whoever opens it can only read. This process's checker
// does not see the owner's writes: that a copy has no other bytes than wanted is up to what the
// processes tell each other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace infinity::test_driver {

// As large as a CUipcMemHandle.
struct SharedHandle {
    std::uint64_t process;
    std::uint64_t descriptor;
    std::uint64_t inode;
    std::uint64_t nbytes;
    std::uint64_t unused[4];
};
static_assert(sizeof(SharedHandle) == 64);

struct Allocation {
    std::uint64_t begin;
    std::uint64_t nbytes;
    std::uint64_t inode;
};

// The shared memory of this process that has the byte at `address`, or nothing.
std::optional<Allocation> shared_allocation(std::uint64_t address);
// A handle of an allocation, or nothing if its descriptor is closed.
std::optional<SharedHandle> handle_of(const Allocation& allocation);

class Opened {
  public:
    // Maps another process's memory, and returns its address; nothing if this process may not, or
    // if it is its own memory.
    std::optional<std::uint64_t> open(const SharedHandle& handle);
    // Unmaps memory, and returns its bytes; 0 if nothing was opened at `address`.
    std::size_t close(std::uint64_t address);
    // Whether a part of these bytes is another process's.
    bool overlaps(std::uint64_t address, std::size_t nbytes) const;

    // What is opened and was opened after `forget`, in words.
    std::vector<std::string> left() const;
    // What is opened now is not reported by `left` any more.
    void forget();

  private:
    struct Range {
        std::size_t nbytes;
        bool old = false;
    };
    std::map<std::uint64_t, Range> ranges_;  // by address; disjoint
};

}  // namespace infinity::test_driver
