// The part of the kernel's io_uring interface that is used here. It is declared rather than
// included, because <linux/io_uring.h> is missing or too old on many build machines, manylinux
// images among them. What the running kernel offers is found out at run time anyway.
// tests/native/test_aio_abi.cpp compares these declarations with the header where there is one.
#pragma once

#include <sys/syscall.h>

#include <cstdint>

#ifndef SYS_io_uring_setup  // the same numbers on every architecture since Linux 5.1
#define SYS_io_uring_setup 425
#define SYS_io_uring_enter 426
#define SYS_io_uring_register 427
#endif

namespace infinity::aio::uring {

struct Sqe {
    uint8_t opcode;
    uint8_t flags;
    uint16_t priority;
    int32_t descriptor;
    uint64_t offset;
    uint64_t address;
    uint32_t bytes;
    uint32_t operation_flags;
    uint64_t user_data;
    uint16_t buffer_index;
    uint16_t personality;
    int32_t splice_descriptor;
    uint64_t unused[2];
};
static_assert(sizeof(Sqe) == 64);

struct Cqe {
    uint64_t user_data;
    int32_t result;
    uint32_t flags;
};

struct SqOffsets {
    uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, reserved;
    uint64_t user_address;
};
struct CqOffsets {
    uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, reserved;
    uint64_t user_address;
};
struct Params {
    uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd;
    uint32_t reserved[3];
    SqOffsets sq;
    CqOffsets cq;
};
static_assert(sizeof(Params) == 120);

struct WaitArgument {
    uint64_t signal_mask;
    uint32_t signal_mask_bytes;
    uint32_t reserved;
    uint64_t timeout;  // struct __kernel_timespec*, relative
};
struct KernelTimespec {
    int64_t seconds;
    long long nanoseconds;
};
struct FilesUpdate {
    uint32_t first;
    uint32_t reserved;
    uint64_t descriptors;
};
struct ResourceRegister {
    uint32_t count, flags;
    uint64_t reserved, data, tags;
};
struct ResourceUpdate {
    uint32_t first, reserved;
    uint64_t data, tags;
    uint32_t count, reserved2;
};

inline constexpr uint8_t op_fsync = 3;
inline constexpr uint8_t op_read_fixed = 4;
inline constexpr uint8_t op_write_fixed = 5;
inline constexpr uint8_t op_read = 22;  // Linux 5.6
inline constexpr uint8_t op_write = 23;

inline constexpr uint8_t sqe_fixed_file = 1 << 0;
inline constexpr uint32_t fsync_datasync = 1 << 0;
inline constexpr uint32_t enter_getevents = 1 << 0;
inline constexpr uint32_t enter_ext_arg = 1 << 3;
inline constexpr uint32_t setup_r_disabled = 1 << 6;      // 5.10
inline constexpr uint32_t setup_coop_taskrun = 1 << 8;    // 5.19
inline constexpr uint32_t setup_single_issuer = 1 << 12;  // 6.0
inline constexpr uint32_t setup_defer_taskrun = 1 << 13;  // 6.1
inline constexpr uint32_t feature_single_mmap = 1 << 0;   // 5.4
inline constexpr uint32_t feature_ext_arg = 1 << 8;       // 5.11
inline constexpr unsigned register_files = 2;
inline constexpr unsigned register_files_update = 6;
inline constexpr unsigned register_enable_rings = 12;
inline constexpr unsigned register_buffers2 = 15;  // 5.13
inline constexpr unsigned register_buffers_update = 16;
inline constexpr uint64_t mmap_sq_ring = 0;
inline constexpr uint64_t mmap_sqes = 0x10000000;

}  // namespace infinity::aio::uring
