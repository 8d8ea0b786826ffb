// Checks that any two uses of the same bytes, one of which writes, are ordered. The checker keeps
// vector clocks for each stream and host thread, and the last uses of every range of bytes.
//
// [Note: what the checker sees]
// A clock is taken when work is queued, not when it runs: a stream that happens to be quick makes
// no order. Three things make an order: the sequence in which a thread calls and a stream queues, a
// stream's wait for an event, and an answer that an event or a stream is done. So the checker finds
// a missing wait whenever both uses are queued, however the streams happen to run, and even if the
// bytes happen to be right.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace infinity::test_driver {

// For each actor, how many of its uses are known to have happened.
using Clock = std::vector<std::uint64_t>;

class Checker {
  public:
    using Actor = std::size_t;

    // Adds an actor: a stream, or a thread of the host.
    Actor add(std::string name);
    void rename(Actor actor, std::string name) { names_[actor] = std::move(name); }

    const Clock& clock(Actor actor) const { return clocks_[actor]; }
    // Orders everything that `clock` knows of before the actor's next use.
    void follow(Actor actor, const Clock& clock);
    // Begins a new use of the actor, which clocks taken earlier do not know of.
    void tick(Actor actor) { ++clocks_[actor][actor]; }

    // Notes that the actor uses bytes [begin, end) now, in its own order.
    void use(Actor actor, std::uint64_t begin, std::uint64_t end, bool writes,
             const std::string& what);

    // A use in words, for people.
    std::string described(Actor actor, std::uint64_t begin, std::uint64_t end, bool writes,
                          const std::string& what) const {
        return describe({actor, 0, begin, end, writes, what});
    }

    // Each pair of unordered uses once, in words. At most `most_kept` pairs.
    const std::vector<std::string>& violations() const { return violations_; }
    static constexpr std::size_t most_kept = 64;

    // Forgets uses and violations. The actors and their clocks stay.
    void clear();

  private:
    // One use, kept as long as a later use can still conflict with it.
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
        std::vector<UsePointer> reads;  // since the write: the last read of each actor
    };
    using Ranges = std::map<std::uint64_t, Range>;  // by begin; disjoint

    // Cuts the range that contains `at` in two, so that a range begins there.
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
