#include "virtual_clock.hpp"

#include <algorithm>
#include <iterator>

namespace infinity::test_driver {

namespace {

std::size_t index(Resource resource) { return static_cast<std::size_t>(resource); }

}  // namespace

void VirtualClock::start(const Rates& rates, bool copies) {
    on_ = true;
    copies_ = copies;
    rates_ = rates;
    for (Schedule& schedule : schedules_) schedule.clear();
    threads_.clear();
}

void VirtualClock::wait_until(Time time) {
    Thread& thread = threads_[std::this_thread::get_id()];
    thread.now = std::max(thread.now, time);
}

bool VirtualClock::reached(const void* what, Time time) {
    Thread& thread = threads_[std::this_thread::get_id()];
    if (thread.now >= time) return true;
    if (thread.asked != what) thread.times = 0;
    thread.asked = what;
    if (++thread.times < most_asked) return false;
    thread.asked = nullptr;
    thread.now = time;
    return true;
}

Time VirtualClock::copied(Resource resource, Time begin, std::uint64_t nbytes) {
    const bool on_device = resource == Resource::device;  // reads and writes its memory
    const Span span = take(resource, begin, length(resource, on_device ? 2 * nbytes : nbytes));
    if (!on_device) {
        take(Resource::host_memory, span.begin, length(Resource::host_memory, nbytes));
    }
    return span.end;
}

Time VirtualClock::computed(Resource resource, Time begin, Time length) {
    threads_[std::this_thread::get_id()].asked = nullptr;
    return take(resource, begin, length).end;
}

Time VirtualClock::length(Resource resource, std::uint64_t nbytes) const {
    const std::uint64_t rate = rates_[index(resource)];
    constexpr unsigned __int128 kSecond = 1'000'000'000'000;
    return static_cast<Time>((nbytes * kSecond + rate - 1) / rate);
}

Time VirtualClock::busy(Resource resource, Time begin, Time end) const {
    Time sum = 0;
    for (const auto& [first, last] : schedules_[index(resource)]) {
        sum += std::max<Time>(0, std::min(last, end) - std::max(first, begin));
    }
    return sum;
}

VirtualClock::Span VirtualClock::take(Resource resource, Time begin, Time length) {
    threads_[std::this_thread::get_id()].asked = nullptr;
    if (length == 0) return {begin, begin};
    Schedule& schedule = schedules_[index(resource)];
    auto next = schedule.upper_bound(begin);
    Time whole = begin;  // where the time without a pause begins that has the work's first part
    if (next != schedule.begin() && std::prev(next)->second >= begin) {
        whole = std::prev(next)->first;
        begin = std::prev(next)->second;
    }
    Time reached = begin;
    Time end = begin;
    while (next != schedule.end() && next->first - reached <= length) {
        end = next->first;
        length -= end - reached;
        reached = next->second;
        next = schedule.erase(next);
    }
    if (length > 0) reached = end = reached + length;
    schedule[whole] = reached;
    return {begin, end};
}

}  // namespace infinity::test_driver
