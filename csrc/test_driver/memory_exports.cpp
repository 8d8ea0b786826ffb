// The CUDA driver's functions that concern memory alone, over a `Machine`, and their controls.
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "call.hpp"

using namespace infinity::test_driver;  // NOLINT: the library is about one namespace

namespace {

// Structs as cuda.h has them.
struct Location {
    int type;
    int id;
};
struct Properties {
    int type;
    int handle_types;
    Location location;
    void* windows_only;
    unsigned char flags[8];
};
struct Access {
    Location location;
    int flags;
};

int check(const Location& location) {
    constexpr int kOnDevice = 1;
    if (location.type != kOnDevice) return kInvalidValue;
    return location.id == 0 ? kSuccess : kInvalidDevice;
}

int check(const Properties* wanted) {
    constexpr int kPinned = 1;
    constexpr unsigned char kNone[8] = {};
    if (wanted == nullptr || wanted->type != kPinned || wanted->handle_types != 0)
        return kInvalidValue;
    if (wanted->windows_only != nullptr || std::memcmp(wanted->flags, kNone, sizeof kNone) != 0)
        return kInvalidValue;
    return check(wanted->location);
}

int valid(bool done) { return done ? kSuccess : kInvalidValue; }

// Writes as many of the lines as fit, each with its newline. Returns the number of lines.
std::size_t written_to(char* text, std::size_t size, const std::vector<std::string>& lines) {
    std::string all;
    for (const std::string& each : lines) all += each + "\n";
    if (size > 0) {
        const std::size_t count = std::min(size - 1, all.size());
        std::memcpy(text, all.data(), count);
        text[count] = 0;
    }
    return lines.size();
}

}  // namespace

EXPORT int cuCtxSynchronize() {
    return on_memory("cuCtxSynchronize", [&](Machine::Lock& lock) {
        machine().synchronize(lock);
        return kSuccess;
    });
}

EXPORT int cuMemHostRegister_v2(void* memory, std::size_t nbytes, unsigned flags) {
    return on_memory("cuMemHostRegister_v2", [&](Machine::Lock&) {
        constexpr unsigned kPortable = 1;
        if (memory == nullptr || nbytes == 0 || flags != kPortable) return kInvalidValue;
        const bool added =
            machine().registered().add(reinterpret_cast<std::uint64_t>(memory), nbytes);
        return added ? kSuccess : kAlreadyRegistered;
    });
}

// A copy that is not known to be done loses its memory under way, so the checker takes this for a
// write.
EXPORT int cuMemHostUnregister(void* memory) {
    return on_memory("cuMemHostUnregister", [&](Machine::Lock&) {
        const auto address = reinterpret_cast<std::uint64_t>(memory);
        const std::size_t nbytes = machine().registered().remove(address);
        if (nbytes == 0) return kNotRegistered;
        machine().taken_away(address, nbytes, "unregistering");
        return kSuccess;
    });
}

EXPORT int cuMemGetAddressRange_v2(std::uint64_t* start, std::size_t* nbytes,
                                   std::uint64_t address) {
    return on_memory("cuMemGetAddressRange_v2", [&](Machine::Lock&) {
        const auto found = shared_allocation(address);
        if (!found) return kInvalidValue;
        *start = found->begin;
        *nbytes = found->nbytes;
        return kSuccess;
    });
}

EXPORT int cuIpcGetMemHandle(SharedHandle* handle, std::uint64_t address) {
    return on_memory("cuIpcGetMemHandle", [&](Machine::Lock&) {
        const auto found = shared_allocation(address);
        const auto made = found ? handle_of(*found) : std::nullopt;
        if (!made || found->begin != address) return kInvalidValue;
        *handle = *made;
        return kSuccess;
    });
}

EXPORT int cuIpcOpenMemHandle_v2(std::uint64_t* address, SharedHandle handle, unsigned flags) {
    return on_memory("cuIpcOpenMemHandle_v2", [&](Machine::Lock&) {
        constexpr unsigned kWithPeerAccess = 1;
        if (flags != kWithPeerAccess) return kInvalidValue;
        const auto opened = machine().opened().open(handle);
        if (!opened) return kInvalidContext;
        *address = *opened;
        return kSuccess;
    });
}

// As for cuMemHostUnregister: a copy that is not known to be done loses its memory under way.
EXPORT int cuIpcCloseMemHandle(std::uint64_t address) {
    return on_memory("cuIpcCloseMemHandle", [&](Machine::Lock&) {
        const std::size_t nbytes = machine().opened().close(address);
        if (nbytes == 0) return kInvalidValue;
        machine().taken_away(address, nbytes, "closing");
        return kSuccess;
    });
}

