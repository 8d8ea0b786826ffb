// The table of CUDA driver calls, looked up in a library at run time. The library is the real
// driver's or any other that exports the same names. No CUDA header is needed to build.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace infinity::driver {

// Types as cuda.h has them. Only the driver knows what the pointers point to.
using Result = int;                   // CUresult
using Device = int;                   // CUdevice
using Address = std::uint64_t;        // CUdeviceptr
using ContextHandle = struct Ctx*;    // CUcontext
using StreamHandle = struct Str*;     // CUstream
using EventHandle = struct Evt*;      // CUevent
using ModuleHandle = struct Mod*;     // CUmodule
using FunctionHandle = struct Func*;  // CUfunction
using MemoryHandle = std::uint64_t;   // CUmemGenericAllocationHandle

// CUmemLocation.
struct Location {
    int type;
    int id;
};
// CUmemAllocationProp.
struct AllocationProperties {
    int type;
    int requested_handle_types;
    Location location;
    void* win32_handle_metadata;
    unsigned char compression_type;
    unsigned char gpu_direct_rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
};
// CUmemAccessDesc.
struct Access {
    Location location;
    int flags;
};
static_assert(sizeof(AllocationProperties) == 32 && sizeof(Access) == 12);
// CUipcMemHandle.
struct SharedHandle {
    unsigned char bytes[64];
};

inline constexpr Result success = 0;
inline constexpr Result not_ready = 600;       // CUDA_ERROR_NOT_READY
inline constexpr unsigned non_blocking = 1;    // CU_STREAM_NON_BLOCKING
inline constexpr unsigned without_timing = 2;  // CU_EVENT_DISABLE_TIMING
inline constexpr unsigned portable = 1;        // CU_MEMHOSTREGISTER_PORTABLE
inline constexpr int on_device = 1;            // CU_MEM_LOCATION_TYPE_DEVICE
inline constexpr int pinned = 1;               // CU_MEM_ALLOCATION_TYPE_PINNED
inline constexpr int minimum = 0;              // CU_MEM_ALLOC_GRANULARITY_MINIMUM
// CU_MEM_ACCESS_FLAGS_PROT_READWRITE. Read-only access is refused for device memory. If it were
// not, a stray write would end the context.
inline constexpr int read_write = 3;
inline constexpr unsigned with_peer_access = 1;      // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
inline constexpr std::size_t most_arguments = 4096;  // bytes of a kernel's arguments
// CU_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE and _END: a kernel's arguments passed as one block
// of bytes.
inline constexpr std::uintptr_t launch_buffer = 1;
inline constexpr std::uintptr_t launch_buffer_size = 2;
inline constexpr std::uintptr_t launch_end = 0;

