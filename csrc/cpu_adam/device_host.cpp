// The kernels of device.cu for the CPU, where tests run them. A loop over warps replaces the grid.
#define INFINITY_HOST_KERNELS
#include "vec_warp.hpp"
// Needs the Vec included above.
#include "kernels.inl"
#include "table.inl"
// Needs kernels.inl and table.inl.
#include "device.inl"

namespace infinity::cpu_adam {
namespace {

constinit const KernelTable kWarpKernels = make_table("warp", nullptr);

void run_update(const DevicePiece& piece, const UpdateArrays& arrays, const Folded& folded,
                const Range& range) {
    kWarpKernels.update[static_cast<int>(folded.rule)][static_cast<int>(piece.gradient)]
                       [static_cast<int>(piece.format)][static_cast<int>(piece.moments)](
                           arrays, arrays, folded, range);
}

template <class Launch>
void each_warp(const void* arguments, unsigned grid, unsigned block,
               void (*run)(const Launch&, uint32_t)) {
    const Launch& launch = *static_cast<const Launch*>(arguments);
    const uint32_t warps = grid * (block / Vec::kWidth);
    for (uint32_t warp = 0; warp < warps; ++warp) run(launch, warp);
}

}  // namespace
}  // namespace infinity::cpu_adam

using namespace infinity::cpu_adam;

#define INFINITY_KERNEL extern "C" __attribute__((visibility("default")))

INFINITY_KERNEL void infinity_update(const void* arguments, unsigned grid, unsigned block) {
    each_warp<UpdateLaunch>(arguments, grid, block, update_tile);
}

INFINITY_KERNEL void infinity_update_pieces(const void* arguments, unsigned grid, unsigned block) {
    each_warp<PiecesLaunch>(arguments, grid, block, update_tile_of_pieces);
}

INFINITY_KERNEL void infinity_squares(const void* arguments, unsigned grid, unsigned block) {
    each_warp<SquaresLaunch>(arguments, grid, block, square_blocks);
}

INFINITY_KERNEL void infinity_fresh_squares(const void* arguments, unsigned grid, unsigned block) {
    each_warp<FreshSquaresLaunch>(arguments, grid, block, square_fresh);
}
