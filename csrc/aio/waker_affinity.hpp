// Keeps a thread off the CPU of the threads that wake it.
#pragma once

#include <pthread.h>
#include <sched.h>

namespace infinity::aio {

// Moves a thread off the waker's CPU. The kernel often puts a woken thread there, where it
// interrupts the waker for the 50 to 100 us that submitting some MiB takes. The waker is a
// trainer's thread, and the threads that it computes with wait for it meanwhile. On any other CPU
// less time is lost. Not thread-safe.
class Aside {
  public:
    // The thread may run on the CPUs that the calling thread may use now.
    Aside() { known_ = sched_getaffinity(0, sizeof allowed_, &allowed_) == 0; }

    // The calling thread is about to wake `thread`.
    void keep(pthread_t thread) {
        const int here = sched_getcpu();
        if (!known_ || here == avoided_ || here < 0 || here >= CPU_SETSIZE) return;
        avoided_ = here;
        cpu_set_t others = allowed_;
        CPU_CLR(static_cast<size_t>(here), &others);
        if (CPU_COUNT(&others) > 0) pthread_setaffinity_np(thread, sizeof others, &others);
    }

  private:
    cpu_set_t allowed_;
    bool known_;
    int avoided_ = -1;
};

}  // namespace infinity::aio
