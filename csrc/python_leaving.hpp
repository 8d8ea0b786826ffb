// What happens to threads that wait without the GIL when the interpreter exits. Each module that
// includes this file has a state of its own.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace infinity {

// [Note: leaving] A daemon thread that sleeps without the GIL cannot get it back once the
// interpreter has begun to exit. So the last thing that a module does at exit is to end all waits,
// and to let the waiting threads return.
inline std::atomic<bool> leaving = false;
inline std::atomic<int> waiting = 0;

// Counts a thread that is in a wait, or about to be. Made and destroyed with the GIL held.
struct Waiting {
    Waiting() { ++waiting; }
    ~Waiting() { --waiting; }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
};

// Called at exit with the GIL held. Waits check `leaving`. The call gives up after `patience`, for
// waits that do not.
inline void see_waits_out(std::chrono::seconds patience) {
    leaving = true;
    const nanobind::gil_scoped_release without_gil;
    const auto deadline = std::chrono::steady_clock::now() + patience;
    while (waiting > 0 && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

}  // namespace infinity