// Name in the library, field, type. There is one list, so that every call that is declared is also
// loaded.
#define INFINITY_DRIVER_CALLS(X)                                                                   \
    X(cuInit, init, Result (*)(unsigned))                                                          \
    X(cuGetErrorName, error_name, Result (*)(Result, const char**))                                \
    X(cuGetErrorString, error_string, Result (*)(Result, const char**))                            \
    X(cuDeviceGet, device_get, Result (*)(Device*, int))                                           \
    X(cuDevicePrimaryCtxRetain, context_retain, Result (*)(ContextHandle*, Device))                \
    X(cuDevicePrimaryCtxRelease_v2, context_release, Result (*)(Device))                           \
    X(cuCtxGetCurrent, context_get, Result (*)(ContextHandle*))                                    \
    X(cuCtxSetCurrent, context_set, Result (*)(ContextHandle))                                     \
    X(cuCtxSynchronize, synchronize, Result (*)())                                                 \
    X(cuCtxGetStreamPriorityRange, priority_range, Result (*)(int*, int*))                         \
    X(cuStreamCreateWithPriority, stream_create, Result (*)(StreamHandle*, unsigned, int))         \
    X(cuStreamDestroy_v2, stream_destroy, Result (*)(StreamHandle))                                \
    X(cuStreamWaitEvent, stream_wait, Result (*)(StreamHandle, EventHandle, unsigned))             \
    X(cuStreamQuery, stream_query, Result (*)(StreamHandle))                                       \
    X(cuEventCreate, event_create, Result (*)(EventHandle*, unsigned))                             \
    X(cuEventDestroy_v2, event_destroy, Result (*)(EventHandle))                                   \
    X(cuEventRecord, event_record, Result (*)(EventHandle, StreamHandle))                          \
    X(cuEventQuery, event_query, Result (*)(EventHandle))                                          \
    X(cuEventElapsedTime, event_elapsed, Result (*)(float*, EventHandle, EventHandle))             \
    X(cuMemcpyAsync, copy, Result (*)(Address, Address, std::size_t, StreamHandle))                \
    X(cuMemHostRegister_v2, host_register, Result (*)(void*, std::size_t, unsigned))               \
    X(cuMemHostUnregister, host_unregister, Result (*)(void*))                                     \
    X(cuMemGetAddressRange_v2, address_range, Result (*)(Address*, std::size_t*, Address))         \
    X(cuIpcGetMemHandle, share, Result (*)(SharedHandle*, Address))                                \
    X(cuIpcOpenMemHandle_v2, open_shared, Result (*)(Address*, SharedHandle, unsigned))            \
    X(cuIpcCloseMemHandle, close_shared, Result (*)(Address))                                      \
    X(cuMemGetAllocationGranularity, granularity,                                                  \
      Result (*)(std::size_t*, const AllocationProperties*, int))                                  \
    X(cuMemAddressReserve, address_reserve,                                                        \
      Result (*)(Address*, std::size_t, std::size_t, Address, unsigned long long))                 \
    X(cuMemAddressFree, address_free, Result (*)(Address, std::size_t))                            \
    X(cuMemCreate, memory_create,                                                                  \
      Result (*)(MemoryHandle*, std::size_t, const AllocationProperties*, unsigned long long))     \
    X(cuMemRelease, memory_release, Result (*)(MemoryHandle))                                      \
    X(cuMemMap, memory_map,                                                                        \
      Result (*)(Address, std::size_t, std::size_t, MemoryHandle, unsigned long long))             \
    X(cuMemUnmap, memory_unmap, Result (*)(Address, std::size_t))                                  \
    X(cuMemSetAccess, memory_access, Result (*)(Address, std::size_t, const Access*, std::size_t)) \
    X(cuMemsetD8_v2, memory_fill, Result (*)(Address, unsigned char, std::size_t))                 \
    X(cuModuleLoadData, module_load, Result (*)(ModuleHandle*, const void*))                       \
    X(cuModuleUnload, module_unload, Result (*)(ModuleHandle))                                     \
    X(cuModuleGetFunction, module_function,                                                        \
      Result (*)(FunctionHandle*, ModuleHandle, const char*))                                      \
    X(cuLaunchKernel, launch,                                                                      \
      Result (*)(FunctionHandle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,       \
                 unsigned, StreamHandle, void**, void**))

// Thrown with the reason why no table could be made of a library.
class Unloadable : public std::runtime_error {
  public:
    explicit Unloadable(const std::string& reason) : std::runtime_error(reason) {}
};

// Thrown where a call of the driver returned an error.
class CallFailed : public std::runtime_error {
  public:
    CallFailed(std::string call, Result code, std::string name, std::string text);
    const std::string& call() const { return call_; }
    Result code() const { return code_; }
    const std::string& name() const { return name_; }  // the call's name in cuda.h
    const std::string& text() const { return text_; }

  private:
    std::string call_;
    Result code_;
    std::string name_;
    std::string text_;
};

struct Table {
    template <typename Type>
    using Pointer = Type;
#define INFINITY_DRIVER_FIELD(symbol, field, ...) Pointer<__VA_ARGS__> field = nullptr;
    INFINITY_DRIVER_CALLS(INFINITY_DRIVER_FIELD)
#undef INFINITY_DRIVER_FIELD

    // Tells a checker of the order of accesses that work on a stream, or the host, uses bytes. The
    // arguments are (stream, by_host, address, nbytes, writes, label). Null where the library has
    // no checker, as the real driver.
    void (*touched)(StreamHandle, int, Address, std::size_t, int, const char*) = nullptr;

    // Throws CallFailed unless `result` is success.
    void check(Result result, const char* call) const;
};

// Loads the table of a library. Throws Unloadable, with the path and the reason. The library is
// never unloaded: the driver's threads may run in it until the process ends.
Table load(const std::string& path);

}  // namespace infinity::driver
