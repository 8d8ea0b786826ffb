// One path's I/O: a queue, a submission thread and a backend.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "backend.hpp"
#include "faults.hpp"
#include "file.hpp"
#include "fork.hpp"
#include "probe.hpp"
#include "request.hpp"
#include "stats.hpp"
#include "waker_affinity.hpp"

namespace infinity::aio {

class Loop;

struct Options {
    std::optional<std::string> directory;  // where backends are tried; none: in memory
    std::string backend = "auto";
    unsigned depth = 32;                                // transfers in flight
    uint32_t block_bytes = 4u << 20;                    // of a transfer, at most
    std::chrono::nanoseconds write_slack{100'000'000};  // a write's deadline is this much later
    std::shared_ptr<Faults> faults;                     // none: no wrapper
};

struct Facts {
    BackendReport chosen;
    std::vector<BackendReport> rejected;  // those tried before it
    uint64_t registered_bytes = 0;
    std::string registration_failure;  // of the last register_buffer; empty: none
};

// [Note: ordering]
// Requests in flight together are unordered, overlapping or not: whoever needs an order waits for
// the first before asking for the second. Blocks go out by deadline, then by order of arrival. A
// sync covers the writes whose futures were done when it was asked for, and no others.
//
// [Note: sleeping]
// The submission thread sleeps in its backend, in the same call that waits for completions. Whoever
// hands it a request wakes it only if it has said, under the mutex, that it sleeps and has a free
// slot: a saturated engine is never interrupted, for the next completion brings it round anyway.
class Engine {
  public:
    // Throws BadRequest, Unavailable, StorageFailure.
    static std::shared_ptr<Engine> create(Options options);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    std::shared_ptr<File> open(const std::string& path, bool writable);
    // Refuses further requests, waits for those under way.
    void close_file(const std::shared_ptr<File>& file);

    // Takes over the requests; their futures are told. A closed engine fails them with ECANCELED.
    void submit(std::vector<std::unique_ptr<Request>> requests);

    // Whether the memory is registered now, until the engine is closed; the reason against it is in
    // the facts.
    bool register_buffer(std::byte* address, size_t bytes);

    // Cancels what the kernel does not have, waits for what it has. Does nothing a second time.
    void close();

    bool closed() const;
    Stats stats() const;
    Facts facts() const;
    const Options& options() const { return options_; }
    std::chrono::nanoseconds slack(Kind kind) const {
        return kind == Kind::write ? options_.write_slack : std::chrono::nanoseconds(0);
    }
    // A forked child has no submission thread: nothing but destruction is allowed there.
    bool forked() const { return process_.forked(); }

  private:
    enum class Next { issue, sleep, sleep_unwakeable, close };
    struct Inbox {
        std::vector<std::unique_ptr<Request>> requests;
        std::vector<std::function<void()>> commands;
    };

    explicit Engine(Options options);
    void run();
    Next exchange(Loop& loop);
    void wake_if_asleep();
    bool call(const std::function<void()>& command);
    void shut_down(Loop& loop);

    const Process process_;
    const Options options_;

    mutable std::mutex mutex_;  // guards all below, and File::pending and File::closed
    std::condition_variable landed_;
    Inbox inbox_;
    bool wake_me_ = false;  // the thread sleeps and has a free slot
    Aside aside_;
    bool closing_ = false;
    Facts facts_;
    std::map<std::byte*, size_t> registered_;
    Stats stats_;

    std::mutex joining_;
    std::unique_ptr<Backend> backend_;
    std::thread thread_;
};

}  // namespace infinity::aio
