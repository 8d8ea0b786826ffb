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
    // Returns false if a part of the range is registered already.
    bool add(std::uint64_t address, std::size_t nbytes);
    // Removes the range that begins at `address`, and returns its bytes; 0 if there is none.
    std::size_t remove(std::uint64_t address);
    // Returns whether all of the bytes lie in one range.
    bool covers(std::uint64_t address, std::size_t nbytes) const;

    // What is registered and was added after `forget`, in words.
    std::vector<std::string> left() const;
    // What is registered now is not reported by `left` any more.
    void forget();

  private:
    struct Range {
        std::size_t nbytes;
        bool old = false;
    };
    std::map<std::uint64_t, Range> ranges_;  // by address; disjoint
};

}  // namespace infinity::test_driver
