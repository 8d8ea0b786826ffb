// Device memory and the addresses at which it is mapped (cuMemCreate, cuMemMap), in RAM.
//
// [Note: mapped addresses]
// What is mapped so is a stand-in for pages that are away, mapped many times over: it is filled
// once, and from then on whoever uses it takes it for a page that is not there. So a copy or a use
// of it that is told is a violation, and so are bytes that are not those of the fill any more.
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
    // Bytes. Small, so that small models have several mappings.
    static constexpr std::size_t granule = 4096;

    // What asks for the impossible is refused: false, or nothing, and nothing has changed.
    std::optional<std::uint64_t> reserve(std::size_t nbytes);
    bool free(std::uint64_t address, std::size_t nbytes);
    std::optional<std::uint64_t> create(std::size_t nbytes);
    bool release(std::uint64_t handle);
    bool map(std::uint64_t address, std::size_t nbytes, std::size_t offset, std::uint64_t handle);
    bool unmap(std::uint64_t address, std::size_t nbytes);
    bool allow(std::uint64_t address, std::size_t nbytes);
    // Writes `value` into all of them. They lie in one mapping that may be used.
    bool fill(std::uint64_t address, unsigned char value, std::size_t nbytes);

    enum class Kind { ordinary, mapped, none };
    // Whether bytes are RAM like any other, mapped ones, or partly such that nobody may use.
    Kind kind(std::uint64_t address, std::size_t nbytes) const;

    // Memories whose bytes are not those of their fill any more, each once, in words.
    std::vector<std::string> written();
    // What there is and came since `forget`, in words.
    std::vector<std::string> left() const;
    // What there is now is nobody's fault.
    void forget();

  private:
    struct Memory {
        unsigned char* bytes;  // where the driver itself sees it
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

    // Those that make up a range exactly; empty where none do.
    std::vector<Mappings::iterator> mappings_of(std::uint64_t address, std::size_t nbytes);
    bool overlaps_mapping(std::uint64_t address, std::size_t nbytes) const;
    bool in_one_reservation(std::uint64_t address, std::size_t nbytes) const;
    void look(std::uint64_t handle, Memory& memory);
    void drop_if_unused(std::uint64_t handle);

    std::map<std::uint64_t, Reservation> reservations_;  // by address
    std::map<std::uint64_t, Memory> memories_;           // by handle
    Mappings mappings_;
    std::uint64_t last_handle_ = 0;      // a number is given once: one of the past means nothing
    std::vector<std::string> findings_;  // of memories that are gone
};

}  // namespace infinity::test_driver
