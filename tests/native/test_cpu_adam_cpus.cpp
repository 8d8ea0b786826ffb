// Placement: quotas of both cgroup versions, hyperthread siblings, cores left to the trainer.
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <vector>

#include "check.hpp"
#include "cpus.hpp"

namespace infinity::cpu_adam {
namespace {

namespace fs = std::filesystem;

void write(const fs::path& path, const std::string& text) {
    fs::create_directories(path.parent_path());
    std::ofstream(path) << text;
}

void test_quota(const fs::path& root) {
    const std::string membership = root / "cgroup";
    const std::string mount = root / "fs";
    CHECK(std::isinf(cgroup_quota(root / "absent", mount)));
    write(membership, "0::/job/step\n");
    CHECK(std::isinf(cgroup_quota(membership, mount)));
    write(root / "fs/job/step/cpu.max", "max 100000\n");
    CHECK(std::isinf(cgroup_quota(membership, mount)));
    write(root / "fs/job/cpu.max", "250000 100000\n");  // an ancestor's limit counts
    CHECK(cgroup_quota(membership, mount) == 2.5);
    write(root / "fs/job/step/cpu.max", "50000 100000\n");
    CHECK(cgroup_quota(membership, mount) == 0.5);

    write(membership, "4:memory:/m\n3:cpu,cpuacct:/job\n");
    write(root / "fs/cpu,cpuacct/job/cpu.cfs_quota_us", "-1\n");
    write(root / "fs/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n");
    CHECK(std::isinf(cgroup_quota(membership, mount)));
    write(root / "fs/cpu,cpuacct/job/cpu.cfs_quota_us", "300000\n");
    CHECK(cgroup_quota(membership, mount) == 3.0);
}

void test_siblings(const fs::path& root) {
    for (int cpu = 0; cpu < 8; ++cpu) {
        const std::string siblings = std::to_string(cpu % 4) + "," + std::to_string(cpu % 4 + 4);
        write(root / ("cpu" + std::to_string(cpu)) / "topology/thread_siblings_list", siblings);
    }
    CHECK((one_per_core({0, 1, 2, 3, 4, 5, 6, 7}, root) == std::vector<int>{0, 1, 2, 3}));
    CHECK((one_per_core({2, 5, 6}, root) == std::vector<int>{2, 5}));
    CHECK((one_per_core({2, 6}, root / "absent") == std::vector<int>{2, 6}));
}

void test_placement() {
    const auto cores = [](int n) {
        std::vector<int> all(static_cast<size_t>(n));
        std::iota(all.begin(), all.end(), 0);
        return all;
    };
    CHECK((worker_cpus(cores(1), INFINITY) == std::vector<int>{0}));
    CHECK((worker_cpus(cores(2), INFINITY) == std::vector<int>{0, 1}));
    CHECK((worker_cpus(cores(4), INFINITY) == std::vector<int>{1, 2, 3}));
    CHECK(worker_cpus(cores(64), INFINITY).size() == 56);
    CHECK(worker_cpus(cores(64), INFINITY).back() == 63);
    CHECK((worker_cpus(cores(4), 2.5) == std::vector<int>{2, 3}));
    CHECK((worker_cpus(cores(4), 0.5) == std::vector<int>{3}));
    CHECK(!affinity_cpus().empty());
}

}  // namespace
}  // namespace infinity::cpu_adam

int main() {
    std::string name = (std::filesystem::temp_directory_path() / "cpusXXXXXX").string();
    CHECK(mkdtemp(name.data()) != nullptr);
    infinity::cpu_adam::test_quota(name + "/cgroups");
    infinity::cpu_adam::test_siblings(name + "/cpus");
    infinity::cpu_adam::test_placement();
    std::filesystem::remove_all(name);
    return 0;
}
