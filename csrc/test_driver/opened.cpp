#include "opened.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

namespace infinity::test_driver {

namespace {

// The inode of what a descriptor has open; 0 if it is not open.
std::uint64_t inode_of(int descriptor) {
    struct stat found{};
    return ::fstat(descriptor, &found) == 0 ? found.st_ino : 0;
}

}  // namespace

std::optional<Allocation> shared_allocation(std::uint64_t address) {
    std::ifstream mappings("/proc/self/maps");
    for (std::string line; std::getline(mappings, line);) {
        std::istringstream words(line);
        std::uint64_t begin = 0;
        std::uint64_t end = 0;
        std::uint64_t inode = 0;
        char dash = 0;
        std::string access, offset, device, path;
        words >> std::hex >> begin >> dash >> end >> access >> offset >> device >> std::dec >>
            inode >> path;
        if (address < begin || address >= end) continue;
        if (path.rfind("/memfd:", 0) != 0) return std::nullopt;
        return Allocation{begin, end - begin, inode};
    }
    return std::nullopt;
}

std::optional<SharedHandle> handle_of(const Allocation& allocation) {
    DIR* const open = ::opendir("/proc/self/fd");
    if (open == nullptr) return std::nullopt;
    std::optional<SharedHandle> found;
    while (const dirent* each = ::readdir(open)) {
        const int descriptor = std::atoi(each->d_name);
        if (each->d_name[0] == '.' || inode_of(descriptor) != allocation.inode) continue;
        found = {static_cast<std::uint64_t>(::getpid()),
                 static_cast<std::uint64_t>(descriptor),
                 allocation.inode,
                 allocation.nbytes,
                 {}};
    }
    ::closedir(open);
    return found;
}

std::optional<std::uint64_t> Opened::open(const SharedHandle& handle) {
    if (handle.process == static_cast<std::uint64_t>(::getpid())) return std::nullopt;
    const std::string path =
        "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.descriptor);
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) return std::nullopt;
    void* bytes = MAP_FAILED;
    if (inode_of(descriptor) == handle.inode)
        bytes = ::mmap(nullptr, handle.nbytes, PROT_READ, MAP_SHARED, descriptor, 0);
    ::close(descriptor);
    if (bytes == MAP_FAILED) return std::nullopt;
    const auto address = reinterpret_cast<std::uint64_t>(bytes);
    ranges_[address] = {handle.nbytes};
    return address;
}

std::size_t Opened::close(std::uint64_t address) {
    const auto found = ranges_.find(address);
    if (found == ranges_.end()) return 0;
    const std::size_t nbytes = found->second.nbytes;
    ::munmap(reinterpret_cast<void*>(address), nbytes);
    ranges_.erase(found);
    return nbytes;
}

bool Opened::overlaps(std::uint64_t address, std::size_t nbytes) const {
    return std::any_of(ranges_.begin(), ranges_.end(), [&](const auto& each) {
        return each.first < address + nbytes && address < each.first + each.second.nbytes;
    });
}

std::vector<std::string> Opened::left() const {
    std::vector<std::string> found;
    for (const auto& [address, range] : ranges_) {
        if (!range.old) found.push_back(std::to_string(range.nbytes) + " bytes, opened");
    }
    return found;
}

void Opened::forget() {
    for (auto& [address, range] : ranges_) range.old = true;
}

}  // namespace infinity::test_driver
