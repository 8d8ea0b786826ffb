#include "registered.hpp"

#include <algorithm>
#include <iterator>
#include <sstream>

namespace infinity::test_driver {

bool Registered::add(std::uint64_t address, std::size_t nbytes) {
    const bool taken = std::any_of(ranges_.begin(), ranges_.end(), [&](const auto& each) {
        return each.first < address + nbytes && address < each.first + each.second.nbytes;
    });
    if (!taken) ranges_[address] = {nbytes};
    return !taken;
}

std::size_t Registered::remove(std::uint64_t address) {
    const auto found = ranges_.find(address);
    if (found == ranges_.end()) return 0;
    const std::size_t nbytes = found->second.nbytes;
    ranges_.erase(found);
    return nbytes;
}

bool Registered::covers(std::uint64_t address, std::size_t nbytes) const {
    const auto after = ranges_.upper_bound(address);
    if (after == ranges_.begin()) return false;
    const auto& [start, range] = *std::prev(after);
    return address + nbytes <= start + range.nbytes;
}

std::vector<std::string> Registered::left() const {
    std::vector<std::string> found;
    for (const auto& [address, range] : ranges_) {
        if (range.old) continue;
        std::ostringstream text;
        text << range.nbytes << " bytes at 0x" << std::hex << address << ", registered";
        found.push_back(text.str());
    }
    return found;
}

void Registered::forget() {
    for (auto& [address, range] : ranges_) range.old = true;
}

}  // namespace infinity::test_driver
