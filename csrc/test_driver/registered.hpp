// Ranges of host memory that are registered for copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace infinity::test_driver {

class Registered {
  public:
    // False where part of it is registered.
    bool add(std::uint64_t address, std::size_t nbytes);
    // Bytes of the range that began there and is not registered any more; 0 where none did.
    std::size_t remove(std::uint64_t address);
    // Whether all of it lies in one range.
    bool covers(std::uint64_t address, std::size_t nbytes) const;

    // What there is and came since `forget`, in words.
    std::vector<std::string> left() const;
    // What there is now is nobody's fault.
    void forget();

  private:
    struct Range {
        std::size_t nbytes;
        bool old = false;
    };
    std::map<std::uint64_t, Range> ranges_;  // by address; disjoint
};

}  // namespace infinity::test_driver
