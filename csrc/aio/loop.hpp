// What the submission thread owns: requests on their way through a backend.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "backend.hpp"
#include "queue.hpp"
#include "stats.hpp"

namespace infinity::aio {

// A request that is over, its future not told yet.
struct Landed {
    std::shared_ptr<Future> future;
    std::shared_ptr<File> file;
    std::optional<Failure> failure;

    void tell() {
        if (failure) {
            future->land(std::move(*failure));
        } else {
            future->land();
        }
    }
};

// One thread at a time. The engine's mutex lets others hand requests to that thread; none of them
// comes in here.
class Loop {
  public:
    Loop(Backend& backend, unsigned depth, uint32_t block_bytes);
    Loop(const Loop&) = delete;
    Loop& operator=(const Loop&) = delete;

    void add(std::unique_ptr<Request> request);

    // Fills free slots with blocks, earliest deadline first.
    void issue();

    // No slot is free, so that a new request could not start.
    bool full() const { return free_.empty(); }
    // Nothing is in flight or queued.
    bool idle() const { return free_.size() == transfers_.size() && queue_.empty(); }

    // One trip to the backend, then lands what came back.
    void wait(bool wakeable);

    // Fails all that the kernel does not have yet.
    void cancel();

    // The requests that have landed since the last call. Whoever takes them tells their futures,
    // after publishing the stats: a caller whose future is done finds it counted.
    std::vector<Landed> take_landed();
    Stats stats() const;

  private:
    void send(Transfer& transfer);
    void land(Transfer& transfer, int64_t result);
    void advance(Transfer& transfer, uint32_t moved);
    void retry(Transfer& transfer, int error);
    void fail(Transfer& transfer, int error);
    void retire(Transfer& transfer);
    void finish_if_landed(Request* request);
    void account(Kind kind, int change);

    Backend& backend_;
    const uint32_t block_bytes_;
    DeadlineQueue queue_;
    std::vector<Transfer> transfers_;
    std::vector<Transfer*> free_;
    std::vector<Transfer*> parked_;  // waiting out a back-off
    std::vector<Completion> completions_;
    std::vector<Landed> landed_;
    uint64_t sequence_ = 0;
    Stats stats_;
    std::array<uint32_t, kinds> in_flight_{};
    std::array<TimePoint, kinds> busy_since_{};
};

}  // namespace infinity::aio
