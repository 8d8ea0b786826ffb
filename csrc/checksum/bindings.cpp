// The Python face of the core, kept thin: infinity/checksum checks tensors and arrays and holds the
// documentation.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "crc32c.hpp"
#include "python_typed_errors.hpp"
#include "workers.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace infinity::checksum {
namespace {

using Segments = nb::ndarray<const int64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
using Checksums = nb::ndarray<nb::numpy, uint32_t, nb::ndim<1>>;

const Implementation& implementation_of(const std::string& name) {
    std::string names;
    for (const Implementation* each : runnable_implementations()) {
        if (each->name == name) return *each;
        names += (names.empty() ? "" : ", ") + std::string(each->name);
    }
    infinity::raise_config_error(
        "The implementation '" + name + "' is unknown, or this machine cannot run it.",
        "Use one of: " + names + ".");
}

const std::byte* pointer(uintptr_t address) { return reinterpret_cast<const std::byte*>(address); }

uint32_t crc32c_at(uintptr_t address, uint64_t bytes, uint32_t value, const std::string& name) {
    const Implementation& implementation = implementation_of(name);
    const nb::gil_scoped_release without_gil;
    return crc32c(pointer(address), bytes, value, implementation);
}

// The memory of a Python object, which stays where it is until the end of the scope.
class Buffer {
  public:
    // Throws BufferError for memory that is not C-contiguous.
    explicit Buffer(nb::handle object) {
        if (PyObject_GetBuffer(object.ptr(), &memory_, PyBUF_SIMPLE) != 0) throw nb::python_error();
    }
    ~Buffer() { PyBuffer_Release(&memory_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    uintptr_t address() const { return reinterpret_cast<uintptr_t>(memory_.buf); }
    uint64_t bytes() const { return static_cast<uint64_t>(memory_.len); }

  private:
    Py_buffer memory_;
};

uint32_t crc32c_of_buffer(nb::handle object, uint32_t value, const std::string& name) {
    const Buffer buffer(object);
    return crc32c_at(buffer.address(), buffer.bytes(), value, name);
}

// A copy of faultless segments of a memory of `bytes` bytes: no other thread can change it after
// the check. Raises ConfigError.
std::vector<int64_t> checked(const Segments& segments, uint64_t bytes) {
    std::vector<int64_t> rows(segments.data(), segments.data() + segments.size());
    const std::string fault = fault_of_segments(rows.data(), rows.size() / 3, bytes);
    if (!fault.empty()) {
        infinity::raise_config_error(fault,
                                     "Give rows of (offset, bytes, bytes of a block) that lie "
                                     "inside of the memory, with blocks of at least 1 byte.");
    }
    return rows;
}

uint64_t counted(const std::vector<int64_t>& rows) {
    try {
        return block_count(rows.data(), rows.size() / 3);
    } catch (const std::length_error& error) {
        infinity::raise_config_error(error.what(), "Give larger blocks, or fewer segments.");
    }
}

Checksums crc32c_blocks_at(uintptr_t address, uint64_t bytes, const Segments& segments,
                           size_t threads, const std::string& name) {
    const Implementation& implementation = implementation_of(name);
    const std::vector<int64_t> rows = checked(segments, bytes);
    const size_t count = counted(rows);
    std::unique_ptr<uint32_t[]> out(new uint32_t[count]);
    {
        const nb::gil_scoped_release without_gil;
        crc32c_blocks(pointer(address), rows.data(), rows.size() / 3, out.get(), implementation,
                      threads);
    }
    uint32_t* const data = out.get();
    const nb::capsule owner(out.release(),
                            [](void* p) noexcept { delete[] static_cast<uint32_t*>(p); });
    return {data, {count}, owner};
}

}  // namespace
}  // namespace infinity::checksum

NB_MODULE(_checksum, m) {
    using namespace infinity::checksum;
    m.def("implementations", [] {
        std::vector<std::string> names;
        for (const Implementation* each : runnable_implementations()) {
            names.emplace_back(each->name);
        }
        return names;
    });
    m.def("crc32c_at", crc32c_at, "address"_a, "nbytes"_a, "value"_a, "implementation"_a);
    m.def("crc32c_of_buffer", crc32c_of_buffer, "buffer"_a, "value"_a, "implementation"_a);
    m.def("crc32c_blocks_at", crc32c_blocks_at, "address"_a, "nbytes"_a, "segments"_a, "threads"_a,
          "implementation"_a);
    m.def(
        "block_count",
        [](const Segments& segments) { return counted(checked(segments, INT64_MAX)); },
        "segments"_a);
    m.attr("MOST_THREADS") = infinity::checksum::kMostThreads;
}
