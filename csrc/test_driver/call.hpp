// What every call of the driver needs: a name in the library, a result, and the machine's lock.
#pragma once

#include "machine.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace infinity::test_driver {

// Results, as cuda.h numbers them.
inline constexpr int kSuccess = 0;
inline constexpr int kInvalidValue = 1;
inline constexpr int kOutOfMemory = 2;
inline constexpr int kNotInitialized = 3;
inline constexpr int kInvalidDevice = 101;
inline constexpr int kInvalidImage = 200;
inline constexpr int kInvalidContext = 201;
inline constexpr int kInvalidHandle = 400;
inline constexpr int kNotFound = 500;
inline constexpr int kNotReady = 600;
inline constexpr int kIllegalAddress = 700;
inline constexpr int kAlreadyRegistered = 712;
inline constexpr int kNotRegistered = 713;
inline constexpr int kNotSupported = 801;

inline thread_local void* current_context = nullptr;

// A call that concerns streams. Its context must be current, and it takes place unless a test asked
// for another result.
template <typename Action>
int on_device(const char* call, const Action& action) {
    if (current_context == nullptr) return kInvalidContext;
    Machine::Lock lock = machine().lock();
    const int injected = machine().enter(lock, call);
    return injected != kSuccess ? injected : action(lock);
}

// A call that needs no context and is not counted, since others make it every time.
template <typename Action>
int on_context(const char* call, const Action& action) {
    const Machine::Lock lock = machine().lock();
    const int injected = machine().injected(call);
    return injected != kSuccess ? injected : action();
}

// A call that concerns memory alone, see `Machine::enter`.
template <typename Action>
int on_memory(const char* call, const Action& action) {
    if (current_context == nullptr) return kInvalidContext;
    Machine::Lock lock = machine().lock();
    const int injected = machine().begin(call);
    return injected != kSuccess ? injected : action(lock);
}

}  // namespace infinity::test_driver
