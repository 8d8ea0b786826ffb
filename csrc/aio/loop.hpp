// The state of the submission thread: requests on their way through a backend.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "backend.hpp"
#include "queue.hpp"
#include "stats.hpp"

namespace infinity::aio {

// A request that is over, whose future has not been told yet.
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

// The loop belongs to one thread at a time. Other threads hand requests to that thread under the
// engine's mutex, and never call the loop.
class Loop {
  public:
    Loop(Backend& backend, unsigned depth, uint32_t block_bytes);
    Loop(const Loop&) = delete;
    Loop& operator=(const Loop&) = delete;

    void add(std::unique_ptr<Request> request);

    // Fills free slots with blocks, earliest deadline first.
    void issue();

    // True if no slot is free, so that a new request could not start.
    bool full() const { return free_.empty(); }
    // True if nothing is in flight or queued.
    bool idle() const { return free_.size() == transfers_.size() && queue_.empty(); }

    // Waits for the backend once, and lands the transfers that came back.
    void wait(bool wakeable);

    // Fails all transfers that the kernel does not have yet.
    void cancel();

    // The requests that have landed since the last call. The caller publishes the stats and then
    // tells the requests' futures, so that a request whose future is done is already counted.
    std::vector<Landed> take_landed();
    Stats stats() const;

  private:
    void send(Transfer& transfer);
    void land(Transfer& transfer, int64_t result);
    void advance(Transfer& transfer, uint32_t moved);
    void retry(Transfer& transfer, int error);
    void complete(Transfer& transfer);
    void fail(Transfer& transfer, int error);
    void fail(Transfer& transfer, Failure failure);
    void retire(Transfer& transfer);
    void finish_if_landed(Request* request);
    void account(Kind kind, int change);

    Backend& backend_;
    const uint32_t block_bytes_;
    DeadlineQueue queue_;
    std::vector<Transfer> transfers_;
    std::vector<Transfer*> free_;
    std::vector<Transfer*> parked_;  // waiting before they are tried again
    std::vector<Completion> completions_;
    std::vector<Landed> landed_;
    uint64_t sequence_ = 0;
    Stats stats_;
    std::array<uint32_t, kinds> in_flight_{};
    std::array<TimePoint, kinds> busy_since_{};
};

}  // namespace infinity::aio
