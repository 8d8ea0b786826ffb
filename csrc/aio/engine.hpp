// The I/O of one path: a queue, a submission thread and a backend.
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
    unsigned depth = 32;                                // the most transfers in flight
    uint32_t block_bytes = 4u << 20;                    // the most bytes of a transfer
    std::chrono::nanoseconds write_slack{100'000'000};  // a write's deadline is this much later
    std::shared_ptr<Faults> faults;                     // none: the backend is not wrapped
};

struct Facts {
    BackendReport chosen;
    std::vector<BackendReport> rejected;  // backends tried before this one
    uint64_t registered_bytes = 0;
    std::string registration_failure;  // of the last register_buffer; empty: it succeeded
};

// [Note: ordering]
// Requests in flight together are unordered, whether they overlap or not. A caller that needs an
// order waits for the first request before making the second. Blocks go out by deadline, then by
// order of arrival. A sync covers the writes whose futures were done when the sync was requested,
// and no other writes.
//
// [Note: sleeping]
// The submission thread sleeps in its backend, in the same call that waits for completions. Before
// it sleeps, it notes under the mutex whether it has a free slot. A thread that hands it a request
// wakes it only if it sleeps with a free slot. So a saturated engine is never interrupted: its next
// completion ends the sleep anyway.
class Engine {
  public:
    // Throws BadRequest, Unavailable, StorageFailure.
    static std::shared_ptr<Engine> create(Options options);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // verify: see [Note: verified reads]. Nobody else may write to the file then.
    std::shared_ptr<File> open(const std::string& path, bool writable, bool verify = false);
    // Refuses further requests, and waits for the requests under way.
    void close_file(const std::shared_ptr<File>& file);

    // Takes over the requests and tells their futures when they land. A closed engine fails them
    // with ECANCELED.
    void submit(std::vector<std::unique_ptr<Request>> requests);

    // Registers memory until the engine is closed. Returns whether it is registered. The reason for
    // a failure is in the facts.
    bool register_buffer(std::byte* address, size_t bytes);

    // Cancels the transfers that the kernel does not have, and waits for the others. A second call
    // does nothing.
    void close();

    bool closed() const;
    Stats stats() const;
    Facts facts() const;
    const Options& options() const { return options_; }
    std::chrono::nanoseconds slack(Kind kind) const {
        return kind == Kind::write ? options_.write_slack : std::chrono::nanoseconds(0);
    }
    // True in a forked child, which has no submission thread: only destruction is allowed there.
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

    mutable std::mutex mutex_;  // guards all members below, and File::pending and File::closed
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
