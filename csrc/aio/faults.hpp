// Faults on purpose: a backend that wraps another one, and fails, shortens, tears, delays or
// holds transfers, and records what went through it.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backend.hpp"
#include "recording.hpp"

namespace infinity::aio {

struct FaultRule {
    enum class Action { fail, shorten, tear, delay, hold };

    std::optional<Kind> kind;         // the kind of transfers that the rule counts; none: all kinds
    std::optional<std::string> path;  // the file whose transfers it counts; none: all files
    uint64_t nth = 1;    // the first transfer it acts on, counted from when the rule was added
    uint64_t times = 1;  // the number of transfers in a row
    Action action = Action::fail;
    int error = 0;                      // fail: errno
    uint32_t bytes = 0;                 // shorten, tear: the most bytes that move
    std::chrono::nanoseconds delay{0};  // delay: before the transfer is handed on
};

// The rules and counts, which engines share with the test that sets them. Thread-safe.
class Faults {
  public:
    static constexpr uint64_t always = std::numeric_limits<uint64_t>::max();

    void add(FaultRule rule);
    void clear();                               // removes the rules, keeps the counts
    void release();                             // lets held transfers go, now and from now on
    std::array<uint64_t, kinds> calls() const;  // transfers seen since the start, by kind
    uint64_t fired() const;
    uint64_t releases() const;  // how often `release` was called

    // Counts the next transfer of this kind, and returns the rules that act on it.
    std::vector<FaultRule> next(Kind kind, const std::string& path);

    Recording& recording() { return recording_; }

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
    Recording recording_;  // has a lock of its own
};

std::unique_ptr<Backend> make_faulty(std::unique_ptr<Backend> inner,
                                     std::shared_ptr<Faults> faults);

}  // namespace infinity::aio
