// Faults on purpose: a backend around another, which fails, shortens, delays or holds transfers.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "backend.hpp"

namespace infinity::aio {

struct FaultRule {
    enum class Action { fail, shorten, delay, hold };

    std::optional<Kind> kind;  // of the transfers it counts; none: all of them
    uint64_t nth = 1;          // the first one it acts on, counted from when the rule was added
    uint64_t times = 1;        // how many in a row
    Action action = Action::fail;
    int error = 0;                      // fail: errno
    uint32_t bytes = 0;                 // shorten: at most this many move
    std::chrono::nanoseconds delay{0};  // delay: before the transfer is handed on
};

// The rules and counts, shared between engines and the test that sets them. Thread-safe.
class Faults {
  public:
    static constexpr uint64_t always = std::numeric_limits<uint64_t>::max();

    void add(FaultRule rule);
    void clear();                               // rules, not counts
    void release();                             // what is held, and from now on
    std::array<uint64_t, kinds> calls() const;  // transfers seen since the start, by kind
    uint64_t fired() const;
    uint64_t releases() const;  // how often `release` was called

    // The rules that act on the next transfer of this kind; counts it.
    std::vector<FaultRule> next(Kind kind);

  private:
    struct Counted {
        FaultRule rule;
        uint64_t seen = 0;
    };

    mutable std::mutex mutex_;
    std::vector<Counted> rules_;
    std::array<uint64_t, kinds> calls_{};
    uint64_t fired_ = 0;
    uint64_t releases_ = 0;
};

std::unique_ptr<Backend> make_faulty(std::unique_ptr<Backend> inner,
                                     std::shared_ptr<Faults> faults);

}  // namespace infinity::aio
