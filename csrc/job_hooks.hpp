// What a job of the update threads waits for, and what it starts at its end, in another module.
// Modules of Python hand these objects to each other in capsules, and know nothing else of each
// other.
#pragma once

namespace infinity {

class JobHooks {
  public:
    enum class State { pending, happened, failed };

    virtual ~JobHooks() = default;
    // Whether the job may begin. Never blocks. `failed`: it must never begin, and the object keeps
    // the reason. After another answer than `pending` it is not asked again.
    virtual State before() noexcept = 0;
    // Called by the thread that has done the last part of the job, before the job counts as done. A
    // job that must not begin does not call it. An error is kept by the object.
    virtual void after() noexcept = 0;
};

// The name of a capsule that holds a std::vector<std::shared_ptr<JobHooks>>, one for each job.
inline constexpr char kJobHooks[] = "infinity.JobHooks";

}  // namespace infinity
