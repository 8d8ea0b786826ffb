// What becomes of threads that wait without the GIL when the interpreter goes. Each module that
// includes this has its own.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace infinity {

// [Note: leaving] A daemon thread that sleeps without the GIL cannot get it back once the
// interpreter has begun to go. So a module's last act at exit is to end all waits and see them out.
inline std::atomic<bool> leaving = false;
inline std::atomic<int> waiting = 0;

// A thread is in a wait, or about to be: made and gone with the GIL held.
struct Waiting {
    Waiting() { ++waiting; }
    ~Waiting() { --waiting; }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
};

// At exit, with the GIL held: waits look at `leaving`, and `patience` is for those that do not.
inline void see_waits_out(std::chrono::seconds patience) {
    leaving = true;
    const nanobind::gil_scoped_release without_gil;
    const auto deadline = std::chrono::steady_clock::now() + patience;
    while (waiting > 0 && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

}  // namespace infinity
