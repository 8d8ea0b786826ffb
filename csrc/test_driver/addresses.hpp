// Device memory and the addresses at which it is mapped (cuMemCreate, cuMemMap), in RAM.
//
// [Note: mapped addresses]
// The runtime maps memory in this way only as a stand-in for evicted pages. One chunk is mapped
// many times and filled once. Code that uses it afterwards takes it for a page that is not there.
// So a copy or a reported use of such memory is a violation, and so is a change of its bytes after
// the fill.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace infinity::test_driver {

class Addresses {
  public:
    // The granularity in bytes. It is small, so that small models have several mappings.
    static constexpr std::size_t granule = 4096;

    // Impossible requests are refused: the call returns false or nothing, and changes nothing.
    std::optional<std::uint64_t> reserve(std::size_t nbytes);
    bool free(std::uint64_t address, std::size_t nbytes);
    std::optional<std::uint64_t> create(std::size_t nbytes);
    bool release(std::uint64_t handle);
    bool map(std::uint64_t address, std::size_t nbytes, std::size_t offset, std::uint64_t handle);
    bool unmap(std::uint64_t address, std::size_t nbytes);
    bool allow(std::uint64_t address, std::size_t nbytes);
    // Writes `value` into all bytes, which must lie in one mapping that may be used.
    bool fill(std::uint64_t address, unsigned char value, std::size_t nbytes);

    enum class Kind { ordinary, mapped, none };
    // Whether the bytes are ordinary RAM, mapped memory, or partly addresses that nobody may use.
    Kind kind(std::uint64_t address, std::size_t nbytes) const;

    // The memories whose bytes differ from their fill, each reported once, in words.
    std::vector<std::string> written();
    // What exists and was made after `forget`, in words.
    std::vector<std::string> left() const;
    // What exists now is not reported by `left` any more.
    void forget();

  private:
    struct Memory {
        unsigned char* bytes;  // the address at which the driver itself sees the memory
        std::size_t nbytes;
        std::size_t mappings = 0;
        bool released = false;
        std::optional<unsigned char> filled = std::nullopt;
        bool told = false;
        bool old = false;
    };
    struct Mapping {
        std::size_t nbytes;
        std::uint64_t handle;
        bool usable = false;
    };
    struct Reservation {
        std::size_t nbytes;
        bool old = false;
    };
    using Mappings = std::map<std::uint64_t, Mapping>;  // by address; disjoint

    // The mappings that make up a range exactly, or none.
    std::vector<Mappings::iterator> mappings_of(std::uint64_t address, std::size_t nbytes);
    bool overlaps_mapping(std::uint64_t address, std::size_t nbytes) const;
    bool in_one_reservation(std::uint64_t address, std::size_t nbytes) const;
    void look(std::uint64_t handle, Memory& memory);
    void drop_if_unused(std::uint64_t handle);

    std::map<std::uint64_t, Reservation> reservations_;  // by address
    std::map<std::uint64_t, Memory> memories_;           // by handle
    Mappings mappings_;
    std::uint64_t last_handle_ = 0;      // numbers are given once, so an old number means nothing
    std::vector<std::string> findings_;  // of memories that have been freed
};

}  // namespace infinity::test_driver
