// The memory of a tier: one range of bytes with an owner.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace infinity::tiers {

// Numbers of DLPack's DLDeviceType; memory of the host registered with CUDA stays `cpu`, as it is
// for torch.
enum class DeviceKind : std::int32_t { cpu = 1, cuda = 2 };

struct Device {
    DeviceKind kind = DeviceKind::cpu;
    std::int32_t index = 0;
};

// Lives as long as its last pool, lease or storage does: closing a tier gives up its handle only,
// so that an alias somebody still holds never points at unmapped bytes.
class Region {
  public:
    // Bytes owned by somebody else; `release` is called once, from whichever thread drops last, in
    // the process that made the region and in no child of it.
    Region(std::byte* address, std::uint64_t nbytes, Device device, std::function<void()> release);
    ~Region();
    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;

    std::byte* address() const { return address_; }
    std::uint64_t nbytes() const { return nbytes_; }
    Device device() const { return device_; }

    // Called before `release`, the last one added first: what was registered somewhere by address
    // is undone before the address can mean something else.
    void before_release(std::function<void()> undo);

  private:
    std::byte* address_;
    std::uint64_t nbytes_;
    Device device_;
    const pid_t owner_;
    std::mutex mutex_;  // guards undo_
    std::vector<std::function<void()>> undo_;
    std::function<void()> release_;
};

enum class HugePages { never, advise };

struct HostMapping {
    std::uint64_t nbytes = 0;  // rounded up to whole base pages, never to huge ones
    HugePages huge_pages = HugePages::never;
    int numa_node = -1;     // preferred node, -1: wherever the touching thread runs
    bool populate = false;  // fault every page in now, in parallel: early ENOMEM, no late kill
};

// Anonymous private memory at a 2 MiB boundary. It is not inherited over fork(): a child would
// make every later write of the parent a copy, doubling what the budget promised, and pages pinned
// for I/O would be copied at the fork itself. Throws std::system_error (ENOMEM).
std::shared_ptr<Region> map_host(const HostMapping& wanted);

// Bytes of the region's pages that are in RAM now (mincore). Throws std::system_error.
std::uint64_t resident_bytes(const Region& region);

// Bytes of all live map_host regions of this process that are not in RAM yet: promised, and still
// counted as available by the kernel.
std::uint64_t unbacked_bytes();

}  // namespace infinity::tiers
