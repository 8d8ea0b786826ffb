// One chunk of device memory that is mapped at many addresses, side by side.
#pragma once

#include <cstddef>
#include <memory>

#include "driver.hpp"

namespace infinity::driver {

// The granularity in bytes: the size of a chunk must be a multiple of it. Throws CallFailed.
std::size_t granularity(const Driver& driver);

// A range of addresses of `count` chunks. Behind each of them is the same chunk of memory, which
// may be read and written.
class RepeatedMemory {
  public:
    // Maps the chunk and fills it with `value` on the null stream. chunk: bytes, a multiple of the
    // granularity. Throws CallFailed, after undoing all that was done, or std::invalid_argument for
    // no bytes.
    RepeatedMemory(std::shared_ptr<Driver> driver, std::size_t chunk, std::size_t count,
                   unsigned char value);
    // Does not free the memory: the destructor cannot know whether kernels that use the memory are
    // done. At the end of the process the driver frees it.
    ~RepeatedMemory() = default;
    RepeatedMemory(const RepeatedMemory&) = delete;
    RepeatedMemory& operator=(const RepeatedMemory&) = delete;

    Address address() const { return address_; }
    // Gives everything back, in the opposite order. No queued work may use the memory. If a call
    // fails, the remaining calls are made all the same, and the first CallFailed is thrown at the
    // end. A second release does nothing.
    void release();

  private:
    void make(std::size_t count, unsigned char value);

    std::shared_ptr<Driver> driver_;
    std::size_t chunk_;
    std::size_t reserved_ = 0;  // bytes of addresses; 0: none
    Address address_ = 0;
    bool created_ = false;
    MemoryHandle memory_ = 0;
    std::size_t mapped_ = 0;  // chunks
};

}  // namespace infinity::driver
