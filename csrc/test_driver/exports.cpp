// The CUDA driver's functions that concern streams and modules, over a `Machine`, and the controls
// of tests (infinity_test_*).
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "call.hpp"

using namespace infinity::test_driver;  // NOLINT: the library is about one namespace

namespace {

struct Description {
    const char* name;
    const char* text;
};
const std::map<int, Description> kDescriptions = {
    {kSuccess, {"CUDA_SUCCESS", "no error"}},
    {kInvalidValue, {"CUDA_ERROR_INVALID_VALUE", "invalid argument"}},
    {kOutOfMemory, {"CUDA_ERROR_OUT_OF_MEMORY", "out of memory"}},
    {kNotInitialized, {"CUDA_ERROR_NOT_INITIALIZED", "initialization error"}},
    {kInvalidDevice, {"CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"}},
    {kInvalidImage, {"CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"}},
    {kInvalidContext, {"CUDA_ERROR_INVALID_CONTEXT", "invalid device context"}},
    {kInvalidHandle, {"CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"}},
    {kNotFound, {"CUDA_ERROR_NOT_FOUND", "named symbol not found"}},
    {kNotReady, {"CUDA_ERROR_NOT_READY", "device not ready"}},
    {kIllegalAddress, {"CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"}},
    {kAlreadyRegistered,
     {"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
      "part or all of the memory is registered already"}},
    {kNotRegistered, {"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "the memory is not registered"}},
    {kNotSupported, {"CUDA_ERROR_NOT_SUPPORTED", "operation not supported"}},
};

int describe(int result, const char** text, const char* Description::* field) {
    const auto found = kDescriptions.find(result);
    *text = found == kDescriptions.end() ? nullptr : found->second.*field;
    return *text == nullptr ? kInvalidValue : kSuccess;
}

constexpr char kHostKernels[] = "infinity-host-kernels:";
using HostKernel = void (*)(const void* arguments, unsigned grid, unsigned block);

char context_of_all;

}  // namespace

EXPORT int cuInit(unsigned) {
    return on_context("cuInit", [] { return kSuccess; });
}

EXPORT int cuGetErrorName(int result, const char** name) {
    return describe(result, name, &Description::name);
}

EXPORT int cuGetErrorString(int result, const char** text) {
    return describe(result, text, &Description::text);
}

EXPORT int cuDeviceGet(int* device, int number) {
    return on_context("cuDeviceGet", [=] {
        if (number != 0) return kInvalidDevice;
        *device = 0;
        return kSuccess;
    });
}

EXPORT int cuDevicePrimaryCtxRetain(void** context, int) {
    return on_context("cuDevicePrimaryCtxRetain", [=] {
        *context = &context_of_all;
        return kSuccess;
    });
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int) { return kSuccess; }

EXPORT int cuCtxGetCurrent(void** context) {
    return on_context("cuCtxGetCurrent", [=] {
        *context = current_context;
        return kSuccess;
    });
}

EXPORT int cuCtxSetCurrent(void* context) {
    return on_context("cuCtxSetCurrent", [=] {
        current_context = context;
        return kSuccess;
    });
}

EXPORT int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    return on_context("cuCtxGetStreamPriorityRange", [=] {
        *least = 0;
        *greatest = -1;
        return kSuccess;
    });
}

EXPORT int cuStreamCreateWithPriority(Stream** stream, unsigned, int) {
    return on_device("cuStreamCreateWithPriority", [&](Machine::Lock&) {
        *stream = machine().make_stream();
        return kSuccess;
    });
}

EXPORT int cuStreamDestroy_v2(Stream* stream) {
    Machine::Lock lock = machine().lock();
    if (stream == nullptr || machine().find(stream) == nullptr) return kInvalidHandle;
    machine().end_stream(lock, stream);
    return kSuccess;
}

EXPORT int cuStreamWaitEvent(Stream* stream, Event* event, unsigned) {
    return on_device("cuStreamWaitEvent", [&](Machine::Lock& lock) {
        Stream* found = machine().find(stream);
        const auto awaited = machine().find(event);
        if (found == nullptr || !awaited) return kInvalidHandle;
        machine().wait(lock, *found, awaited);
        return kSuccess;
    });
}

EXPORT int cuStreamQuery(Stream* stream) {
    return on_device("cuStreamQuery", [&](Machine::Lock&) {
        Stream* found = machine().find(stream);
        if (found == nullptr) return kInvalidHandle;
        return machine().done(*found) ? kSuccess : kNotReady;
    });
}

EXPORT int cuEventCreate(Event** event, unsigned flags) {
    return on_device("cuEventCreate", [&](Machine::Lock&) {
        *event = machine().make_event((flags & 2U) == 0);
        return kSuccess;
    });
}

EXPORT int cuEventDestroy_v2(Event* event) {
    const Machine::Lock lock = machine().lock();
    if (!machine().find(event)) return kInvalidHandle;
    machine().end_event(event);
    return kSuccess;
}

EXPORT int cuEventRecord(Event* event, Stream* stream) {
    return on_device("cuEventRecord", [&](Machine::Lock&) {
        Stream* found = machine().find(stream);
        const auto recorded = machine().find(event);
        if (found == nullptr || !recorded) return kInvalidHandle;
        machine().record(*found, recorded);
        return kSuccess;
    });
}

EXPORT int cuEventQuery(Event* event) {
    return on_device("cuEventQuery", [&](Machine::Lock&) {
        const auto found = machine().find(event);
        if (!found) return kInvalidHandle;
        return machine().query(found) ? kSuccess : kNotReady;
    });
}

EXPORT int cuEventElapsedTime(float* milliseconds, Event* start, Event* end) {
    return on_device("cuEventElapsedTime", [&](Machine::Lock&) {
        const auto from = machine().find(start);
        const auto to = machine().find(end);
        if (!from || !to || !from->timing || !to->timing) return kInvalidHandle;
        if (from->last == nullptr || to->last == nullptr) return kInvalidHandle;
        if (!from->done() || !to->done()) return kNotReady;
        if (machine().clock().on()) {
            *milliseconds =
                static_cast<float>(static_cast<double>(to->last->time - from->last->time) / 1e9);
            return kSuccess;
        }
        *milliseconds =
            std::chrono::duration<float, std::milli>(to->last->at - from->last->at).count();
        return kSuccess;
    });
}

EXPORT int cuMemcpyAsync(std::uint64_t into, std::uint64_t source, std::size_t nbytes,
                         Stream* stream) {
    return on_device("cuMemcpyAsync", [&](Machine::Lock&) {
        Stream* found = machine().find(stream);
        if (found == nullptr) return kInvalidHandle;
        if (nbytes != 0 && (into == 0 || source == 0)) return kInvalidValue;
        for (const std::uint64_t end : {into, source}) {
            if (machine().addresses().kind(end, nbytes) == Addresses::Kind::none)
                return kIllegalAddress;
        }
        const Registered& registered = machine().registered();
        const Opened& opened = machine().opened();
        if (opened.overlaps(into, nbytes)) return kIllegalAddress;
        const bool down = registered.covers(into, nbytes);
        const bool up = !down && registered.covers(source, nbytes);
        if (!down && !up && !opened.overlaps(source, nbytes)) machine().note_unregistered_copy();
        machine().takes(*found,
                        down ? Resource::link_down
                        : up ? Resource::link_up
                             : Resource::device,
                        nbytes);
        const bool moves = nbytes != 0 && machine().clock().copies();
        machine().run(*found, {{source, nbytes, false}, {into, nbytes, true}}, "copy", [=] {
            if (moves) {
                std::memmove(reinterpret_cast<void*>(into), reinterpret_cast<const void*>(source),
                             nbytes);
            }
        });
        return kSuccess;
    });
}

EXPORT int cuModuleLoadData(void** module, const void* image) {
    return on_device("cuModuleLoadData", [&](Machine::Lock&) {
        const std::string text(static_cast<const char*>(image));
        if (text.rfind(kHostKernels, 0) != 0) return kInvalidImage;
        *module = ::dlopen(text.c_str() + sizeof(kHostKernels) - 1, RTLD_NOW | RTLD_LOCAL);
        return *module == nullptr ? kInvalidImage : kSuccess;
    });
}

// The library stays loaded, since a kernel of it may still be queued.
EXPORT int cuModuleUnload(void*) {
    return on_device("cuModuleUnload", [](Machine::Lock&) { return kSuccess; });
}

EXPORT int cuModuleGetFunction(void** function, void* module, const char* name) {
    return on_device("cuModuleGetFunction", [&](Machine::Lock&) {
        *function = ::dlsym(module, name);
        return *function == nullptr ? kNotFound : kSuccess;
    });
}

EXPORT int cuLaunchKernel(void* function, unsigned grid, unsigned grid_y, unsigned grid_z,
                          unsigned block, unsigned block_y, unsigned block_z, unsigned,
                          Stream* stream, void** parameters, void** extra) {
    return on_device("cuLaunchKernel", [&](Machine::Lock&) {
        Stream* found = machine().find(stream);
        if (found == nullptr || function == nullptr) return kInvalidHandle;
        const bool flat = grid_y == 1 && grid_z == 1 && block_y == 1 && block_z == 1;
        if (!flat || parameters != nullptr || extra == nullptr || grid == 0 || block == 0)
            return kInvalidValue;
        const void* data = nullptr;
        std::size_t nbytes = 0;
        for (; *extra != nullptr; extra += 2) {
            if (extra[0] == reinterpret_cast<void*>(1)) data = extra[1];
            if (extra[0] == reinterpret_cast<void*>(2))
                nbytes = *static_cast<std::size_t*>(extra[1]);
        }
        if (data == nullptr || nbytes > 4096) return kInvalidValue;
        // The caller's bytes may go as soon as this returns. The copy is aligned as any struct may
        // need.
        constexpr std::size_t unit = sizeof(std::max_align_t);
        auto arguments =
            std::make_shared<std::vector<std::max_align_t>>((nbytes + unit - 1) / unit);
        std::memcpy(arguments->data(), data, nbytes);
        const auto kernel = reinterpret_cast<HostKernel>(function);
        machine().run(*found, {}, "kernel", [=] { kernel(arguments->data(), grid, block); });
        return kSuccess;
    });
}

// --- controls
// ------------------------------------------------------------------------------------------

// Ends all work and forgets uses, violations, counts and failures. From now on all random choices
// follow `seed`.
EXPORT void infinity_test_reset(std::uint64_t seed, int threads) {
    Machine::Lock lock = machine().lock();
    machine().reset(lock, seed, threads != 0 ? Pace::threads : Pace::stepped);
}

// Makes a stream (null: all streams) begin no work, or go on.
EXPORT void infinity_test_hold(Stream* stream, int held) {
    const Machine::Lock lock = machine().lock();
    machine().hold(stream, held != 0);
}

// Makes the nth next call of this name do nothing and return `code`.
EXPORT void infinity_test_fail(const char* call, int nth, int code) {
    const Machine::Lock lock = machine().lock();
    machine().fail(call, nth, code);
}

// The number of calls of this name since the last reset.
EXPORT std::uint64_t infinity_test_count(const char* call) {
    const Machine::Lock lock = machine().lock();
    return machine().count(call);
}

// Reports that work on a stream, or the calling thread (by_host), uses bytes.
EXPORT void infinity_test_touched(Stream* stream, int by_host, std::uint64_t address,
                                  std::size_t nbytes, int writes, const char* label) {
    const Machine::Lock lock = machine().lock();
    Stream* found = by_host != 0 ? nullptr : machine().find(stream);
    if (by_host == 0 && found == nullptr) return;
    machine().touched(found, {address, nbytes, writes != 0}, label);
}

// Sets the name of a stream in violations.
EXPORT void infinity_test_name(Stream* stream, const char* name) {
    const Machine::Lock lock = machine().lock();
    if (Stream* found = machine().find(stream)) machine().name(*found, name);
}

// Sets whether each thread of the host has a clock of its own. If so, threads that hand memory over
// must say so by release and acquire. Otherwise all threads are one, and their order is taken to be
// right.
EXPORT void infinity_test_separate_threads(int separate) {
    const Machine::Lock lock = machine().lock();
    machine().separate_threads(separate != 0);
}

// While `blind` is set, waits and answers happen but make no order for the checker. A program then
// looks as if nobody had waited, while its bytes are still right and its memory still exists.
EXPORT void infinity_test_blind(int blind) {
    const Machine::Lock lock = machine().lock();
    machine().blind(blind != 0);
}

EXPORT void infinity_test_release(std::uint64_t key) {
    const Machine::Lock lock = machine().lock();
    machine().release(key);
}

EXPORT void infinity_test_acquire(std::uint64_t key) {
    const Machine::Lock lock = machine().lock();
    machine().acquire(key);
}

// A kernel to launch. This library is also a module image, named "infinity-host-kernels:" and its
// path.
struct FillArguments {
    std::uint32_t* into;
    std::uint32_t count;
    std::uint32_t value;
};

EXPORT void infinity_test_fill(const void* arguments, unsigned, unsigned) {
    const auto* fill = static_cast<const FillArguments*>(arguments);
    std::fill_n(fill->into, fill->count, fill->value);
}
