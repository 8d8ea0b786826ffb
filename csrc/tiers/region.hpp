// The memory of a tier: one range of bytes with an owner.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace infinity::tiers {

// Numbers of DLPack's DLDeviceType. Host memory that is registered with CUDA stays `cpu`, as in
// torch.
enum class DeviceKind : std::int32_t { cpu = 1, cuda = 2 };

struct Device {
    DeviceKind kind = DeviceKind::cpu;
    std::int32_t index = 0;
};

// A range of bytes that lives as long as its last pool, lease or storage. Closing a tier gives up
// only the tier's own share, so an alias that somebody still holds never points at unmapped bytes.
class Region {
  public:
    // Makes a region of bytes that somebody else owns. `release` is called once, by the thread that
    // drops the last share, and only in the process that made the region, not in a forked child.
    Region(std::byte* address, std::uint64_t nbytes, Device device, std::function<void()> release);
    ~Region();
    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;

    std::byte* address() const { return address_; }
    std::uint64_t nbytes() const { return nbytes_; }
    Device device() const { return device_; }

    // The descriptor of the memory, by which other processes can map it (`map_window`). -1: they
    // cannot, because the memory is private or `close_descriptor` was called.
    int descriptor() const { return descriptor_; }
    // Takes over the descriptor of the memory, and closes it with the region or before.
    void keep_descriptor(int descriptor) { descriptor_ = descriptor; }
    void close_descriptor();

    // Adds a function that is called before `release`, the last one added first. A registration by
    // address is undone in this way before the address can mean other memory.
    void before_release(std::function<void()> undo);

  private:
    std::byte* address_;
    std::uint64_t nbytes_;
    Device device_;
    const pid_t owner_;
    std::atomic<int> descriptor_ = -1;
    std::mutex mutex_;  // guards undo_
    std::vector<std::function<void()>> undo_;
    std::function<void()> release_;
};

enum class HugePages { never, advise };

struct HostMapping {
    std::uint64_t nbytes = 0;  // rounded up to whole base pages, never to huge ones
    HugePages huge_pages = HugePages::never;
    int numa_node = -1;     // preferred node; -1: the node of the thread that touches a page
    bool populate = false;  // fault every page in at once, in parallel: ENOMEM early, no kill later
    bool shared = false;    // let other processes read the memory, which then has a descriptor
};

// Maps anonymous memory at a 2 MiB boundary. Throws std::system_error (ENOMEM). A forked child does
// not inherit the memory. Otherwise every later write of the parent would make a copy, up to twice
// the budget, and pages pinned for I/O would be copied at the fork itself.
//
// Shared memory is a memfd. Nobody can change its size, so that reads of a mapping never fail, or
// map it again for writing. The kernel frees it with its last mapping and descriptor.
std::shared_ptr<Region> map_host(const HostMapping& wanted);

// Another process's shared memory, mapped for reading.
class Window : public Region {
  public:
    using Region::Region;

    // Takes bytes out of this process's page table. Otherwise all memory of others that it has ever
    // read would count as resident memory of this process, too.
    void forget(std::uint64_t offset, std::uint64_t nbytes) const;
};

// Maps the first `nbytes` bytes of another process's shared memory. `descriptor` opens this memory,
// and may be closed afterwards. Throws std::system_error: EINVAL if the memory is shorter, or if
// its size can change.
std::shared_ptr<Window> map_window(int descriptor, std::uint64_t nbytes);

// Returns a descriptor that becomes readable when a process ends (pidfd_open). Python has this call
// only if it was built with recent kernel headers. Throws std::system_error.
int open_process(int process);

// The number of the region's bytes that are in RAM now (mincore). Throws std::system_error.
std::uint64_t resident_bytes(const Region& region);

// The number of bytes of all live map_host regions of this process that are not in RAM yet. They
// are promised, but the kernel still counts them as available.
std::uint64_t unbacked_bytes();

}  // namespace infinity::tiers
