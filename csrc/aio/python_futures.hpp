// Requests as Python holds them: a future, and the times at which the request began and ended.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <utility>
#include <vector>

#include "engine.hpp"
#include "python_buffers.hpp"
#include "python_errors.hpp"
#include "python_leaving.hpp"

namespace infinity::aio {

namespace nb = nanobind;
using namespace nb::literals;

[[noreturn]] inline void raise_forked() {
    raise_config_error(
        "This I/O engine belongs to the parent process: a forked child has none of "
        "its threads.",
        "Make a new engine in the child, or start children with spawn.");
}

// The times at which a request began and ended. It does not hold the request's memory, so keeping
// it keeps no buffer in use.
class PyTiming {
  public:
    explicit PyTiming(std::shared_ptr<Future> future) : future_(std::move(future)) {}

    std::optional<std::pair<int64_t, int64_t>> times() const {
        if (!future_->done()) return std::nullopt;
        return std::pair(nanoseconds(future_->submitted()), nanoseconds(future_->landed()));
    }

  private:
    static int64_t nanoseconds(TimePoint point) {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(point.time_since_epoch())
            .count();
    }

    std::shared_ptr<Future> future_;
};

class PyFuture {
  public:
    // describe: says what lies at a position of the request's memory, for errors; may be missing.
    PyFuture(std::shared_ptr<Future> future, nb::object owner,
             std::vector<std::shared_ptr<Engine>> engines, nb::object describe = nb::none())
        : future_(std::move(future)),
          owner_(std::move(owner)),
          engines_(std::move(engines)),
          describe_(std::move(describe)) {}
    PyFuture(PyFuture&&) = default;
    ~PyFuture() {
        // The kernel may still use the memory. In a forked child there is no request to wait for.
        if (future_ && owner_.is_valid() && !future_->done() && !process_.forked())
            orphans().adopt(std::move(future_), std::move(owner_));
    }

    bool done() const { return future_->done(); }
    PyTiming timing() const { return PyTiming(future_); }
    // Another future of the same request, which does not hold the request's memory.
    PyFuture watcher() const { return {future_, nb::object(), engines_, describe_}; }

    // Returns false after the time limit. Throws the exception of a signal handler.
    bool landed_by(TimePoint until) {
        while (!future_->done()) {
            if (process_.forked()) raise_forked();
            Future::Wait outcome;
            {
                const Waiting in_a_wait;
                const nb::gil_scoped_release release;
                outcome = future_->wait(until);
            }
            if (outcome == Future::Wait::timeout) return false;
            if (outcome == Future::Wait::interrupted && PyErr_CheckSignals() != 0)
                throw nb::python_error();
        }
        owner_.reset();
        return true;
    }

    // The error of a landed request, or None.
    nb::object error() const {
        const Failure* failure = future_->failure();
        return failure ? make_error(*failure, describe_) : nb::none();
    }
    void check() const {
        if (future_->failure()) raise(error());
    }
    uint64_t bytes() const { return future_->bytes(); }

  private:
    Process process_;
    std::shared_ptr<Future> future_;
    nb::object owner_;
    std::vector<std::shared_ptr<Engine>> engines_;  // an engine closes when nobody holds it
    nb::object describe_;
};

inline TimePoint limit_of(std::optional<double> timeout) {
    // A timeout of some decades, or one that is not a number, means no limit.
    if (!timeout || !(*timeout < 1e9)) return TimePoint::max();
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(
                              std::chrono::duration<double>(std::max(*timeout, 0.0)));
}

[[noreturn]] inline void raise_timeout() {
    PyErr_SetString(PyExc_TimeoutError, "The request is still in flight.");
    throw nb::python_error();
}

inline void wait_all(const std::vector<PyFuture*>& futures, std::optional<double> timeout) {
    const TimePoint until = limit_of(timeout);
    for (PyFuture* future : futures)
        if (!future->landed_by(until)) raise_timeout();
    for (const PyFuture* future : futures) future->check();
}

inline void wait_for_dropped() {
    for (const std::shared_ptr<Future>& each : orphans().futures())
        PyFuture(each, nb::object(), {}).landed_by(TimePoint::max());
    orphans().reap(true);
}

}  // namespace infinity::aio
