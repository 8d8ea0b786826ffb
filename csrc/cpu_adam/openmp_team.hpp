// The OpenMP threads of whoever computes beside the pool.
#pragma once

#include <dlfcn.h>

namespace infinity::cpu_adam {

// Threads that the process's OpenMP runtime keeps for each thread that has computed with it: they
// spin for a while after its last parallel region, so that they begin at once, where a thread of
// the pool has to be woken and to take a CPU from them.
struct Team {
    // GOMP_parallel: runs work(data) in the caller and in the others, and returns when all have.
    void (*parallel)(void (*work)(void*), void* data, unsigned threads, unsigned flags) = nullptr;
    // omp_get_max_threads: how many the caller would have, itself included.
    int (*threads)() = nullptr;

    explicit operator bool() const { return parallel != nullptr && threads != nullptr; }

    // That of the runtime which is loaded for everybody in this process, as torch's is; none if
    // there is none, or if it has other entry points than GCC's.
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
