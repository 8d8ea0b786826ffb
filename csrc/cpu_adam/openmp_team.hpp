// The OpenMP threads of a thread that computes beside the pool.
#pragma once

#include <dlfcn.h>

namespace infinity::cpu_adam {

// A team: the threads that the process's OpenMP runtime keeps for each thread that has computed
// with it. They spin for a while after their last parallel region, so they begin work at once. A
// thread of the pool would have to be woken, and to take a CPU from them.
struct Team {
    // GOMP_parallel: runs work(data) in the caller and in the other threads, and returns when all
    // have run it.
    void (*parallel)(void (*work)(void*), void* data, unsigned threads, unsigned flags) = nullptr;
    // omp_get_max_threads: the number of threads of the caller's team, the caller included.
    int (*threads)() = nullptr;

    explicit operator bool() const { return parallel != nullptr && threads != nullptr; }

    // The team of the runtime that is loaded for everybody in this process, as torch's is. Empty if
    // there is none, or if the runtime has other entry points than GCC's.
    static Team loaded() {
        Team found;
        found.parallel =
            reinterpret_cast<decltype(found.parallel)>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
        found.threads =
            reinterpret_cast<decltype(found.threads)>(dlsym(RTLD_DEFAULT, "omp_get_max_threads"));
        return found ? found : Team{};
    }
};

}  // namespace infinity::cpu_adam
