// One piece of device memory at many addresses, side by side.
#pragma once

#include <cstddef>
#include <memory>

#include "driver.hpp"

namespace infinity::driver {

// Bytes of which a chunk that is to be mapped is a multiple. Throws CallFailed.
std::size_t granularity(const Driver& driver);

// A range of `count` chunks of addresses behind each of which is the same chunk of memory, that all
// may read and write.
class RepeatedMemory {
  public:
    // chunk: bytes, a multiple of the granularity. Fills it with `value` on the null stream. Throws
    // CallFailed, and has left nothing then; std::invalid_argument for no bytes.
    RepeatedMemory(std::shared_ptr<Driver> driver, std::size_t chunk, std::size_t count,
                   unsigned char value);
    // Leaves the memory alone: it cannot know whether kernels that use it are done, and at the
    // process's end the driver takes it.
    ~RepeatedMemory() = default;
    RepeatedMemory(const RepeatedMemory&) = delete;
    RepeatedMemory& operator=(const RepeatedMemory&) = delete;

    Address address() const { return address_; }
    // Gives all back, in the order opposite to how it came; again: does nothing. Nothing that is
    // queued may use it. Where a call fails the others are made all the same; throws the first
    // CallFailed.
    void release();

  private:
    void make(std::size_t count, unsigned char value);

    std::shared_ptr<Driver> driver_;
    std::size_t chunk_;
    std::size_t reserved_ = 0;  // bytes of addresses, 0: none
    Address address_ = 0;
    bool created_ = false;
    MemoryHandle memory_ = 0;
    std::size_t mapped_ = 0;  // chunks
};

}  // namespace infinity::driver
