// Whether any two uses of the same bytes, one of which writes, are ordered: vector clocks per
// stream and host thread, and the last uses of every range of bytes.
//
// [Note: what the checker sees]
// A clock is taken when work is queued, not when it runs: that a stream was quick makes no order.
// What makes one is the order in which a thread calls and in which a stream queues, a wait of a
// stream for an event, and an answer that an event or a stream is done. So a missing wait is found
// whenever the two uses are queued, however the streams happen to run, and where the bytes happen
// to be right.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace infinity::test_driver {

// By actor: how many of its uses are known to have happened.
using Clock = std::vector<std::uint64_t>;

class Checker {
  public:
    using Actor = std::size_t;

    // A stream, or a thread of the host.
    Actor add(std::string name);
    void rename(Actor actor, std::string name) { names_[actor] = std::move(name); }

    const Clock& clock(Actor actor) const { return clocks_[actor]; }
    // All that `clock` knows has happened before what `actor` does next.
    void follow(Actor actor, const Clock& clock);
    // The actor does one thing more: who took its clock before does not know of it.
    void tick(Actor actor) { ++clocks_[actor][actor]; }

    // The actor uses bytes [begin, end) now, in its own order.
    void use(Actor actor, std::uint64_t begin, std::uint64_t end, bool writes,
             const std::string& what);

    // A use, for people.
    std::string described(Actor actor, std::uint64_t begin, std::uint64_t end, bool writes,
                          const std::string& what) const {
        return describe({actor, 0, begin, end, writes, what});
    }

    // Each pair of unordered uses once, in words; at most `most_kept`.
    const std::vector<std::string>& violations() const { return violations_; }
    static constexpr std::size_t most_kept = 64;

    // Forgets uses and violations. Actors and their clocks stay.
    void clear();

  private:
    // One use, as long as it can still be in somebody's way.
    struct Use {
        Actor actor;
        std::uint64_t tick;
        std::uint64_t begin;
        std::uint64_t end;
        bool writes;
        std::string what;
    };
    using UsePointer = std::shared_ptr<const Use>;
    struct Range {
        std::uint64_t end;
        UsePointer write;
        std::vector<UsePointer> reads;  // since the write, one an actor: its last
    };
    using Ranges = std::map<std::uint64_t, Range>;  // by begin; disjoint

    // Cuts the range over `at` in two, so that one begins there.
    void split(std::uint64_t at);
    void compare(const UsePointer& before, const Use& now);
    std::string describe(const Use& use) const;

    std::vector<std::string> names_;
    std::vector<Clock> clocks_;
    Ranges ranges_;
    std::vector<std::string> violations_;
    std::set<std::string> seen_;
};

}  // namespace infinity::test_driver