EXPORT int cuMemGetAllocationGranularity(std::size_t* nbytes, const Properties* wanted, int) {
    return on_memory("cuMemGetAllocationGranularity", [&](Machine::Lock&) {
        *nbytes = Addresses::granule;
        return check(wanted);
    });
}

EXPORT int cuMemAddressReserve(std::uint64_t* address, std::size_t nbytes, std::size_t alignment,
                               std::uint64_t wanted, unsigned long long flags) {
    return on_memory("cuMemAddressReserve", [&](Machine::Lock&) {
        if (alignment != 0 || wanted != 0 || flags != 0) return kInvalidValue;
        const auto found = machine().addresses().reserve(nbytes);
        if (!found) return kInvalidValue;
        *address = *found;
        return kSuccess;
    });
}

EXPORT int cuMemAddressFree(std::uint64_t address, std::size_t nbytes) {
    return on_memory("cuMemAddressFree", [&](Machine::Lock&) {
        return valid(machine().addresses().free(address, nbytes));
    });
}

EXPORT int cuMemCreate(std::uint64_t* handle, std::size_t nbytes, const Properties* wanted,
                       unsigned long long flags) {
    return on_memory("cuMemCreate", [&](Machine::Lock&) {
        if (flags != 0) return kInvalidValue;
        const int refused = check(wanted);
        if (refused != kSuccess) return refused;
        const auto made = machine().addresses().create(nbytes);
        if (!made) return kInvalidValue;
        *handle = *made;
        return kSuccess;
    });
}

EXPORT int cuMemRelease(std::uint64_t handle) {
    return on_memory("cuMemRelease",
                     [&](Machine::Lock&) { return valid(machine().addresses().release(handle)); });
}

EXPORT int cuMemMap(std::uint64_t address, std::size_t nbytes, std::size_t offset,
                    std::uint64_t handle, unsigned long long flags) {
    return on_memory("cuMemMap", [&](Machine::Lock&) {
        return valid(flags == 0 && machine().addresses().map(address, nbytes, offset, handle));
    });
}

// The driver cannot know what a kernel uses, so the caller must have seen its own work done.
EXPORT int cuMemUnmap(std::uint64_t address, std::size_t nbytes) {
    return on_memory("cuMemUnmap", [&](Machine::Lock&) {
        if (!machine().addresses().unmap(address, nbytes)) return kInvalidValue;
        if (!machine().knows_own_work())
            machine().report("[host: cuMemUnmap] while work may be under way that uses the memory");
        return kSuccess;
    });
}

EXPORT int cuMemSetAccess(std::uint64_t address, std::size_t nbytes, const Access* wanted,
                          std::size_t count) {
    return on_memory("cuMemSetAccess", [&](Machine::Lock&) {
        constexpr int kReadWrite = 3;
        if (count != 1 || wanted->flags != kReadWrite) return kInvalidValue;
        const int refused = check(wanted->location);
        return refused != kSuccess ? refused : valid(machine().addresses().allow(address, nbytes));
    });
}

EXPORT int cuMemsetD8_v2(std::uint64_t address, unsigned char value, std::size_t nbytes) {
    return on_memory("cuMemsetD8_v2", [&](Machine::Lock&) {
        bool done = false;
        machine().run(*machine().find(static_cast<Stream*>(nullptr)), {}, "fill",
                      [&] { done = machine().addresses().fill(address, value, nbytes); });
        return valid(done);
    });
}

// --- controls
// ------------------------------------------------------------------------------------------

// The violations since the last reset, one a line, as many as fit. Returns the number of
// violations.
EXPORT std::size_t infinity_test_violations(char* text, std::size_t size) {
    const Machine::Lock lock = machine().lock();
    return written_to(text, size, machine().violations());
}

// What was registered, reserved or made since the last reset and still exists, one a line.
EXPORT std::size_t infinity_test_left(char* text, std::size_t size) {
    const Machine::Lock lock = machine().lock();
    return written_to(text, size, machine().left());
}

// The first calls since the last reset, in their order, one a line.
EXPORT std::size_t infinity_test_calls(char* text, std::size_t size) {
    const Machine::Lock lock = machine().lock();
    return written_to(text, size, machine().log());
}

// The number of copies since the last reset of which neither end was in registered memory.
EXPORT std::uint64_t infinity_test_unregistered_copies() {
    const Machine::Lock lock = machine().lock();
    return machine().unregistered_copies();
}
