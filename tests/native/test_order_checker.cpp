// The checker against the definition of order: in random programs each use is compared with all
// uses before it, by sets of uses that an actor knows of instead of clocks.
#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "check.hpp"
#include "checker.hpp"

using infinity::test_driver::Checker;
using infinity::test_driver::Clock;

namespace {

constexpr std::size_t kActors = 4;
constexpr std::uint64_t kBytes = 24;

struct Use {
    std::size_t number;
    std::uint64_t begin;
    std::uint64_t end;
    bool writes;
};

// The definition: for each actor, the set of the uses that have happened before its next use.
class Definition {
  public:
    using Known = std::set<std::size_t>;
    bool conflicts(std::size_t actor, std::uint64_t begin, std::uint64_t end, bool writes) const {
        return std::any_of(uses_.begin(), uses_.end(), [&](const Use& use) {
            const bool overlap = use.begin < end && begin < use.end;
            return overlap && (writes || use.writes) && known_[actor].count(use.number) == 0;
        });
    }
    void use(std::size_t actor, std::uint64_t begin, std::uint64_t end, bool writes) {
        known_[actor].insert(uses_.size());
        uses_.push_back({uses_.size(), begin, end, writes});
    }
    const Known& known(std::size_t actor) const { return known_[actor]; }
    void follow(std::size_t actor, const Known& known) {
        known_[actor].insert(known.begin(), known.end());
    }

  private:
    std::vector<Use> uses_;
    Known known_[kActors];
};

struct Event {
    Clock clock;
    Definition::Known known;
};

// Whether a program ended with a conflict. Checks that the checker and the definition find the
// conflict at the same use.
bool agree_on(unsigned seed) {
    std::mt19937 random(seed);
    const auto draw = [&](std::size_t below) { return random() % below; };
    Checker checker;
    Definition definition;
    for (std::size_t actor = 0; actor < kActors; ++actor)
        checker.add("actor " + std::to_string(actor));
    std::vector<Event> events;
    for (int turn = 0; turn < 200; ++turn) {
        const std::size_t actor = draw(kActors);
        checker.tick(actor);
        if (draw(3) == 0) {
            events.push_back({checker.clock(actor), definition.known(actor)});
        } else if (!events.empty() && draw(2) == 0) {
            // Recent events, or no actor would ever know of new uses.
            const Event& event =
                events[events.size() - 1 - draw(std::min<std::size_t>(events.size(), 4))];
            checker.follow(actor, event.clock);
            definition.follow(actor, event.known);
        } else {
            const std::uint64_t begin = draw(kBytes);
            const std::uint64_t end = begin + 1 + draw(kBytes - begin);
            const bool writes = draw(8) == 0;
            const bool expected = definition.conflicts(actor, begin, end, writes);
            checker.use(actor, begin, end, writes, "use");
            CHECK(expected == !checker.violations().empty());
            if (expected) return true;
            definition.use(actor, begin, end, writes);
        }
    }
    return false;
}

void the_checker_is_the_definition() {
    int conflicts = 0;
    constexpr int programs = 4000;
    for (unsigned seed = 0; seed < programs; ++seed) conflicts += agree_on(seed) ? 1 : 0;
    CHECK(conflicts > programs / 10);
}

void one_finding_is_reported_once() {
    Checker checker;
    const auto first = checker.add("first");
    const auto second = checker.add("second");
    for (std::uint64_t at = 0; at < 100; ++at) {
        checker.use(first, at, at + 1, true, "store");
        checker.use(second, at, at + 1, false, "load");
    }
    CHECK(checker.violations().size() == 1);
    CHECK(checker.violations()[0].find("[second: load reads 1 bytes at 0x0] is not ordered after "
                                       "[first: store writes 1 bytes at 0x0]") == 0);
    checker.clear();
    checker.use(second, 0, 100, true, "store");
    CHECK(checker.violations().empty());
}

}  // namespace

int main() {
    the_checker_is_the_definition();
    one_finding_is_reported_once();
}
