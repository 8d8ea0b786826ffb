// A thread that receives no signals.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <system_error>
#include <thread>
#include <utility>

#include "errors.hpp"

namespace infinity::aio {

// Starts a thread with all signals blocked: signals are for the program's own threads. Threads that
// the new thread starts inherit its mask. Throws Unavailable.
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
