#include "addresses.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <sstream>
#include <utility>

namespace infinity::test_driver {

namespace {

bool whole(std::uint64_t number) { return number % Addresses::granule == 0; }

bool overlap(std::uint64_t begin, std::size_t nbytes, std::uint64_t other, std::size_t size) {
    return begin < other + size && other < begin + nbytes;
}

void* at(std::uint64_t address) { return reinterpret_cast<void*>(address); }

std::string range(std::size_t nbytes, std::uint64_t address) {
    std::ostringstream text;
    text << nbytes << " bytes at 0x" << std::hex << address;
    return text.str();
}

constexpr int kHeld = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

}  // namespace

std::optional<std::uint64_t> Addresses::reserve(std::size_t nbytes) {
    if (nbytes == 0 || !whole(nbytes)) return std::nullopt;
    void* found = ::mmap(nullptr, nbytes, PROT_NONE, kHeld, -1, 0);
    if (found == MAP_FAILED) return std::nullopt;
    const auto address = reinterpret_cast<std::uint64_t>(found);
    reservations_[address] = {nbytes};
    return address;
}

bool Addresses::free(std::uint64_t address, std::size_t nbytes) {
    const auto found = reservations_.find(address);
    if (found == reservations_.end() || found->second.nbytes != nbytes) return false;
    if (overlaps_mapping(address, nbytes)) return false;
    ::munmap(at(address), nbytes);
    reservations_.erase(found);
    return true;
}

std::optional<std::uint64_t> Addresses::create(std::size_t nbytes) {
    if (nbytes == 0 || !whole(nbytes)) return std::nullopt;
    // The mapping is shared, so that it can be mapped elsewhere too. It has no file, since tests
    // count descriptors.
    void* bytes =
        ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (bytes == MAP_FAILED) return std::nullopt;
    memories_[++last_handle_] = {static_cast<unsigned char*>(bytes), nbytes};
    return last_handle_;
}

bool Addresses::release(std::uint64_t handle) {
    const auto found = memories_.find(handle);
    if (found == memories_.end() || found->second.released) return false;
    found->second.released = true;  // the memory stays as long as it is mapped
    drop_if_unused(handle);
    return true;
}

bool Addresses::map(std::uint64_t address, std::size_t nbytes, std::size_t offset,
                    std::uint64_t handle) {
    const auto found = memories_.find(handle);
    if (found == memories_.end() || found->second.released) return false;
    if (nbytes == 0 || !whole(address) || !whole(nbytes) || offset != 0) return false;
    if (nbytes > found->second.nbytes || !in_one_reservation(address, nbytes)) return false;
    if (overlaps_mapping(address, nbytes)) return false;
    // A move of 0 bytes makes a second mapping, and the old one stays.
    void* const moved =
        ::mremap(found->second.bytes, 0, nbytes, MREMAP_MAYMOVE | MREMAP_FIXED, at(address));
    if (moved == MAP_FAILED) return false;
    ::mprotect(moved, nbytes, PROT_NONE);
    mappings_[address] = {nbytes, handle};
    ++found->second.mappings;
    return true;
}

bool Addresses::unmap(std::uint64_t address, std::size_t nbytes) {
    const auto those = mappings_of(address, nbytes);
    if (those.empty()) return false;
    ::mmap(at(address), nbytes, PROT_NONE, kHeld | MAP_FIXED, -1, 0);
    for (const auto& each : those) {
        const std::uint64_t handle = each->second.handle;
        mappings_.erase(each);
        --memories_.at(handle).mappings;
        drop_if_unused(handle);
    }
    return true;
}

bool Addresses::allow(std::uint64_t address, std::size_t nbytes) {
    const auto those = mappings_of(address, nbytes);
    if (those.empty() || ::mprotect(at(address), nbytes, PROT_READ | PROT_WRITE) != 0) return false;
    for (const auto& each : those) each->second.usable = true;
    return true;
}

bool Addresses::fill(std::uint64_t address, unsigned char value, std::size_t nbytes) {
    auto after = mappings_.upper_bound(address);
    if (after == mappings_.begin()) return false;
    const auto& [start, mapping] = *std::prev(after);
    if (!mapping.usable || address + nbytes > start + mapping.nbytes) return false;
    std::memset(at(address), value, nbytes);
    Memory& memory = memories_.at(mapping.handle);
    if (address == start && nbytes == memory.nbytes) memory.filled = value;
    return true;
}

Addresses::Kind Addresses::kind(std::uint64_t address, std::size_t nbytes) const {
    const std::uint64_t end = address + nbytes;
    const bool reserved = std::any_of(
        reservations_.begin(), reservations_.end(),
        [&](const auto& each) { return overlap(address, nbytes, each.first, each.second.nbytes); });
    if (!reserved) return Kind::ordinary;
    for (std::uint64_t next = address; next < end;) {
        const auto after = mappings_.upper_bound(next);
        if (after == mappings_.begin()) return Kind::none;
        const auto& [start, mapping] = *std::prev(after);
        if (!mapping.usable || start + mapping.nbytes <= next) return Kind::none;
        next = start + mapping.nbytes;
    }
    return Kind::mapped;
}

std::vector<std::string> Addresses::written() {
    for (auto& [handle, memory] : memories_) look(handle, memory);
    return findings_;
}

std::vector<std::string> Addresses::left() const {
    std::vector<std::string> found;
    for (const auto& [address, reservation] : reservations_) {
        if (!reservation.old) found.push_back(range(reservation.nbytes, address) + ", reserved");
    }
    for (const auto& [handle, memory] : memories_) {
        if (!memory.old)
            found.push_back(std::to_string(memory.nbytes) + " bytes of memory, mapped " +
                            std::to_string(memory.mappings) + " times");
    }
    return found;
}

void Addresses::forget() {
    for (auto& [address, reservation] : reservations_) reservation.old = true;
    for (auto& [handle, memory] : memories_) memory.old = memory.told = true;
    findings_.clear();
}

std::vector<Addresses::Mappings::iterator> Addresses::mappings_of(std::uint64_t address,
                                                                  std::size_t nbytes) {
    std::vector<Mappings::iterator> found;
    std::uint64_t next = address;
    for (auto each = mappings_.find(address);
         each != mappings_.end() && each->first == next && next < address + nbytes; ++each) {
        found.push_back(each);
        next += each->second.nbytes;
    }
    if (next != address + nbytes) found.clear();
    return found;
}

bool Addresses::overlaps_mapping(std::uint64_t address, std::size_t nbytes) const {
    return std::any_of(mappings_.begin(), mappings_.end(), [&](const auto& each) {
        return overlap(address, nbytes, each.first, each.second.nbytes);
    });
}

bool Addresses::in_one_reservation(std::uint64_t address, std::size_t nbytes) const {
    return std::any_of(reservations_.begin(), reservations_.end(), [&](const auto& each) {
        const std::uint64_t end = each.first + each.second.nbytes;
        return each.first <= address && address + nbytes <= end;
    });
}

void Addresses::look(std::uint64_t handle, Memory& memory) {
    if (memory.told || !memory.filled) return;
    unsigned char* const end = memory.bytes + memory.nbytes;
    unsigned char* const other =
        std::find_if(memory.bytes, end, [&](unsigned char byte) { return byte != *memory.filled; });
    if (other == end) return;
    memory.told = true;
    findings_.push_back("[memory " + std::to_string(handle) + ": written at byte " +
                        std::to_string(other - memory.bytes) +
                        " since it was filled] where only a stand-in is");
}

void Addresses::drop_if_unused(std::uint64_t handle) {
    const auto found = memories_.find(handle);
    if (!found->second.released || found->second.mappings > 0) return;
    look(handle, found->second);
    ::munmap(found->second.bytes, found->second.nbytes);
    memories_.erase(found);
}

}  // namespace infinity::test_driver
