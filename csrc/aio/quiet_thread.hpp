// A thread that no signal is delivered to.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <system_error>
#include <thread>
#include <utility>

#include "errors.hpp"

namespace infinity::aio {

// Signals are for the program's own threads; this one, and those it starts, inherit a full mask.
// Throws Unavailable.
template <typename Action>
std::thread quiet_thread(Action&& action) {
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        std::thread thread(std::forward<Action>(action));
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return thread;
    } catch (const std::system_error& error) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw Unavailable(describe_errno("starting a thread", error.code().value()));
    }
}

}  // namespace infinity::aio
