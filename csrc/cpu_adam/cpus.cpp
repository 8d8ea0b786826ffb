#include "cpus.hpp"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <sstream>

namespace infinity::cpu_adam {
namespace {

constexpr double kUnlimited = std::numeric_limits<double>::infinity();

std::string first_line(const std::string& path) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    return line;
}

double ratio(double quota, double period) {
    return quota > 0 && period > 0 ? quota / period : kUnlimited;
}

double number(const std::string& text) {
    std::istringstream in(text);
    double value = -1;  // "max" and a missing file read as no limit
    in >> value;
    return in ? value : -1;
}

bool names_cpu(const std::string& controllers) {
    std::istringstream list(controllers);
    for (std::string name; std::getline(list, name, ',');) {
        if (name == "cpu") return true;
    }
    return false;
}

// The limit of one cgroup directory, whichever version's files it has.
double directory_quota(const std::string& directory) {
    std::istringstream v2(first_line(directory + "/cpu.max"));
    std::string quota;
    double period = 0;
    if (v2 >> quota >> period) return ratio(number(quota), period);
    return ratio(number(first_line(directory + "/cpu.cfs_quota_us")),
                 number(first_line(directory + "/cpu.cfs_period_us")));
}

// The smallest limit from the mount's root down to `path` ("/a/b"). Directories that a container
// does not show have no files and set no limit.
double path_quota(const std::string& mount, const std::string& path) {
    double smallest = directory_quota(mount);
    for (size_t slash = path.find('/', 1); path.size() > 1; slash = path.find('/', slash + 1)) {
        smallest = std::min(smallest, directory_quota(mount + path.substr(0, slash)));
        if (slash == std::string::npos) break;
    }
    return smallest;
}

}  // namespace

std::vector<int> affinity_cpus() {
    std::vector<int> cpus;
    for (int size = 1024; size <= 1 << 20; size *= 2) {  // the kernel's mask may be larger
        cpu_set_t* set = CPU_ALLOC(size);
        const size_t bytes = CPU_ALLOC_SIZE(size);
        CPU_ZERO_S(bytes, set);
        const bool ok = sched_getaffinity(0, bytes, set) == 0;
        for (int cpu = 0; ok && cpu < size; ++cpu) {
            if (CPU_ISSET_S(cpu, bytes, set)) cpus.push_back(cpu);
        }
        CPU_FREE(set);
        if (ok) break;
    }
    return cpus;
}

double cgroup_quota(const std::string& membership, const std::string& mount) {
    double smallest = kUnlimited;
    std::ifstream file(membership);
    for (std::string line; std::getline(file, line);) {  // "5:cpu,cpuacct:/path" or "0::/path"
        const size_t first = line.find(':');
        const size_t second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1);
        const std::string path = line.substr(second + 1);
        if (controllers.empty()) {
            smallest = std::min(smallest, path_quota(mount, path));
        } else if (names_cpu(controllers)) {
            smallest = std::min(smallest, path_quota(mount + "/" + controllers, path));
            smallest = std::min(smallest, path_quota(mount + "/cpu", path));
        }
    }
    return smallest;
}

std::vector<int> one_per_core(const std::vector<int>& cpus, const std::string& sysfs) {
    std::vector<int> kept;
    std::vector<std::string> seen;
    for (const int cpu : cpus) {
        const std::string siblings =
            first_line(sysfs + "/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
        if (!siblings.empty()) {
            if (std::find(seen.begin(), seen.end(), siblings) != seen.end()) continue;
            seen.push_back(siblings);
        }
        kept.push_back(cpu);
    }
    return kept;
}

std::vector<int> worker_cpus(const std::vector<int>& cores, double quota) {
    const size_t usable = std::max<size_t>(
        1, static_cast<size_t>(std::min<double>(static_cast<double>(cores.size()), quota)));
    const size_t left = usable < 4 ? 0 : std::max<size_t>(1, usable / 8);
    const size_t threads = std::min(cores.size(), usable - left);
    return {cores.end() - static_cast<std::ptrdiff_t>(threads), cores.end()};
}

}  // namespace infinity::cpu_adam
