#include "checker.hpp"

#include <algorithm>
#include <iterator>
#include <sstream>
#include <utility>

namespace infinity::test_driver {

namespace {

void join(Clock& into, const Clock& other) {
    if (into.size() < other.size()) into.resize(other.size());
    for (std::size_t actor = 0; actor < other.size(); ++actor) {
        into[actor] = std::max(into[actor], other[actor]);
    }
}

}  // namespace

Checker::Actor Checker::add(std::string name) {
    const Actor actor = names_.size();
    names_.push_back(std::move(name));
    clocks_.emplace_back(actor + 1);
    clocks_[actor][actor] = 1;  // 0 is the count of an actor of which nothing is known
    return actor;
}

void Checker::follow(Actor actor, const Clock& clock) { join(clocks_[actor], clock); }

void Checker::use(Actor actor, std::uint64_t begin, std::uint64_t end, bool writes,
                  const std::string& what) {
    if (begin >= end) return;
    const auto now =
        std::make_shared<const Use>(Use{actor, clocks_[actor][actor], begin, end, writes, what});
    split(begin);
    split(end);
    std::uint64_t covered = begin;  // every byte before this one has a range
    for (auto at = ranges_.lower_bound(begin); at != ranges_.end() && at->first < end; ++at) {
        Range& range = at->second;
        if (range.write) compare(range.write, *now);
        if (writes) {
            for (const UsePointer& read : range.reads) compare(read, *now);
            continue;
        }
        if (covered < at->first) ranges_.emplace(covered, Range{at->first, nullptr, {now}});
        covered = range.end;
        const auto mine =
            std::find_if(range.reads.begin(), range.reads.end(),
                         [&](const UsePointer& read) { return read->actor == actor; });
        if (mine == range.reads.end()) {
            range.reads.push_back(now);
        } else {
            *mine = now;
        }
    }
    if (writes) {
        ranges_.erase(ranges_.lower_bound(begin), ranges_.lower_bound(end));
        ranges_.emplace(begin, Range{end, now, {}});
    } else if (covered < end) {
        ranges_.emplace(covered, Range{end, nullptr, {now}});
    }
}

void Checker::clear() {
    ranges_.clear();
    violations_.clear();
    seen_.clear();
}

void Checker::split(std::uint64_t at) {
    auto after = ranges_.upper_bound(at);
    if (after == ranges_.begin()) return;
    const auto over = std::prev(after);
    if (over->first == at || over->second.end <= at) return;
    Range tail = over->second;
    over->second.end = at;
    ranges_.emplace_hint(after, at, std::move(tail));
}

void Checker::compare(const UsePointer& before, const Use& now) {
    const Clock& known = clocks_[now.actor];
    if (before->actor < known.size() && known[before->actor] >= before->tick) return;
    if (violations_.size() >= most_kept) return;
    // The same pair of uses at other addresses is not a new finding.
    const std::string pair = names_[before->actor] + before->what + names_[now.actor] + now.what;
    if (!seen_.insert(pair).second) return;
    violations_.push_back(describe(now) + " is not ordered after " + describe(*before));
}

std::string Checker::describe(const Use& use) const {
    std::ostringstream text;
    text << "[" << names_[use.actor] << ": " << use.what << (use.writes ? " writes " : " reads ")
         << use.end - use.begin << " bytes at 0x" << std::hex << use.begin << "]";
    return text.str();
}

}  // namespace infinity::test_driver
