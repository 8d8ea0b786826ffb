// The declarations of uring_abi.hpp against the kernel's header, where the build machine has one.
#include "check.hpp"
#include "uring_abi.hpp"

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>

#include <cstddef>

namespace uring = infinity::aio::uring;

static_assert(sizeof(uring::Sqe) == sizeof(io_uring_sqe));
static_assert(offsetof(uring::Sqe, descriptor) == offsetof(io_uring_sqe, fd));
static_assert(offsetof(uring::Sqe, offset) == offsetof(io_uring_sqe, off));
static_assert(offsetof(uring::Sqe, address) == offsetof(io_uring_sqe, addr));
static_assert(offsetof(uring::Sqe, bytes) == offsetof(io_uring_sqe, len));
static_assert(offsetof(uring::Sqe, operation_flags) == offsetof(io_uring_sqe, rw_flags));
static_assert(offsetof(uring::Sqe, user_data) == offsetof(io_uring_sqe, user_data));
static_assert(offsetof(uring::Sqe, buffer_index) == offsetof(io_uring_sqe, buf_index));
static_assert(sizeof(uring::Cqe) == sizeof(io_uring_cqe));
static_assert(offsetof(uring::Cqe, result) == offsetof(io_uring_cqe, res));
static_assert(sizeof(uring::Params) == sizeof(io_uring_params));
static_assert(offsetof(uring::Params, features) == offsetof(io_uring_params, features));
static_assert(offsetof(uring::Params, sq) == offsetof(io_uring_params, sq_off));
static_assert(offsetof(uring::Params, cq) == offsetof(io_uring_params, cq_off));
static_assert(offsetof(uring::SqOffsets, array) == offsetof(io_sqring_offsets, array));
static_assert(offsetof(uring::CqOffsets, cqes) == offsetof(io_cqring_offsets, cqes));
static_assert(uring::op_fsync == IORING_OP_FSYNC);
static_assert(uring::op_read_fixed == IORING_OP_READ_FIXED);
static_assert(uring::op_write_fixed == IORING_OP_WRITE_FIXED);
static_assert(uring::fsync_datasync == IORING_FSYNC_DATASYNC);
static_assert(uring::enter_getevents == IORING_ENTER_GETEVENTS);
static_assert(uring::register_files == IORING_REGISTER_FILES);
static_assert(uring::mmap_sqes == IORING_OFF_SQES);
#ifdef IORING_FEAT_SINGLE_MMAP
static_assert(uring::feature_single_mmap == IORING_FEAT_SINGLE_MMAP);
#endif
#ifdef IORING_FEAT_EXT_ARG
static_assert(uring::feature_ext_arg == IORING_FEAT_EXT_ARG);
static_assert(uring::enter_ext_arg == IORING_ENTER_EXT_ARG);
static_assert(sizeof(uring::WaitArgument) == sizeof(io_uring_getevents_arg));
static_assert(uring::op_read ==
              IORING_OP_READ);  // enumerators cannot be asked for; older than this
static_assert(uring::op_write == IORING_OP_WRITE);
static_assert(uring::register_files_update == IORING_REGISTER_FILES_UPDATE);
static_assert(uring::register_enable_rings == IORING_REGISTER_ENABLE_RINGS);
static_assert(uring::setup_r_disabled == IORING_SETUP_R_DISABLED);
#endif
#ifdef IORING_SETUP_DEFER_TASKRUN
static_assert(uring::setup_coop_taskrun == IORING_SETUP_COOP_TASKRUN);
static_assert(uring::setup_single_issuer == IORING_SETUP_SINGLE_ISSUER);
static_assert(uring::setup_defer_taskrun == IORING_SETUP_DEFER_TASKRUN);
static_assert(uring::register_buffers2 == IORING_REGISTER_BUFFERS2);
static_assert(uring::register_buffers_update == IORING_REGISTER_BUFFERS_UPDATE);
static_assert(sizeof(uring::ResourceRegister) == sizeof(io_uring_rsrc_register));
static_assert(sizeof(uring::ResourceUpdate) == sizeof(io_uring_rsrc_update2));
static_assert(sizeof(uring::FilesUpdate) == sizeof(io_uring_files_update));
#endif
#endif

int main() { CHECK(sizeof(infinity::aio::uring::Sqe) == 64); }
