// What a launch on the device is given: plain structs that infinity/device_update/table.py packs.
//
// [Note: device tables] Where the pieces of all parameters lie is the same in every step: it is
// written down once, in the device's memory. What a step decides - hyper-parameters, seeds, and
// which parameters have an update at all - comes with the launch, by value, so that nothing has to
// be kept until the device has read it.
#pragma once

#include "formats.hpp"

namespace infinity::cpu_adam {

// Elements that a warp updates.
constexpr uint32_t kTile = 1024;
static_assert(kTile % kCodeBlock == 0);

// The part of a parameter that lies in one chunk of its unit's pages.
struct DevicePiece {
    UpdateArrays arrays;  // of the chunk
    uint32_t start;       // of the piece's first element in them
    uint32_t count;       // elements
    uint32_t index;       // of the first one in its parameter, modulo 2^32
    uint32_t parameter;   // among all of the table
    Dtype gradient;
    ParameterFormat format;
    MomentFormat moments;
};
static_assert(sizeof(DevicePiece) == 96);

constexpr uint32_t kMostHypers = 16;
constexpr uint32_t kMostParameters = 640;
constexpr uint8_t kNoUpdate = 255;

static_assert(sizeof(Folded) == 44);

// Updates the parameters [first_parameter, first_parameter + kMostParameters) as far as their
// pieces are among [first_piece, end_piece), a warp a tile.
struct UpdateLaunch {
    const DevicePiece* pieces;
    const uint32_t* tiles_before;  // each piece, and after the last one all
    uint32_t first_piece;
    uint32_t end_piece;
    uint32_t first_parameter;
    Folded hypers[kMostHypers];
    uint32_t seeds[kMostParameters];
    uint8_t hyper[kMostParameters];  // index, or kNoUpdate
};
// What every device takes by value.
static_assert(sizeof(UpdateLaunch) <= 4096);

// Sums the squares of the gradients' blocks, a warp a block.
struct SquaresLaunch {
    const DevicePiece* pieces;
    const uint32_t* blocks_before;  // each piece, and after the last one all
    uint32_t pieces_count;
    double* sums;  // of every block
};

// Adds every parameter's blocks in their order, a warp a parameter.
struct TotalsLaunch {
    const uint32_t* blocks_before;  // each parameter, and after the last one all
    uint32_t parameters;
    const double* sums;
    double* totals;  // of every parameter
};

}  // namespace infinity::cpu_adam
