// Which CPUs this process may use, and which of them the update threads should.
#pragma once

#include <string>
#include <vector>

namespace infinity::cpu_adam {

// The CPUs of the calling thread's affinity mask, ascending.
std::vector<int> affinity_cpus();

// The cgroup's CPU bandwidth limit in CPUs (2.5 means two and a half), the smallest over all
// ancestors, version 1 or 2; infinity where there is none. The arguments are for tests.
double cgroup_quota(const std::string& membership = "/proc/self/cgroup",
                    const std::string& mount = "/sys/fs/cgroup");

// Keeps the first of the given CPUs on every physical core: an update waits for memory, and a
// sibling hyperthread adds no bandwidth.
std::vector<int> one_per_core(const std::vector<int>& cpus,
                              const std::string& sysfs = "/sys/devices/system/cpu");

// The default placement. From 4 cores on, one in eight (at least one) is left to the trainer, the
// first ones, since that is where interrupts and single-threaded work tend to be. With fewer the
// threads take all of them: an update then competes with the trainer, but an update on half of two
// cores would take twice as long.
std::vector<int> worker_cpus(const std::vector<int>& cores, double quota);

}  // namespace infinity::cpu_adam
